//! `spd-launch`: one process per device, and recovery when one dies.
//!
//! ```text
//! cli -> run: load, run plan, table     refuses all bad input
//!          -> world                     the environment of this launcher, and its node in the run
//!          -> slurm                     the script for `sbatch`, if asked for
//!          -> run_dir                   the run directory, created atomically
//!          -> nodes                     the launchers of other nodes, which the first one commands
//!          -> supervise -> ranks        this program again, as `spd-launch rank`, supervised
//!                       -> channel      messages of a rank: heartbeat, failure
//!                       -> output       its output: logged, the last lines kept
//!                       -> stop         signals: save and exit, or exit now
//!                       -> supervisor   decides on all of these
//!                       -> progress     its rows, shown on the screen
//!          -> track                     beside the run: trackers, samples of the machine, the page
//!          -> launched                  the recorded result
//!          -> summary                   the results at the end, printed
//!          -> hub                       weights of the hub, fetched before anything starts
//!     -> tokenize                       text, JSON lines and parquet to token datasets
//!     -> inspect                        verifies and shows datasets, checkpoints, weights, runs
//!     -> check                          measures whether a language model sees later tokens
//!     -> ship                           sends rows that trackers have not received
//!     -> report, watch                  a page about runs, as a file or live
//!     -> runs, tail, stop_runs          lists runs, follows their rows, asks them to save and exit
//!     -> configs                        the shipped run files
//!     -> exchange                       checkpoints of the SPD reference; runs for `wandb sync`
//!     -> again                          evaluates or draws a checkpoint again
//!     -> harvest                        what each component does over text, as tables
//!     -> attribute                      what its components and logits come from, as a table
//!     -> compare                        matches the components of runs
//!     -> probe, ablate                  components on a prompt, and the output without some
//!     -> completions                    completion scripts of shells
//!     -> doctor                         resources for runs on GPUs, and whether a GPU works
//!     -> bench, profile                 the time of a step, and where it goes
//!     -> sweep                          several runs, each this program again, and one table
//! ```

mod ablate;
mod again;
mod attribute;
mod bench;
mod channel;
mod check;
mod children;
mod cli;
mod compare;
mod completions;
mod configs;
mod doctor;
mod exchange;
mod exit;
mod failure;
mod gpus;
mod harvest;
mod hub;
mod inspect;
mod launched;
mod memory;
mod nodes;
mod output;
mod plan;
mod probe;
mod profile;
mod progress;
mod prompt;
mod rank;
mod ranks;
mod report;
mod restart;
mod run;
mod run_dir;
mod runs;
mod screen;
mod ship;
mod slurm;
mod stop;
mod stop_runs;
mod straggler;
mod summary;
mod supervise;
mod supervisor;
mod sweep;
mod table;
mod tail;
mod threads;
mod tokenize;
mod track;
mod vary;
mod wait;
mod watch;
mod world;

use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use spd_trainer::Fault;

use crate::cli::{Cli, Command, VERSION};
use crate::exit::Exit;
use crate::screen::Style;

/// The program `spd-launch`, with the arguments of this process.
pub fn main() -> ExitCode {
    let is_rank = std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "rank");
    spd_tracker::set_version(VERSION);
    open_many_files();
    let handled = stop::handle_signals(is_rank);
    ranks::name_process();
    let exit = match (handled, Cli::try_parse()) {
        (Ok(()), Ok(cli)) => run(cli),
        (Ok(()), Err(said)) => refused(&said),
        (Err(error), _) => {
            screen::error(&format!("cannot install signal handlers: {error}"));
            Exit::Failed
        }
    };
    if let Some(line) = screen::first_error() {
        world::tell_torchrun(line);
    }
    screen::finish(stop::asked);
    spd_files::settle();
    exit.into()
}

/// Raises the limit of open files to its maximum for this process and its ranks: a dataset can have
/// thousands of shards, and the initial limit is often 1024.
fn open_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    // If it is refused, the initial limit may be enough.
    let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
}

