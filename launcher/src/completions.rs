//! `spd-launch completions SHELL`: what a shell completes of the command line.

use anyhow::Context;
use clap::CommandFactory;
use clap::builder::PossibleValuesParser;
use clap_complete::{Shell as Known, generate};
use spd_configs::Shipped;
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
    let names: Vec<&str> = Shipped::ALL.iter().map(|shipped| shipped.name).collect();
    let script = match shell {
        Shell::Bash => {
            // Where no name fits, bash completes files.
            let names = PossibleValuesParser::new(&names);
            let command = Cli::command().mut_arg("config", |config| config.value_parser(names));
            // clap_complete 4.6 has two spellings of a command whose program has a dash in its name.
            script(Known::Bash, command)?.replace("spd__subcmd__launch", "spd__launch")
        }
        Shell::Zsh => script(Known::Zsh, Cli::command())?,
        Shell::Fish => {
            // It is told of no values that have no flag.
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
