//! Supervises the ranks of an attempt, from their start to the exit of the last, and reports the
//! result.
//!
//! One thread waits for all events at once: messages, output and exits of ranks, and signals. It
//! never blocks on anything else: the terminal, the logs and the rows have their own threads. The
//! [`Supervisor`] decides on actions.

pub(crate) mod local;
mod report;
mod standing;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::channel::Message;
use crate::exit::Exit;
use crate::failure::monotonic;
use crate::nodes::FirstLauncher;
use crate::progress::{Follower, SpoolReader};
use crate::ranks::{RankProgram, Transport};
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::{self, Stop, StopRequest};
use crate::supervisor::{Action, Event, Supervisor, Timeouts};
use local::{Finished, Local};
use report::AttemptReport;
use standing::Standing;

/// Longest interval between two checks of the clock.
const LOOK: Duration = Duration::from_millis(200);

/// The interval while a log has no room.
const LOOK_SOON: Duration = Duration::from_millis(10);

/// Only W&B has such a button.
const PRESSED: &str = "wandb: somebody pressed Stop on the page of the run;";

/// The message of an attempt that was stopped before its start.
const NOT_BEGUN: &str = "stopped before the ranks of all nodes were started; nothing new is saved, and the same command goes on";

/// The result of an attempt.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// The launcher's exit, if this is the last attempt.
    pub(crate) exit: Exit,
    /// The message, the cause first.
    pub(crate) message: Vec<String>,
    /// Whether another attempt could succeed.
    pub(crate) may_restart: bool,
}

impl Attempt {
    /// The last one.
    fn last(exit: Exit, message: Vec<String>) -> Self {
        Self {
            exit,
            message,
            may_restart: false,
        }
    }
}

/// Starts the ranks and supervises them until all have exited.
///
/// - `others`: the launchers of other nodes
/// - `memory`: planned memory of the run, for the message if the machine ran out
///
/// # Errors
///
/// When a rank cannot be started or watched; no rank is left running.
pub(crate) fn attempt(
    program: &RankProgram,
    run_dir: &RunDir,
    timeouts: Timeouts,
    stop: &mut Stop,
    mut others: Option<&mut FirstLauncher>,
    memory: &str,
) -> Result<Attempt> {
    let standing = Standing::of(run_dir.path())
        .with_context(|| format!("{}: the run directory", run_dir.path().display()))?;
    let follower =
        Follower::start(SpoolReader::follow(run_dir)?).context("the progress of the run")?;
    let meeting = match &mut others {
        Some(others) => match others.start(stop)? {
            Some(meeting) => meeting,
            None => return Ok(Attempt::last(Exit::Stopped, vec![NOT_BEGUN.to_owned()])),
        },
        None => Transport::of(program).context("memory for ranks to share")?,
    };
    let local = Local::start(program, run_dir, &meeting)?;
    drop(meeting);
    let supervisor = Supervisor::new(program.ranks, timeouts, monotonic());
    let mut watched = RunningRanks {
        local,
        others,
        supervisor,
        timeouts,
        standing,
        lost: None,
    };
    watched.watch(stop)?;
    drop(follower);
    // A rank that finds the directory gone fails before this process has looked again.
    watched.standing.look();
    let (killed_for, gone) = (watched.lost.take(), watched.standing.lost());
    let (supervisor, finished) = watched.finish(stop);
    let report = AttemptReport {
        supervisor: &supervisor,
        finished: &finished,
        timeouts,
        memory,
        run_dir,
    };
    let attempt = report.attempt();
    let gone = gone.filter(|_| attempt.exit == Exit::Failed);
    Ok(match killed_for.or(gone) {
        Some(line) => Attempt::last(Exit::Failed, vec![line]),
        None => attempt,
    })
}

/// The ranks of an attempt.
struct RunningRanks<'a> {
    local: Local,
    others: Option<&'a mut FirstLauncher>,
    supervisor: Supervisor,
    timeouts: Timeouts,
    standing: Standing,
    /// The message if the run directory is gone, for which the ranks were killed.
    lost: Option<String>,
}

impl RunningRanks<'_> {
    /// Passes all events to the supervisor and executes its actions, until all ranks have exited.
    fn watch(&mut self, stop: &mut Stop) -> Result<()> {
        while !self.supervisor.is_over() {
            let fds = self.others.iter().flat_map(|others| others.fds());
            let fds = fds.chain(self.local.fds());
            stop.wait(fds, Local::look(Some(&self.local)));
            let mut events = self.local.events()?;
            self.local.forward();
            if let Some(others) = &mut self.others {
                events.extend(others.events());
            }
            events.extend(self.request(stop));
            if self.lost.is_none() {
                self.lost = self.standing.lost();
                if self.lost.is_some() {
                    (0..self.supervisor.ranks()).for_each(|rank| self.kill(rank));
                }
            }
            events.push(Event::Tick);
            for event in events {
                if let Event::Said(rank, Message::Beat { phase, step, .. }) = &event
                    && *phase != self.supervisor.at(*rank).phase
                {
                    screen::detail(&format!("rank {rank}: {phase}, step {step}"));
                }
                for action in self.supervisor.on(monotonic(), event) {
                    let at = self.supervisor.at(action.rank());
                    match &mut self.others {
                        Some(others) if !self.local.has(action.rank()) => others.act(&action, at),
                        _ => {
                            let note = self.local.act(&action, at);
                            note.iter().for_each(|note| screen::note(note));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn kill(&mut self, rank: usize) {
        let (kill, at) = (Action::Kill(rank), self.supervisor.at(rank));
        match &mut self.others {
            Some(others) if !self.local.has(rank) => others.act(&kill, at),
            _ => drop(self.local.act(&kill, at)),
        }
    }

    /// The event for a request of a signal or a tracker.
    fn request(&self, stop: &mut Stop) -> Option<Event> {
        let (asked, next) = match stop.request()? {
            StopRequest::Leave(signal) => {
                (format!("{}:", stop::name(signal)), "a second Ctrl-C kills")
            }
            StopRequest::Pressed => (PRESSED.to_owned(), "Ctrl-C kills"),
            StopRequest::LeaveNow(signal) => return Some(Event::LeaveNow(signal)),
        };
        let (leave, them) = match self.supervisor.ranks() {
            1 => ("the rank saves and exits", "it"),
            _ => ("the ranks save and exit", "them"),
        };
        let grace = self.timeouts.grace.as_secs();
        screen::note(&format!(
            "{asked} {leave}, {grace} s at most; {next} {them}"
        ));
        Some(Event::Leave)
    }

    /// The results of all ranks, in their order.
    fn finish(self, stop: &Stop) -> (Supervisor, Finished) {
        let mut finished = self.local.finish();
        if let Some(others) = self.others {
            let far = others.finish(stop);
            finished.ranks.extend(far.ranks);
            finished.was_oom_killed |= far.was_oom_killed;
        }
        (self.supervisor, finished)
    }
}
