//! The result of an attempt: the failure that caused the others.

use std::mem;

use spd_trainer::FaultKind;

use super::rank_state::{Cause, DONE, End, RankState};
use super::{ProcessEnd, Supervisor};

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

impl Supervisor {
    /// Whether the failure that caused the others is known.
    pub(super) fn has_cause(&self) -> bool {
        self.ranks.iter().any(RankState::is_cause)
    }

    /// Whether a rank's only fault is that another has left, as it was asked to.
    pub(super) fn outlives_another(&self, rank: &RankState) -> bool {
        let asked = self.asked.is_some();
        let other = rank.failure.as_ref().and_then(|f| f.because_of);
        let other = other.and_then(|other| self.ranks.get(other));
        asked && other.is_some_and(|other| other.left(asked))
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
