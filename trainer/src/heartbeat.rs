//! Progress of a rank, for its supervisor.
//!
//! The training thread counts, and the supervisor reads: neither waits for a disk or for the other.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use spd_engine::blocks::Waiting;

/// The newest beat, and the last words of a rank that was asked to stop.
#[derive(Debug, Default)]
pub struct Heartbeat {
    beat: Mutex<Beat>,
    stopped: OnceLock<String>,
}

/// A sign of progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Beat {
    /// The current phase; empty before the first.
    pub phase: &'static str,
    /// Finished steps of the phase.
    pub step: u64,
    /// Grows with whatever was finished: a step, a batch of an evaluation, a figure.
    pub ticks: u64,
    /// The rank that this one has been waiting for, for a while.
    pub waits_for: Option<usize>,
    /// How long it has waited for others, in all.
    pub waited: Duration,
}

impl Heartbeat {
    /// Something was finished, or begins: `phase` goes on, or begins, after `step` steps.
    pub(crate) fn tick(&self, phase: &'static str, step: u64) {
        let mut beat = self.beat();
        *beat = Beat {
            phase,
            step,
            ticks: beat.ticks + 1,
            ..*beat
        };
    }

    /// This rank waits for another, or has waited.
    pub(crate) fn waits(&self, waiting: Waiting) {
        let mut beat = self.beat();
        match waiting {
            Waiting::For(rank) => beat.waits_for = Some(rank),
            Waiting::Over(time) => {
                beat.waits_for = None;
                beat.waited += time;
            }
        }
    }

    /// A long phase begins after the finished steps.
    pub fn enter(&self, phase: &'static str) {
        let step = self.beat().step;
        self.tick(phase, step);
    }

    /// The newest beat.
    pub fn newest(&self) -> Beat {
        *self.beat()
    }

    /// Message of a rank that stopped on request: its step, and whether that is saved; `None`
    /// before.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.get().map(String::as_str)
    }

    pub(crate) fn set_stopped(&self, words: &str) {
        // A rank leaves once.
        let _ = self.stopped.set(words.to_owned());
    }

    fn beat(&self) -> MutexGuard<'_, Beat> {
        self.beat.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_tick_is_counted() {
        let heartbeat = Heartbeat::default();
        assert_eq!(heartbeat.newest(), Beat::default());
        heartbeat.tick("train", 7);
        heartbeat.tick("train", 7);
        heartbeat.enter("saving");
        let expected = Beat {
            phase: "saving",
            step: 7,
            ticks: 3,
            ..Beat::default()
        };
        assert_eq!(heartbeat.newest(), expected);
        heartbeat.set_stopped("stopped after step 7, which is saved");
        assert_eq!(
            heartbeat.stopped(),
            Some("stopped after step 7, which is saved")
        );
    }
}
