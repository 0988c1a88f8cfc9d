//! `spd-launch CONFIG`: checks a run, then runs it to its end.

mod attempts;
pub(crate) mod check;

use std::env;
use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context;
use spd_checkpoint::Lock;
use spd_report::Book;
use spd_trainer::run_file::Run;
use spd_trainer::{Fault, RunPlan};

use crate::cli::RunArgs;
use crate::exit::Exit;
use crate::launched::Launched;
use crate::nodes::{Joining, NodeResources, OtherLauncher};
use crate::restart::Restarts;
use crate::run_dir::{DirState, RunDir};
use crate::slurm::Job;
use crate::stop::{self, Stop};
use crate::track::Track;
use crate::world::Node;
use crate::{gpus, plan, screen, summary};
use attempts::{Attempts, program, timeouts};
use check::{Checked, check};

/// Runs a run file to its end, continuing an earlier launch.
///
/// # Errors
///
/// Bad input, before anything is created; failures of this machine. Failures of ranks are printed
/// here and returned as an exit.
pub(crate) fn run(asked: &RunArgs) -> Result<Exit, Fault> {
    let node = match asked.slurm {
        Some(nodes) => Node::planned(nodes),
        None => Node::from_env().map_err(Fault::BadInput)?,
    };
    let unseen = gpus::unseen(asked, asked.ranks() * node.nodes())?;
    if let Some(jobs) = asked.jobs {
        return Err(Fault::BadInput(format!(
            "--jobs {jobs}: there is one run; it goes with --seeds or --sweep"
        )));
    }
    let Checked {
        run,
        run_dir,
        found,
        destination,
        mut run_plan,
        mut files,
    } = check(asked, &node, unseen.is_some())?;
    run_plan
        .rows
        .extend(unseen.map(|row| ("GPUs".to_owned(), row)));
    if let Some(derivation) = node.derivation() {
        run_plan.rows.push(("node".to_owned(), derivation));
    }
    if found == DirState::Finished {
        return if node.is_first() {
            finished(&run_dir)
        } else {
            Ok(Exit::Done)
        };
    }
    if !node.is_first() {
        if asked.dry_run {
            return Ok(Exit::Done);
        }
        return join(asked, &node, &run, &run_dir);
    }
    let plan = plan::text(&run.name, &destination, &run_plan);
    if asked.slurm.is_some() {
        screen::note(plan.trim_end());
        let command = own_command()?;
        let job = Job {
            name: &run.name,
            nodes: node.count,
            threads: asked.threads_of_rank() * asked.ranks(),
            gpus: asked.gpus,
            memory: &run_plan.memory,
            command,
        };
        screen::result(&job.script());
        return Ok(Exit::Done);
    }
    if asked.dry_run {
        screen::result(&plan);
        screen::note("dry run: nothing was created");
        return Ok(Exit::Done);
    }
    screen::plan(&plan);
    files.fetch([&run])?;
    let hold = if found == DirState::Nothing {
        create(&run_dir, &run, asked.fresh)?
    } else {
        let hold = run_dir.hold().map_err(Fault::BadInput)?;
        run_dir.rewrite(&run).map_err(Fault::BadInput)?;
        hold
    };
    let launched = Launched::now(hold);
    let mut track = None;
    let ended = launch(asked, &node, (&run, &run_dir), &run_plan, &mut track);
    let book = launched.leave(&ended, track);
    let (exit, _) = ended?;
    if exit == Exit::Done {
        show_end(&run_dir, book)?;
    }
    Ok(exit)
}

