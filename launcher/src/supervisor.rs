//! Decides on the ranks of an attempt, as a function of events: no clock, no processes, no files.
//!
//! - A failing rank ends all others at once.
//! - A rank without progress is reported, and killed after a limit that is learned from the run.
//! - A request to stop is passed to all ranks; those that do not exit within the grace period are
//!   killed.
//! - A rank that survives a kill is given up after a while: no wait is unbounded.

mod hang;
mod rank_state;
#[cfg(test)]
mod tests;
mod verdict;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::rank_state::{DONE, End, Killed, RankState, STOPPED};
use crate::channel::Message;
use crate::straggler::{Pace, Stragglers};

pub(crate) use self::hang::HangLimit;
pub(crate) use self::rank_state::Cause;
pub(crate) use self::verdict::Verdict;

/// Time limits for ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From the request to exit to the kill.
    pub(crate) grace: Duration,
    /// From the last progress of a rank to the kill.
    pub(crate) hang: HangLimit,
}

/// From the first failure to the kill of all ranks: the failure that caused it may arrive a little
/// later.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Like [`LAST_WORDS`] while all failures are consequences of another one: on a busy machine the
/// launcher of another node may take this long to report that.
const CAUSE: Duration = Duration::from_secs(5);

/// A rank without a message so far handles signals after this at the latest; an earlier signal
/// would end it.
const LISTENS: Duration = Duration::from_secs(1);

/// The phase in which a rank joins the others in NCCL, and those before it. None of them goes on
/// before all have joined.
const JOINING: &str = "joining";
const EARLY: [&str; 3] = ["", "connecting", JOINING];

/// From a kill to giving up the rank.
const GIVE_UP: Duration = Duration::from_secs(5);

/// Without an event for this long, the launcher itself was stopped, and its timers do not count
/// against ranks.
const OWN_PAUSE: Duration = Duration::from_secs(2);

/// An input of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A message of a rank.
    Said(usize, Message),
    /// A rank has exited.
    Ended(usize, ProcessEnd),
    /// The node of a rank has become silent, or is heard again.
    Silent(usize, bool),
    /// A signal asked for an orderly stop.
    Leave,
    /// A second signal asked for an immediate stop. Holds the signal.
    LeaveNow(i32),
    /// Time has passed. Sent at least every [`OWN_PAUSE`].
    Tick,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProcessEnd {
    /// It exited with this code.
    Code(i32),
    /// It died of this signal.
    Signal(i32),
    /// Unknown: the launcher of its node, and the rank with it, is lost.
    Lost,
}

/// An output of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Action {
    /// Ask a rank to save and exit.
    Ask(usize),
    /// Kill a rank.
    Kill(usize),
    /// Report a rank without progress, for how long, and when it will be killed.
    Tell {
        rank: usize,
        silent: Duration,
        longest: Option<Duration>,
        limit: Option<Duration>,
        waits_for_disk: bool,
    },
    /// Report that such a rank makes progress again.
    Recovered(usize),
    /// Report that a rank is slow: the others wait for it this percentage of the time.
    Slow { rank: usize, percent: u32 },
}

impl Action {
    /// The rank of the action.
    pub(crate) fn rank(&self) -> usize {
        match *self {
            Self::Ask(rank)
            | Self::Kill(rank)
            | Self::Tell { rank, .. }
            | Self::Recovered(rank)
            | Self::Slow { rank, .. } => rank,
        }
    }
}

/// A rank's position.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The phase; empty before the first heartbeat.
    pub(crate) phase: String,
    /// Finished steps of the phase.
    pub(crate) step: u64,
}

/// The state of all ranks.
#[derive(Debug)]
pub(crate) struct Supervisor {
    ranks: Vec<RankState>,
    timeouts: Timeouts,
    started: Duration,
    now: Duration,
    /// Time of the request to stop.
    asked: Option<Duration>,
    interrupted: Option<i32>,
    /// Time of the first failure message.
    failed: Option<Duration>,
    stragglers: Stragglers,
}

