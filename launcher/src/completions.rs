//! `spd-launch completions SHELL`: what a shell completes of the command line.

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::{Shell as Known, generate};
use spd_trainer::Fault;

use crate::cli::{Cli, Shell};
use crate::exit::Exit;
use crate::screen;

/// Prints the completions of a shell.
///
/// # Errors
///
/// None that a user can bring about: the script is text.
pub(crate) fn completions(shell: Shell) -> Result<Exit, Fault> {
    let shell = match shell {
        Shell::Bash => Known::Bash,
        Shell::Zsh => Known::Zsh,
        Shell::Fish => Known::Fish,
    };
    let mut script = Vec::new();
    generate(shell, &mut Cli::command(), "spd-launch", &mut script);
    let script = String::from_utf8(script).context("a script of completions")?;
    screen::result(&script);
    Ok(Exit::Done)
}
