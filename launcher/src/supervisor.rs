//! Decides on the ranks of an attempt, as a function of events: no clock, no processes, no files.
//!
//! - A failing rank ends all others at once.
//! - A rank without progress is reported, and killed after a limit that is learned from the run.
//! - A request to stop is passed to all ranks; those that do not exit within the grace period are
//!   killed.
//! - A rank that survives a kill is given up after a while: no wait is unbounded.

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spd_trainer::FaultKind;

use crate::channel::Message;
use crate::failure::Failure;
use crate::straggler::{Pace, Stragglers, TRAIN};

/// Time limits for ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From the request to exit to the kill.
    pub(crate) grace: Duration,
    /// From the last progress of a rank to the kill.
    pub(crate) hang: HangLimit,
}

/// Time limit without progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HangLimit {
    /// No limit.
    Never,
    /// A fixed limit.
    After(Duration),
    /// A multiple of the longest pause so far in the phase, see [`Supervisor::limit`].
    Learned,
}

/// A rank without progress is reported after this, or after [`TELL_FACTOR`] times its longest pause
/// in the phase.
const TELL: Duration = Duration::from_secs(10);
const TELL_FACTOR: u32 = 5;

/// Like [`TELL`] for a rank that others wait for.
const TELL_WAITED_FOR: Duration = Duration::from_secs(5);

/// Like [`TELL`] for a phase without a known pause, which may begin slowly.
const TELL_FIRST: Duration = Duration::from_secs(60);

/// A rank without progress is killed after this, or after [`KILL_FACTOR`] times its longest pause
/// in the phase.
const KILL: Duration = Duration::from_secs(60);
const KILL_FACTOR: u32 = 20;

/// Like [`KILL`] for a phase without a known pause, and for a rank that waits for a disk.
const KILL_FIRST: Duration = Duration::from_secs(600);

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

/// The result of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All ranks have finished.
    Done,
    /// All ranks exited on request. Holds the message of the first that sent one.
    Stopped(Option<String>),
    /// Killed by a second signal.
    Interrupted(i32),
    /// This rank failed first, for this cause; the others failed as a consequence.
    Failed {
        rank: usize,
        cause: Cause,
        consequences: Vec<usize>,
    },
}

/// Why a rank failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its own failure message.
    Failure(Failure),
    /// It exited with this code and no message.
    Code(i32),
    /// It died of a signal that the launcher did not send.
    Signal(i32),
    /// It was killed after this long without progress.
    Hung(Duration),
    /// It was killed because it did not exit within the grace period.
    GraceExpired,
    /// It was killed, and did not die.
    SurvivedKill,
    /// The launcher of its node is lost.
    Lost,
}

impl Cause {
    /// The kind of fault.
    pub(crate) fn kind(&self) -> FaultKind {
        match self {
            Self::Failure(failure) => failure.kind,
            Self::Code(_) => FaultKind::Bug,
            Self::Signal(_) => FaultKind::Killed,
            Self::Hung(_) | Self::GraceExpired | Self::SurvivedKill => FaultKind::Hang,
            Self::Lost => FaultKind::PeerLost,
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

#[derive(Debug, Default)]
struct RankState {
    /// Whether it has sent a message.
    is_up: bool,
    is_asked: bool,
    is_silent: bool,
    at: Position,
    ticks: u64,
    /// The rank that it waits for.
    waits_for: Option<usize>,
    waits_for_disk: bool,
    /// Total time that it has waited for other ranks.
    waited: Duration,
    /// Time of its last progress.
    progressed: Duration,
    /// Its longest pause in each phase.
    longest: BTreeMap<String, Duration>,
    is_told: bool,
    failure: Option<Failure>,
    stopped: Option<String>,
    killed: Option<(Duration, Killed)>,
    /// When and how it ended.
    ended: Option<(Duration, End)>,
}

/// Why the launcher killed a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    Hung(Duration),
    GraceExpired,
    /// Because all are to leave before they have joined.
    Early,
    /// Because another one failed, or all are to end.
    WithOthers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Process(ProcessEnd),
    SurvivedKill,
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
            let (limit, longest) = (self.limit(index), self.ranks[index].longest());
            let (is_idle, is_waited_for) = (self.is_idle(index), self.is_waited_for(index));
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
            if self.asked.is_some() || is_idle {
                continue;
            }
            let silent = now.saturating_sub(rank.progressed);
            if let Some(limit) = limit.filter(|limit| silent >= *limit) {
                rank.killed = Some((now, Killed::Hung(limit)));
                actions.push(Action::Kill(index));
                self.failed.get_or_insert(now);
                continue;
            }
            let least = if is_waited_for { TELL_WAITED_FOR } else { TELL };
            let tell = longest.map_or(TELL_FIRST, |longest| least.max(TELL_FACTOR * longest));
            if silent >= tell && !rank.is_told {
                rank.is_told = true;
                actions.push(Action::Tell {
                    rank: index,
                    silent,
                    longest,
                    limit,
                    waits_for_disk: rank.waits_for_disk,
                });
            }
        }
    }

