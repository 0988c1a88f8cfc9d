//! Ranks that make no progress: how long they are waited for.

use std::time::Duration;

use super::rank_state::{Killed, RankState};
use super::{Action, Supervisor};

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
pub(super) const KILL: Duration = Duration::from_secs(60);
const KILL_FACTOR: u32 = 20;

/// Like [`KILL`] for a phase without a known pause, and for a rank that waits for a disk.
pub(super) const KILL_FIRST: Duration = Duration::from_secs(600);

impl Supervisor {
    /// Kills a rank that has made no progress for too long, or reports it.
    pub(super) fn look_at_progress(&mut self, index: usize, actions: &mut Vec<Action>) {
        let (limit, is_waited_for) = (self.limit(index), self.is_waited_for(index));
        let (now, rank) = (self.now, &mut self.ranks[index]);
        let (longest, silent) = (rank.longest(), now.saturating_sub(rank.progressed));
        if let Some(limit) = limit.filter(|limit| silent >= *limit) {
            rank.killed = Some((now, Killed::Hung(limit)));
            actions.push(Action::Kill(index));
            self.failed.get_or_insert(now);
            return;
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

    /// Whether a rank's lack of progress is another's fault. If all wait for each other, each
    /// counts.
    pub(super) fn is_idle(&self, rank: usize) -> bool {
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
}
