//! `spd-launch completions SHELL`: prints the completion script of a shell.

use anyhow::Context;
use clap::CommandFactory;
use clap::builder::PossibleValuesParser;
use clap_complete::{Shell as Known, generate};
use spd_configs::Shipped;
use spd_trainer::Fault;

use crate::cli::{Cli, Shell};
use crate::exit::Exit;
use crate::screen;

/// Prints the completion script of a shell.
///
/// # Errors
///
/// None that a user can cause.
pub(crate) fn completions(shell: Shell) -> Result<Exit, Fault> {
    let names: Vec<&str> = Shipped::ALL.iter().map(|shipped| shipped.name).collect();
    let script = match shell {
        Shell::Bash => {
            // Bash completes files where no name fits.
            let names = PossibleValuesParser::new(&names);
            let command = Cli::command().mut_arg("config", |config| config.value_parser(names));
            // clap_complete 4.6 spells commands of a program with a dash in its name in two ways.
            script(Known::Bash, command)?.replace("spd__subcmd__launch", "spd__launch")
        }
        Shell::Zsh => script(Known::Zsh, Cli::command())?,
        Shell::Fish => {
            // Its generator leaves out the values of positional arguments.
            let mut script = script(Known::Fish, Cli::command())?;
            for (when, files) in [("needs_command", ""), ("using_subcommand configs", "-f ")] {
                let names = names.join(" ");
                script.push_str(&format!(
                    "complete -c spd-launch -n \"__fish_spd_launch_{when}\" {files}-a \"{names}\"\n"
                ));
            }
            script
        }
    };
    screen::result(&script);
    Ok(Exit::Done)
}

fn script(shell: Known, mut command: clap::Command) -> Result<String, Fault> {
    let mut script = Vec::new();
    generate(shell, &mut command, "spd-launch", &mut script);
    Ok(String::from_utf8(script).context("a script of completions")?)
}