impl Supervisor {
    /// A supervisor of `ranks` ranks that were just started.
    pub(crate) fn new(ranks: usize, timeouts: Timeouts, now: Duration) -> Self {
        let rank = |_| RankState {
            progressed: now,
            ..RankState::default()
        };
        Self {
            ranks: (0..ranks).map(rank).collect(),
            timeouts,
            started: now,
            now,
            asked: None,
            interrupted: None,
            failed: None,
            stragglers: Stragglers::default(),
        }
    }

    /// Whether all ranks have exited or are given up.
    pub(crate) fn is_over(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The position in the last heartbeat of a rank.
    pub(crate) fn at(&self, rank: usize) -> &Position {
        &self.ranks[rank].at
    }

    /// Handles an event at time `now`, on the same clock as the times of failures; returns the
    /// actions.
    pub(crate) fn on(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.forgive_own_pause(now);
        self.now = now;
        let mut actions = Vec::new();
        match event {
            Event::Said(rank, message) => self.said(rank, message, &mut actions),
            Event::Ended(rank, status) => self.ended(rank, status, &mut actions),
            Event::Silent(rank, is_silent) => self.ranks[rank].is_silent = is_silent,
            Event::Leave => self.leave(&mut actions),
            Event::LeaveNow(signal) => {
                self.interrupted.get_or_insert(signal);
                self.kill_all(Killed::WithOthers, &mut actions);
            }
            Event::Tick => {}
        }
        self.look_at_clock(&mut actions);
        actions
    }

    /// A launcher that was stopped has heard nothing: all timers are extended by that time.
    fn forgive_own_pause(&mut self, now: Duration) {
        let pause = now.saturating_sub(self.now);
        if pause < OWN_PAUSE {
            return;
        }
        for rank in &mut self.ranks {
            rank.progressed += pause;
        }
        for time in [&mut self.asked, &mut self.failed] {
            *time = time.map(|time| time + pause);
        }
    }

    fn said(&mut self, index: usize, message: Message, actions: &mut Vec<Action>) {
        let now = self.now;
        let rank = &mut self.ranks[index];
        rank.is_up = true;
        match message {
            Message::Beat {
                phase,
                step,
                ticks,
                waits_for,
                waited_ms,
                waits_for_disk,
            } => {
                rank.waits_for_disk = waits_for_disk;
                // The pause of a rank that waited for others restarts.
                if rank.waits_for.is_some() && waits_for.is_none() {
                    rank.progressed = now;
                }
                rank.waits_for = waits_for;
                if ticks == rank.ticks {
                    return;
                }
                let pause = now.saturating_sub(rank.progressed);
                // The start of a phase does not count as its pause.
                if phase == rank.at.phase {
                    let longest = rank.longest.entry(phase.clone()).or_default();
                    *longest = pause.max(*longest);
                }
                (rank.ticks, rank.progressed) = (ticks, now);
                rank.at = Position { phase, step };
                if std::mem::take(&mut rank.is_told) {
                    actions.push(Action::Recovered(index));
                }
                rank.waited = Duration::from_millis(waited_ms);
                let steps: Vec<Pace> = self.ranks.iter().map(RankState::pace).collect();
                if let Some((rank, percent)) = self.stragglers.look(now, &steps) {
                    actions.push(Action::Slow { rank, percent });
                }
            }
            Message::Stopped(words) => rank.stopped = Some(words),
            Message::Failure(failure) => {
                rank.at = Position {
                    phase: failure.phase.clone(),
                    step: failure.step,
                };
                // The first failure is the cause of the following ones.
                rank.failure.get_or_insert(failure);
                self.failed.get_or_insert(now);
            }
        }
    }

    fn ended(&mut self, index: usize, status: ProcessEnd, actions: &mut Vec<Action>) {
        let (now, asked) = (self.now, self.asked.is_some());
        let rank = &mut self.ranks[index];
        rank.ended.get_or_insert((now, End::Process(status)));
        match status {
            ProcessEnd::Code(DONE) => {}
            // A stop signal to one rank is meant for all.
            ProcessEnd::Code(STOPPED) if rank.stopped.is_some() => self.leave(actions),
            ProcessEnd::Code(STOPPED) if asked => {}
            _ if rank.killed.is_some() || rank.left_unsaved(asked) => {}
            _ => {
                self.failed.get_or_insert(now);
                let is_consequence = self.ranks[index].is_consequence();
                // A rank that is asked saves, and has the grace period for it.
                if !is_consequence && !asked {
                    self.kill_all(Killed::WithOthers, actions);
                }
            }
        }
    }

    fn leave(&mut self, actions: &mut Vec<Action>) {
        self.asked.get_or_insert(self.now);
        self.ask(actions);
    }

    /// Asks the ranks to exit that already handle signals.
    fn ask(&mut self, actions: &mut Vec<Action>) {
        let listen = self.now.saturating_sub(self.started) >= LISTENS;
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let is_running = rank.ended.is_none() && rank.killed.is_none();
            if is_running && (rank.is_up || listen) && !rank.is_asked {
                rank.is_asked = true;
                actions.push(Action::Ask(index));
            }
        }
    }

