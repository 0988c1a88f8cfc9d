//! The ranks of this node, and events from them.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::HumanDuration;
use serde::{Deserialize, Serialize};

use super::{LOOK, LOOK_SOON};
use crate::channel::{self, Listener};
use crate::memory;
use crate::output::Output;
use crate::progress::place;
use crate::ranks::{Process, RankProgram, Transport};
use crate::run_dir::RunDir;
use crate::screen;
use crate::supervisor::{Action, Event, Position, ProcessEnd};
use crate::threads;

/// The ranks of this node during an attempt.
#[derive(Debug)]
pub(crate) struct Local {
    /// Their numbers among all ranks.
    here: Range<usize>,
    ranks: Vec<RankProcess>,
    /// Out-of-memory kills before the attempt.
    oom_kills: u64,
    forwarded: Instant,
}

/// A rank, its channel and its output.
#[derive(Debug)]
struct RankProcess {
    process: Process,
    listener: Listener,
    output: Output,
    /// Whether a signal had stopped it when it was killed.
    was_stopped: bool,
    is_gone: bool,
}

/// The results of a node's ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finished {
    pub(crate) ranks: Vec<Ended>,
    /// Whether there were out-of-memory kills in their control group.
    pub(crate) was_oom_killed: bool,
}

/// A rank that has exited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) pid: u32,
    /// Its last lines of output.
    pub(crate) lines: Vec<String>,
    /// Whether a signal had stopped it when it was killed.
    #[serde(default)]
    pub(crate) was_stopped: bool,
    /// Its host, if that is another node.
    #[serde(skip)]
    pub(crate) host: Option<String>,
    /// Why its launcher is lost, if it is.
    #[serde(skip)]
    pub(crate) lost: Option<String>,
}

impl Local {
    /// Starts the ranks of this node.
    ///
    /// # Errors
    ///
    /// When one cannot be started; no rank is left running.
    pub(crate) fn start(
        program: &RankProgram,
        run_dir: &RunDir,
        meeting: &Transport,
    ) -> Result<Self> {
        let oom_kills = memory::oom_kills();
        let here = program.here.clone();
        let start = |rank| RankProcess::start(program, run_dir, rank, meeting);
        let ranks = here.clone().map(start).collect::<Result<Vec<_>>>()?;
        for (index, rank) in here.clone().zip(&ranks) {
            screen::detail(&format!(
                "rank {index} is process {}; it prints to {}",
                rank.process.pid(),
                run_dir.log(index).display()
            ));
        }
        Ok(Self {
            here,
            ranks,
            oom_kills,
            forwarded: Instant::now(),
        })
    }

