//! The state of a rank.

use std::collections::BTreeMap;
use std::time::Duration;

use spd_trainer::FaultKind;

use super::{Position, ProcessEnd};
use crate::failure::Failure;
use crate::straggler::{Pace, TRAIN};

#[derive(Debug, Default)]
pub(super) struct RankState {
    /// Whether it has sent a message.
    pub(super) is_up: bool,
    pub(super) is_asked: bool,
    pub(super) is_silent: bool,
    pub(super) at: Position,
    pub(super) ticks: u64,
    /// The rank that it waits for.
    pub(super) waits_for: Option<usize>,
    pub(super) waits_for_disk: bool,
    /// Total time that it has waited for other ranks.
    pub(super) waited: Duration,
    /// Time of its last progress.
    pub(super) progressed: Duration,
    /// Its longest pause in each phase.
    pub(super) longest: BTreeMap<String, Duration>,
    pub(super) is_told: bool,
    pub(super) failure: Option<Failure>,
    pub(super) stopped: Option<String>,
    pub(super) killed: Option<(Duration, Killed)>,
    /// When and how it ended.
    pub(super) ended: Option<(Duration, End)>,
}

/// Why the launcher killed a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Killed {
    Hung(Duration),
    GraceExpired,
    /// Because all are to leave before they have joined.
    Early,
    /// Because another one failed, or all are to end.
    WithOthers,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Process(ProcessEnd),
    SurvivedKill,
}

/// Exit codes without a failure.
pub(super) const DONE: i32 = 0;
pub(super) const STOPPED: i32 = 3;

impl RankState {
    pub(super) fn pace(&self) -> Pace {
        Pace {
            step: (self.at.phase == TRAIN).then_some(self.at.step),
            waited: self.waited,
        }
    }

    pub(super) fn longest(&self) -> Option<Duration> {
        self.longest.get(&self.at.phase).copied()
    }

    /// Whether it failed by itself.
    pub(super) fn is_cause(&self) -> bool {
        let is_hung = matches!(self.killed, Some((_, Killed::Hung(_))));
        let has_failed = is_hung || self.failure.is_some() || self.cause(false).is_some();
        has_failed && !self.is_consequence()
    }

    /// Whether another rank caused its failure.
    pub(super) fn is_consequence(&self) -> bool {
        let failure = self.failure.as_ref();
        failure.is_some_and(|f| f.because_of.is_some() || f.kind == FaultKind::PeerLost)
    }

    /// Whether a request to exit ended it before it handled signals.
    pub(super) fn left_unsaved(&self, asked: bool) -> bool {
        let terminated = End::Process(ProcessEnd::Signal(signal_hook::consts::SIGTERM));
        asked && self.failure.is_none() && self.ended.is_some_and(|(_, end)| end == terminated)
    }

    /// Whether it has exited as it was asked to.
    pub(super) fn left(&self, asked: bool) -> bool {
        let stopped = End::Process(ProcessEnd::Code(STOPPED));
        self.ended.is_some_and(|(_, end)| end == stopped) || self.left_unsaved(asked)
    }

    /// When and why it failed, if it did.
    pub(super) fn cause(&self, asked: bool) -> Option<(Duration, Cause)> {
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