    /// Whether the failure that caused the others is known.
    fn has_cause(&self) -> bool {
        self.ranks.iter().any(RankState::is_cause)
    }

    /// Whether a rank's only fault is that another has left, as it was asked to.
    fn outlives_another(&self, rank: &RankState) -> bool {
        let asked = self.asked.is_some();
        let other = rank.failure.as_ref().and_then(|f| f.because_of);
        let other = other.and_then(|other| self.ranks.get(other));
        asked && other.is_some_and(|other| other.left(asked))
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

    /// Whether a rank's lack of progress is another's fault. If all wait for each other, each
    /// counts.
    fn is_idle(&self, rank: usize) -> bool {
        // The state of a silent rank is unknown: it may no longer wait.
        let works = |(_, rank): (usize, &RankState)| rank.waits_for.is_none() || rank.is_silent;
        self.ranks[rank].waits_for.is_some() && self.running().any(works)
    }

    fn is_waited_for(&self, rank: usize) -> bool {
        let mut running = self.running();
        running.any(|(_, other)| other.waits_for == Some(rank))
    }

    /// How long a rank may go without progress in its phase: [`KILL`] or [`KILL_FACTOR`] times its
    /// longest pause there, if known. A kill cannot end a wait for a disk.
    fn limit(&self, rank: usize) -> Option<Duration> {
        match self.timeouts.hang {
            HangLimit::Never => None,
            HangLimit::After(limit) => Some(limit),
            HangLimit::Learned => {
                let rank = &self.ranks[rank];
                let least = if rank.waits_for_disk {
                    KILL_FIRST
                } else {
                    KILL
                };
                let learned = |longest| least.max(KILL_FACTOR * longest);
                Some(rank.longest().map_or(KILL_FIRST, learned))
            }
        }
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

    /// The result of the attempt, once it is over.
    pub(crate) fn verdict(&self) -> Verdict {
        if let Some(signal) = self.interrupted {
            return Verdict::Interrupted(signal);
        }
        let asked = self.asked.is_some();
        let ranks = self.ranks.iter().enumerate();
        let mut failures: Vec<_> = ranks
            .filter(|(_, rank)| !self.outlives_another(rank))
            .filter_map(|(index, rank)| {
                let (time, cause) = rank.cause(asked)?;
                Some(((rank.is_consequence(), time, index), cause))
            })
            .collect();
        // All ranks refuse the same step, and the first reports it.
        let of_all = |cause: &Cause| cause.kind() == FaultKind::NotFinite;
        let refused = failures.iter().filter(|(_, cause)| of_all(cause));
        let refused = refused.map(|((_, time, _), _)| *time).min();
        failures.sort_by_key(|((follows, time, index), cause)| {
            let time = refused.filter(|_| of_all(cause)).unwrap_or(*time);
            (*follows, time, *index)
        });
        let mut is_told = false;
        failures.retain(|(_, cause)| !of_all(cause) || !mem::replace(&mut is_told, true));
        let consequences = failures.iter().skip(1).map(|((.., rank), _)| *rank);
        let mut consequences: Vec<usize> = consequences.collect();
        consequences.sort_unstable();
        if let Some(((.., rank), cause)) = failures.into_iter().next() {
            return Verdict::Failed {
                rank,
                cause,
                consequences,
            };
        }
        let is_done = |rank: &RankState| {
            matches!(rank.ended, Some((_, End::Process(ProcessEnd::Code(DONE)))))
        };
        if self.ranks.iter().all(is_done) {
            return Verdict::Done;
        }
        let words = self.ranks.iter().find_map(|rank| rank.stopped.clone());
        Verdict::Stopped(words)
    }
}

/// Exit codes without a failure.
const DONE: i32 = 0;
const STOPPED: i32 = 3;

impl RankState {
    fn pace(&self) -> Pace {
        Pace {
            step: (self.at.phase == TRAIN).then_some(self.at.step),
            waited: self.waited,
        }
    }

    fn longest(&self) -> Option<Duration> {
        self.longest.get(&self.at.phase).copied()
    }

    /// Whether it failed by itself.
    fn is_cause(&self) -> bool {
        let is_hung = matches!(self.killed, Some((_, Killed::Hung(_))));
        let has_failed = is_hung || self.failure.is_some() || self.cause(false).is_some();
        has_failed && !self.is_consequence()
    }

    /// Whether another rank caused its failure.
    fn is_consequence(&self) -> bool {
        let failure = self.failure.as_ref();
        failure.is_some_and(|f| f.because_of.is_some() || f.kind == FaultKind::PeerLost)
    }

    /// Whether a request to exit ended it before it handled signals.
    fn left_unsaved(&self, asked: bool) -> bool {
        let terminated = End::Process(ProcessEnd::Signal(signal_hook::consts::SIGTERM));
        asked && self.failure.is_none() && self.ended.is_some_and(|(_, end)| end == terminated)
    }

    /// Whether it has exited as it was asked to.
    fn left(&self, asked: bool) -> bool {
        let stopped = End::Process(ProcessEnd::Code(STOPPED));
        self.ended.is_some_and(|(_, end)| end == stopped) || self.left_unsaved(asked)
    }

    /// When and why it failed, if it did.
    fn cause(&self, asked: bool) -> Option<(Duration, Cause)> {
        let (ended, end) = self.ended?;
        let is_early = matches!(self.killed, Some((_, Killed::Early)));
        // A rank that is killed a little later than the others may report their loss.
        let is_told = |_: &&Failure| !(is_early && self.is_consequence());
        if let Some(failure) = self.failure.as_ref().filter(is_told) {
            return Some((failure.time(), Cause::Failure(failure.clone())));
        }
        let cause = match (self.killed, end) {
            (_, End::Process(ProcessEnd::Code(DONE))) => return None,
            // Without a message, it was not asked to exit.
            (_, End::Process(ProcessEnd::Code(STOPPED))) if asked || self.stopped.is_some() => {
                return None;
            }
            (_, End::SurvivedKill) => Cause::SurvivedKill,
            (Some((time, Killed::Hung(limit))), _) => return Some((time, Cause::Hung(limit))),
            (Some((time, Killed::GraceExpired)), _) => return Some((time, Cause::GraceExpired)),
            (Some((_, Killed::Early | Killed::WithOthers)), _) => return None,
            (None, _) if self.left_unsaved(asked) => return None,
            (None, End::Process(ProcessEnd::Code(code))) => Cause::Code(code),
            (None, End::Process(ProcessEnd::Signal(signal))) => Cause::Signal(signal),
            (None, End::Process(ProcessEnd::Lost)) => Cause::Lost,
        };
        Some((ended, cause))
    }
}

#[cfg(test)]
mod tests;
