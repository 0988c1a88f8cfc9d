//! What is done about the ranks of an attempt, as a function of what happens to them: no clock, no process, no file.
//!
//! - A rank that fails takes the others with it, at once.
//! - A rank whose beats bring no progress is named, and killed when that lasts too long. How long that is, is learned from the run.
//! - A request to stop is passed on to all ranks; those that do not leave within the grace are killed.
//! - A rank that does not die of a kill is given up after a while: nothing is waited for without end.

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spd_trainer::FaultKind;

use crate::channel::Message;
use crate::failure::Failure;
use crate::straggler::{Pace, Stragglers, TRAIN};

/// How long ranks are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From being asked to leave until they are killed.
    pub(crate) grace: Duration,
    /// From the last progress of a rank until it is killed.
    pub(crate) hang: HangLimit,
}

/// How long a rank may make no progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HangLimit {
    /// For ever.
    Never,
    /// So long.
    After(Duration),
    /// So many times as long as ever before in the phase, see [`Supervisor::limit`].
    Learned,
}

/// Without progress a rank is named after this, or after [`TELL_FACTOR`] times its longest pause in the phase.
const TELL: Duration = Duration::from_secs(10);
const TELL_FACTOR: u32 = 5;

/// The same where other ranks wait for it.
const TELL_WAITED_FOR: Duration = Duration::from_secs(5);

/// The same for a phase of which no pause is known: it may begin with something long.
const TELL_FIRST: Duration = Duration::from_secs(60);

/// Without progress a rank is killed after this, or after [`KILL_FACTOR`] times its longest pause in the phase.
const KILL: Duration = Duration::from_secs(60);
const KILL_FACTOR: u32 = 20;

/// The same for a phase of which no pause is known.
const KILL_FIRST: Duration = Duration::from_secs(600);

/// From the first word of a failure until all ranks are killed: whose fault it was may come a little later than whom it hit.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A rank that has said nothing listens to requests after this at the latest: a signal that comes before would end it.
const LISTENS: Duration = Duration::from_secs(1);

/// From a kill until the rank is given up.
const GIVE_UP: Duration = Duration::from_secs(5);

/// Time without a look at anything after which the launcher was stopped itself, and has nothing to say of the ranks.
const OWN_PAUSE: Duration = Duration::from_secs(2);

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A rank says something.
    Said(usize, Message),
    /// A rank is gone.
    Ended(usize, Status),
    /// Nothing is heard of the node of a rank, or it is heard again.
    Silent(usize, bool),
    /// A signal asks for an orderly stop.
    Leave,
    /// A second one does not want to wait. Holds the signal.
    LeaveNow(i32),
    /// Time goes by. To be told at least every [`OWN_PAUSE`].
    Tick,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// With this code.
    Code(i32),
    /// Of this signal.
    Signal(i32),
    /// Nobody knows: the launcher of its node is lost, with which it ends.
    Lost,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Action {
    /// Ask a rank to save and leave.
    Ask(usize),
    /// Kill a rank.
    Kill(usize),
    /// Say that a rank has made no progress for so long, and when it is killed for that.
    Tell {
        rank: usize,
        silent: Duration,
        longest: Option<Duration>,
        limit: Option<Duration>,
    },
    /// Say that a rank that was named makes progress again.
    Recovered(usize),
    /// Say that a rank is slow: the others wait for it so much of their time, in hundredths.
    Slow { rank: usize, percent: u32 },
}

impl Action {
    /// The rank that it is about.
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

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All ranks did all they had to.
    Done,
    /// All left on request. Holds what the first that knows says of it.
    Stopped(Option<String>),
    /// Killed by a second signal.
    Interrupted(i32),
    /// This rank failed first, for this reason; those failed because of it.
    Failed {
        rank: usize,
        cause: Cause,
        consequences: Vec<usize>,
    },
}

/// Why a rank is gone that should not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It said so.
    Failure(Failure),
    /// It left with this code and no word.
    Code(i32),
    /// A signal ended it that was not sent from here.
    Signal(i32),
    /// It was killed: no progress for so long.
    Hung(Duration),
    /// It was killed: it did not leave within the grace.
    Overstayed,
    /// It was killed, and did not die.
    Undead,
    /// The launcher of its node is lost.
    Lost,
}

impl Cause {
    /// Its kind.
    pub(crate) fn kind(&self) -> FaultKind {
        match self {
            Self::Failure(failure) => failure.kind,
            Self::Code(_) => FaultKind::Bug,
            Self::Signal(_) => FaultKind::Killed,
            Self::Hung(_) | Self::Overstayed | Self::Undead => FaultKind::Hang,
            Self::Lost => FaultKind::PeerLost,
        }
    }
}

/// Where a rank is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Whereabouts {
    /// What goes on; empty before the first word.
    pub(crate) phase: String,
    /// Finished steps of that.
    pub(crate) step: u64,
}

/// The state of all ranks.
#[derive(Debug)]
pub(crate) struct Supervisor {
    ranks: Vec<Rank>,
    timeouts: Timeouts,
    started: Duration,
    now: Duration,
    /// When a stop was asked for.
    asked: Option<Duration>,
    interrupted: Option<i32>,
    /// When a failure was first heard of.
    failed: Option<Duration>,
    stragglers: Stragglers,
}