    /// Checks the time limits: grace period, hang, kill.
    fn look_at_clock(&mut self, actions: &mut Vec<Action>) {
        let now = self.now;
        let over = |since: Option<Duration>, limit: Duration| {
            since.is_some_and(|since| now.saturating_sub(since) >= limit)
        };
        let last_words = if self.has_cause() { LAST_WORDS } else { CAUSE };
        if over(self.failed, last_words) && self.asked.is_none() {
            self.kill_all(Killed::WithOthers, actions);
        }
        if self.asked.is_some() {
            self.ask(actions);
            // NCCL hears no request, and nothing is there to be saved yet.
            if self.is_joining() {
                self.kill_all(Killed::Early, actions);
            }
        }
        if over(self.asked, self.timeouts.grace) {
            self.kill_all(Killed::GraceExpired, actions);
        }
        self.kill_forsaken(actions);
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            if rank.ended.is_some() {
                continue;
            }
            if let Some((since, _)) = rank.killed {
                if over(Some(since), GIVE_UP) {
                    let end = if rank.is_silent {
                        End::Process(ProcessEnd::Lost)
                    } else {
                        End::SurvivedKill
                    };
                    rank.ended = Some((now, end));
                }
                continue;
            }
            if rank.is_silent {
                // Its connection ends it if it stays silent.
                rank.progressed = now;
            }
            if self.asked.is_none() && !self.is_idle(index) {
                self.look_at_progress(index, actions);
            }
        }
    }

    /// Kills ranks that wait for one that is dead, or that left before they were through with it,
    /// while others may still save.
    fn kill_forsaken(&mut self, actions: &mut Vec<Action>) {
        let died = |end| !matches!(end, End::Process(ProcessEnd::Code(DONE | STOPPED)));
        let forsaken = |rank: &RankState| {
            let awaited = rank.waits_for.and_then(|other| self.ranks.get(other));
            let ended = awaited.and_then(|other| other.ended);
            ended.is_some_and(|(_, end)| died(end) || self.outlives_another(rank))
        };
        let forsaken: Vec<bool> = self.ranks.iter().map(forsaken).collect();
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if forsaken[index] && rank.ended.is_none() && rank.killed.is_none() {
                rank.killed = Some((self.now, Killed::WithOthers));
                actions.push(Action::Kill(index));
            }
        }
    }

    /// Whether ranks join, and none has come further.
    fn is_joining(&self) -> bool {
        let phases = || self.running().map(|(_, rank)| rank.at.phase.as_str());
        phases().any(|phase| phase == JOINING) && phases().all(|phase| EARLY.contains(&phase))
    }

    fn kill_all(&mut self, why: Killed, actions: &mut Vec<Action>) {
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if rank.ended.is_none() && rank.killed.is_none() {
                rank.killed = Some((self.now, why));
                actions.push(Action::Kill(index));
            }
        }
    }

    fn running(&self) -> impl Iterator<Item = (usize, &RankState)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| rank.ended.is_none())
    }
}