/// Runs a run whose directory is locked; returns how it ended, and the first line about that.
/// `track` keeps the trackers, samples and page.
fn launch(
    asked: &RunArgs,
    node: &Node,
    (run, run_dir): (&Run, &RunDir),
    run_plan: &RunPlan,
    track: &mut Option<Track>,
) -> Result<(Exit, String), Fault> {
    let mut stop = Stop::listen().context("cannot install signal handlers")?;
    let mut others = None;
    if node.count > 1 {
        let joining = Joining::open(run_dir, node, here(asked))?;
        others = joining.join(run, joins_within(asked), &mut stop)?;
        if others.is_none() {
            let said = "stopped before the launchers of all nodes were there";
            return Ok((Exit::Stopped, said.to_owned()));
        }
    }
    let program = program(asked, node, run_dir)?;
    let memory = plan::memory(&run_plan.memory);
    let restarts = Restarts::new(asked.restarts);
    let ranks = Attempts {
        program,
        run_dir,
        timeouts: timeouts(asked),
        memory: &memory,
    };
    let track = track.insert(Track::of_run(run_dir.path(), run, node));
    stop.add_flag(track.stop());
    let ended = ranks.run(restarts, &mut stop, others.as_mut());
    if let Some(others) = others {
        // The other launchers do not wait for trackers.
        match &ended {
            Ok((exit, _)) => others.quit(*exit, None),
            Err(error) => others.quit(Exit::Failed, Some(&format!("{error:#}"))),
        }
    }
    ended.map_err(Fault::Failed)
}

/// The command line of this program, with its absolute path.
fn own_command() -> anyhow::Result<Vec<OsString>> {
    let program = env::current_exe().context("cannot find this program's executable")?;
    let arguments = env::args_os().skip(1);
    Ok([program.into_os_string()]
        .into_iter()
        .chain(arguments)
        .collect())
}

/// Makes and locks the directory of a run. An existing one is moved aside, and back if the creation
/// fails.
///
/// # Errors
///
/// When the file system refuses, or a launcher holds the existing directory.
pub(crate) fn create(run_dir: &RunDir, run: &Run, fresh: bool) -> Result<Lock, Fault> {
    let _whole = stop::hold();
    let in_the_way = fresh && run_dir.find_old().map_err(Fault::BadInput)?;
    let aside = if in_the_way {
        Some(run_dir.set_aside().map_err(Fault::BadInput)?)
    } else {
        None
    };
    let prepared = run_dir.prepare(run).map_err(Fault::BadInput);
    match (&prepared, &aside) {
        (Ok(_), Some(aside)) => screen::note(&format!(
            "the old {} is now {}",
            run_dir.path().display(),
            aside.path().display()
        )),
        (Err(_), Some(aside)) => run_dir
            .put_back(aside)
            .with_context(|| format!("{}: cannot be moved back", aside.path().display()))?,
        (_, None) => {}
    }
    prepared
}

/// Runs a launcher that is not the first.
fn join(asked: &RunArgs, node: &Node, run: &Run, run_dir: &RunDir) -> Result<Exit, Fault> {
    let mut stop = Stop::listen().context("cannot install signal handlers")?;
    let of_node = (run, run_dir, here(asked));
    let member = OtherLauncher::join(node, of_node, joins_within(asked), &mut stop)?;
    let Some(member) = member else {
        return Ok(Exit::Stopped);
    };
    let program = program(asked, node, run_dir)?;
    let track = Track::of_node(run_dir.path(), node);
    let served = member.serve(&program, run_dir, &mut stop);
    track.finish(served.as_ref().map_or(Exit::Failed, |exit| *exit));
    served.map_err(Fault::Failed)
}

/// The resources of this node.
fn here(asked: &RunArgs) -> NodeResources {
    NodeResources {
        ranks: asked.ranks(),
        computed_by: spd_trainer::computed_by(asked.gpus),
    }
}

/// How long the launchers of a run wait for each other.
fn joins_within(asked: &RunArgs) -> Duration {
    Duration::from_secs(asked.join_seconds)
}

fn finished(run_dir: &RunDir) -> Result<Exit, Fault> {
    show_end(run_dir, None)?;
    screen::note(&format!(
        "{} is finished; --fresh runs it again (the old directory is moved aside), --out elsewhere",
        run_dir.path().display()
    ));
    Ok(Exit::Done)
}

/// Shows the verdict and the results.
///
/// - `book`: what the page of the run has read, if it was just made
fn show_end(run_dir: &RunDir, book: Option<Book>) -> anyhow::Result<()> {
    let (text, summary) = summary::read(&run_dir.summary())?;
    let book = book.or_else(|| Book::open(&[run_dir.path().to_owned()]).ok());
    let verdict = book.as_ref().and_then(Book::verdict);
    let verdict = verdict.map_or(String::new(), |verdict| format!("{verdict}\n\n"));
    let place = format!("results are in {}\n", run_dir.path().display());
    screen::result_of(&format!("{verdict}{text}\n"), &place, summary);
    Ok(())
}