#[derive(Debug)]
struct Rank {
    /// It has said something.
    is_up: bool,
    is_asked: bool,
    is_silent: bool,
    at: Whereabouts,
    ticks: u64,
    /// The rank that it waits for.
    waits_for: Option<usize>,
    /// How long it has waited for others, in all.
    waited: Duration,
    /// When it last made progress.
    progressed: Duration,
    /// Its longest pause in each phase.
    longest: BTreeMap<String, Duration>,
    is_told: bool,
    failure: Option<Failure>,
    stopped: Option<String>,
    killed: Option<(Duration, Killed)>,
    /// When it was gone, and how.
    ended: Option<(Duration, End)>,
}

/// Why a rank was killed from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    Hung(Duration),
    Overstayed,
    /// Another one failed, or all are to be gone.
    WithOthers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Status(Status),
    Undead,
}

impl Supervisor {
    /// Of so many ranks that were started just now.
    pub(crate) fn new(ranks: usize, timeouts: Timeouts, now: Duration) -> Self {
        let rank = |_| Rank {
            is_up: false,
            is_asked: false,
            is_silent: false,
            at: Whereabouts::default(),
            ticks: 0,
            waits_for: None,
            waited: Duration::ZERO,
            progressed: now,
            longest: BTreeMap::new(),
            is_told: false,
            failure: None,
            stopped: None,
            killed: None,
            ended: None,
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

    /// Whether all ranks are gone, or given up.
    pub(crate) fn is_over(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Where a rank was when it last said so.
    pub(crate) fn at(&self, rank: usize) -> &Whereabouts {
        &self.ranks[rank].at
    }

    /// Takes in what happened at `now`, of the same clock as the times of failures; what is to be done about it.
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

    /// A launcher that was stopped has heard nothing: what was waited for is waited for so much longer.
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
            } => {
                // Who has waited long begins anew.
                if rank.waits_for.is_some() && waits_for.is_none() {
                    rank.progressed = now;
                }
                rank.waits_for = waits_for;
                if ticks == rank.ticks {
                    return;
                }
                let pause = now.saturating_sub(rank.progressed);
                // What a phase begins with is no pause of it.
                if phase == rank.at.phase {
                    let longest = rank.longest.entry(phase.clone()).or_default();
                    *longest = pause.max(*longest);
                }
                (rank.ticks, rank.progressed) = (ticks, now);
                rank.at = Whereabouts { phase, step };
                if std::mem::take(&mut rank.is_told) {
                    actions.push(Action::Recovered(index));
                }
                rank.waited = Duration::from_millis(waited_ms);
                let steps: Vec<Pace> = self.ranks.iter().map(Rank::pace).collect();
                if let Some((rank, percent)) = self.stragglers.look(now, &steps) {
                    actions.push(Action::Slow { rank, percent });
                }
            }
            Message::Stopped(words) => rank.stopped = Some(words),
            Message::Failure(failure) => {
                rank.at = Whereabouts {
                    phase: failure.phase.clone(),
                    step: failure.step,
                };
                // The first one is the cause of those that follow.
                rank.failure.get_or_insert(failure);
                self.failed.get_or_insert(now);
            }
        }
    }