    /// The file descriptors to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let ranks = self.ranks.iter();
        ranks.flat_map(|rank| rank.listener.fd().into_iter().chain(rank.output.fd()))
    }

    /// The longest time to poll.
    pub(crate) fn look(local: Option<&Self>) -> Duration {
        let mut ranks = local.iter().flat_map(|local| &local.ranks);
        if ranks.any(|rank| rank.output.is_held()) {
            LOOK_SOON
        } else {
            LOOK
        }
    }

    /// Events since the last call.
    ///
    /// # Errors
    ///
    /// When the operating system cannot say.
    pub(crate) fn events(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        for (index, rank) in self.here.clone().zip(&mut self.ranks) {
            // The exit is read first: all messages before it have then arrived.
            let status = rank.process.ended();
            let status = status.with_context(|| format!("rank {index}: cannot be watched"))?;
            let said = rank.listener.read().into_iter();
            events.extend(said.map(|message| Event::Said(index, message)));
            if let Some(status) = status
                && !std::mem::replace(&mut rank.is_gone, true)
            {
                events.push(Event::Ended(index, ProcessEnd::of(status)));
            }
            rank.output.read();
        }
        Ok(events)
    }

    /// Shows output of the ranks periodically, at a readable rate.
    pub(crate) fn forward(&mut self) {
        if self.forwarded.elapsed() < LOOK {
            return;
        }
        for (index, rank) in self.here.clone().zip(&mut self.ranks) {
            let (lines, skipped) = rank.output.news();
            if skipped > 0 {
                screen::progress(&format!(
                    "[{index}] ({skipped} lines omitted here, see the log)"
                ));
            }
            for line in lines {
                screen::progress(&format!("[{index}] {line}"));
            }
        }
        self.forwarded = Instant::now();
    }

    /// Whether a rank is on this node.
    pub(crate) fn has(&self, rank: usize) -> bool {
        self.here.contains(&rank)
    }

    /// Applies an action to a rank of this node; returns a message if that is all the action is.
    pub(crate) fn act(&mut self, action: &Action, at: &Position) -> Option<String> {
        let index = action.rank().checked_sub(self.here.start)?;
        let RankProcess {
            process,
            was_stopped,
            is_gone,
            ..
        } = self.ranks.get_mut(index)?;
        let pid = process.pid();
        match *action {
            Action::Ask(rank) => {
                process.ask();
                (!*is_gone && is_stopped(pid))
                    .then(|| format!("rank {rank} {} before it can leave", stopped(pid)))
            }
            Action::Kill(_) => {
                *was_stopped = !*is_gone && is_stopped(pid);
                process.send_kill();
                None
            }
            Action::Recovered(rank) => Some(format!("rank {rank} makes progress again")),
            Action::Slow { rank, percent } => Some(format!(
                "rank {rank} (pid {pid}) is slow: the others wait for it {percent} % of the time"
            )),
            Action::Tell {
                rank,
                silent,
                longest,
                limit,
                waits_for_disk,
            } => {
                let what = if is_stopped(pid) {
                    stopped(pid)
                } else if waits_for_disk {
                    "waits for a disk or a driver".to_owned()
                } else {
                    "makes no progress".to_owned()
                };
                let longest = longest.map_or(String::new(), |longest| {
                    format!(
                        ", its longest pause there before was {:.1} s",
                        longest.as_secs_f64()
                    )
                });
                let limit = limit.map_or(String::new(), |limit| {
                    format!("; it is killed after {}", HumanDuration(limit))
                });
                Some(format!(
                    "rank {rank} {what}: nothing for {} {}{longest}{limit}",
                    HumanDuration(silent),
                    place(&at.phase, at.step)
                ))
            }
        }
    }

    /// The results of the ranks, once they have exited or are given up.
    pub(crate) fn finish(self) -> Finished {
        let ended = self.ranks.into_iter().map(|rank| Ended {
            pid: rank.process.pid(),
            lines: rank.output.last_lines(),
            was_stopped: rank.was_stopped,
            ..Ended::default()
        });
        Finished {
            ranks: ended.collect(),
            was_oom_killed: memory::oom_kills() > self.oom_kills,
        }
    }
}

impl RankProcess {
    fn start(
        program: &RankProgram,
        run_dir: &RunDir,
        rank: usize,
        meeting: &Transport,
    ) -> Result<Self> {
        let log = run_dir.log(rank);
        let (output, writer) = Output::to_log(&log).with_context(|| log.display().to_string())?;
        let (mut listener, input) = channel::pair().context("the channel to the rank")?;
        let started = Process::start(program.command(rank, meeting), input, writer);
        let process = started.with_context(|| {
            format!("{}: rank {rank} cannot be started", program.path.display())
        })?;
        if let Transport::Connections { peers, .. } = meeting {
            listener.send(peers);
        }
        Ok(Self {
            process,
            listener,
            output,
            was_stopped: false,
            is_gone: false,
        })
    }
}

/// Whether a signal has stopped a process, as far as the system reports it.
fn is_stopped(pid: u32) -> bool {
    let state = threads::state(format!("/proc/{pid}/stat").as_ref());
    matches!(state, Some('T' | 't'))
}

fn stopped(pid: u32) -> String {
    format!("is stopped (process {pid}; `kill -CONT {pid}` lets it go on)")
}

impl ProcessEnd {
    fn of(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Self::Code(code),
            None => Self::Signal(status.signal().unwrap_or(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_not_stopped() {
        assert!(!is_stopped(std::process::id()));
    }
}