fn run(cli: Cli) -> Exit {
    let style = Style {
        quiet: cli.quiet,
        verbose: cli.verbose,
        ..Style::default()
    };
    match (&cli.command, &cli.run) {
        (None, Some(asked)) => style.of_run(asked.json).choose(),
        _ => style.choose(),
    }
    if cli.command.is_some()
        && let Some(asked) = &cli.run
    {
        screen::error(&format!(
            "{}: expected a command or a run file, found both; only -q and -v may precede a command",
            asked.config
        ));
        return Exit::BadInput;
    }
    match cli.command {
        None | Some(Command::Rank(_) | Command::Tokenize(_)) => {}
        Some(_) => stop::restore_defaults(),
    }
    let ended = match (cli.command, cli.run) {
        (Some(Command::Tokenize(asked)), _) => tokenize::tokenize(&asked),
        (Some(Command::Inspect(asked)), _) => inspect::inspect(&asked),
        (Some(Command::Check(asked)), _) => check::check(&asked),
        (Some(Command::Export(asked)), _) => exchange::export(&asked),
        (Some(Command::Import(asked)), _) => exchange::import(&asked),
        (Some(Command::Bench(asked)), _) => bench::bench(&asked),
        (Some(Command::Profile(asked)), _) => profile::profile(&asked),
        (Some(Command::Eval(asked)), _) => again::eval(&asked),
        (Some(Command::Figures(asked)), _) => again::figures(&asked),
        (Some(Command::Harvest(asked)), _) => harvest::harvest(&asked),
        (Some(Command::Attribute(asked)), _) => attribute::attribute(&asked),
        (Some(Command::Compare(asked)), _) => compare::compare(&asked),
        (Some(Command::Probe(asked)), _) => probe::probe(&asked),
        (Some(Command::Ablate(asked)), _) => ablate::ablate(&asked),
        (Some(Command::Completions(asked)), _) => completions::completions(asked.shell),
        (Some(Command::Ship(asked)), _) => ship::ship(&asked),
        (Some(Command::Report(asked)), _) => report::report(&asked),
        (Some(Command::Watch(asked)), _) => watch::watch(&asked),
        (Some(Command::Runs(asked)), _) => runs::runs(&asked),
        (Some(Command::Tail(asked)), _) => tail::tail(&asked),
        (Some(Command::Stop(asked)), _) => stop_runs::stop(&asked),
        (Some(Command::Configs(asked)), _) => Ok(configs::configs(asked.name.as_deref())),
        (Some(Command::Doctor(asked)), _) => Ok(doctor::doctor(&asked)),
        (Some(Command::DoctorProbe(asked)), _) => doctor::probe(&asked),
        (Some(Command::Rank(asked)), _) => rank::rank(&asked),
        (None, Some(asked)) if asked.seeds.is_some() || !asked.sweep.is_empty() => {
            sweep::sweep(&asked)
        }
        (None, Some(asked)) => run::run(&asked),
        (None, None) => Err(Fault::BadInput(
            "no run file was named; try `spd-launch configs/tms_5-2.toml`".to_owned(),
        )),
    };
    match ended {
        Ok(exit) => exit,
        Err(Fault::BadInput(line) | Fault::Held(line)) => {
            screen::error(&line);
            Exit::BadInput
        }
        Err(Fault::BadInputs(lines)) => {
            lines.iter().for_each(|line| screen::error(line));
            Exit::BadInput
        }
        Err(Fault::NotFinite(line)) => {
            screen::error(&line);
            Exit::Failed
        }
        Err(Fault::Failed(error)) => {
            screen::error(&format!("{error:#}"));
            Exit::Failed
        }
    }
}

/// Prints clap's help or error through the screen, as all output.
fn refused(said: &clap::Error) -> Exit {
    let text = said.render().to_string();
    if said.use_stderr() {
        screen::note(text.trim_end());
        Exit::BadInput
    } else {
        screen::result(&text);
        Exit::Done
    }
}