    fn ended(&mut self, index: usize, status: Status, actions: &mut Vec<Action>) {
        let (now, asked) = (self.now, self.asked.is_some());
        let rank = &mut self.ranks[index];
        rank.ended.get_or_insert((now, End::Status(status)));
        match status {
            Status::Code(DONE) => {}
            // Whoever asked it to stop means all of them.
            Status::Code(STOPPED) if rank.stopped.is_some() => self.leave(actions),
            Status::Code(STOPPED) if asked => {}
            _ if rank.killed.is_some() || rank.left_unsaved(asked) => {}
            _ => {
                self.failed.get_or_insert(now);
                let is_consequence = self.ranks[index].is_consequence();
                // Whoever leaves saves what is there, and has its grace for it.
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

    /// Asks those ranks to leave that listen.
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

    /// What time brings: ranks that overstay, ranks that hang, ranks that do not die.
    fn look_at_clock(&mut self, actions: &mut Vec<Action>) {
        let now = self.now;
        let over = |since: Option<Duration>, limit: Duration| {
            since.is_some_and(|since| now.saturating_sub(since) >= limit)
        };
        if over(self.failed, LAST_WORDS) && self.asked.is_none() {
            self.kill_all(Killed::WithOthers, actions);
        }
        if self.asked.is_some() {
            self.ask(actions);
        }
        if over(self.asked, self.timeouts.grace) {
            self.kill_all(Killed::Overstayed, actions);
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
                        End::Status(Status::Lost)
                    } else {
                        End::Undead
                    };
                    rank.ended = Some((now, end));
                }
                continue;
            }
            if rank.is_silent {
                // Its connection ends it, if it is not heard again.
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
                });
            }
        }
    }

    /// Kills ranks that wait for one that died, while others may still save.
    fn kill_forsaken(&mut self, actions: &mut Vec<Action>) {
        let died = |end| !matches!(end, End::Status(Status::Code(DONE | STOPPED)));
        let is_gone = |rank: usize| {
            let ended = self.ranks.get(rank).and_then(|rank| rank.ended);
            ended.is_some_and(|(_, end)| died(end))
        };
        let forsaken = |rank: &Rank| rank.waits_for.is_some_and(is_gone);
        let forsaken: Vec<bool> = self.ranks.iter().map(forsaken).collect();
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if forsaken[index] && rank.ended.is_none() && rank.killed.is_none() {
                rank.killed = Some((self.now, Killed::WithOthers));
                actions.push(Action::Kill(index));
            }
        }
    }

    /// Whether a rank makes no progress because it waits for another, which is then looked at. Where all wait, each is looked at.
    fn is_idle(&self, rank: usize) -> bool {
        // What one that is not heard does is not known: it may wait no more.
        let works = |(_, rank): (usize, &Rank)| rank.waits_for.is_none() || rank.is_silent;
        self.ranks[rank].waits_for.is_some() && self.running().any(works)
    }

    fn is_waited_for(&self, rank: usize) -> bool {
        let mut running = self.running();
        running.any(|(_, other)| other.waits_for == Some(rank))
    }

    /// How long a rank may make no progress in its phase: [`KILL`] or [`KILL_FACTOR`] times its longest pause there, where one is known.
    fn limit(&self, rank: usize) -> Option<Duration> {
        match self.timeouts.hang {
            HangLimit::Never => None,
            HangLimit::After(limit) => Some(limit),
            HangLimit::Learned => Some(
                self.ranks[rank]
                    .longest()
                    .map_or(KILL_FIRST, |longest| KILL.max(KILL_FACTOR * longest)),
            ),
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

    fn running(&self) -> impl Iterator<Item = (usize, &Rank)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| rank.ended.is_none())
    }

    /// How the attempt ended, once it is over.
    pub(crate) fn verdict(&self) -> Verdict {
        if let Some(signal) = self.interrupted {
            return Verdict::Interrupted(signal);
        }
        let asked = self.asked.is_some();
        let ranks = self.ranks.iter().enumerate();
        let mut failures: Vec<_> = ranks
            .filter_map(|(index, rank)| {
                let (time, cause) = rank.cause(asked)?;
                Some(((rank.is_consequence(), time, index), cause))
            })
            .collect();
        // All ranks refuse the same step: the first of them tells it for all.
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
        let is_done =
            |rank: &Rank| matches!(rank.ended, Some((_, End::Status(Status::Code(DONE)))));
        if self.ranks.iter().all(is_done) {
            return Verdict::Done;
        }
        let words = self.ranks.iter().find_map(|rank| rank.stopped.clone());
        Verdict::Stopped(words)
    }
}

/// Codes that a rank leaves with when nothing went wrong.
const DONE: i32 = 0;
const STOPPED: i32 = 3;

impl Rank {
    fn pace(&self) -> Pace {
        Pace {
            step: (self.at.phase == TRAIN).then_some(self.at.step),
            waited: self.waited,
        }
    }

    fn longest(&self) -> Option<Duration> {
        self.longest.get(&self.at.phase).copied()
    }

    /// Whether its failure follows from that of another.
    fn is_consequence(&self) -> bool {
        let failure = self.failure.as_ref();
        failure.is_some_and(|f| f.because_of.is_some() || f.kind == FaultKind::PeerLost)
    }

    /// Whether the request to leave ended it before it listened to one.
    fn left_unsaved(&self, asked: bool) -> bool {
        let terminated = End::Status(Status::Signal(signal_hook::consts::SIGTERM));
        asked && self.failure.is_none() && self.ended.is_some_and(|(_, end)| end == terminated)
    }

    /// When and why it is gone, if it should not be.
    fn cause(&self, asked: bool) -> Option<(Duration, Cause)> {
        let (ended, end) = self.ended?;
        if let Some(failure) = &self.failure {
            return Some((failure.time(), Cause::Failure(failure.clone())));
        }
        let cause = match (self.killed, end) {
            (_, End::Status(Status::Code(DONE))) => return None,
            // Without a word, nobody asked it to.
            (_, End::Status(Status::Code(STOPPED))) if asked || self.stopped.is_some() => {
                return None;
            }
            (_, End::Undead) => Cause::Undead,
            (Some((time, Killed::Hung(limit))), _) => return Some((time, Cause::Hung(limit))),
            (Some((time, Killed::Overstayed)), _) => return Some((time, Cause::Overstayed)),
            (Some((_, Killed::WithOthers)), _) => return None,
            (None, _) if self.left_unsaved(asked) => return None,
            (None, End::Status(Status::Code(code))) => Cause::Code(code),
            (None, End::Status(Status::Signal(signal))) => Cause::Signal(signal),
            (None, End::Status(Status::Lost)) => Cause::Lost,
        };
        Some((ended, cause))
    }
}

#[cfg(test)]
mod tests;
