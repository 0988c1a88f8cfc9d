//! A failure of a rank, as a record.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use spd_trainer::{Beat, Fault, FaultKind};

/// Why a rank leaves, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// What kind of failure it is.
    pub(crate) kind: FaultKind,
    /// What went on.
    pub(crate) phase: String,
    /// Finished steps of that.
    pub(crate) step: u64,
    /// When it was found, in nanoseconds of the machine's monotonic clock.
    pub(crate) time_ns: u64,
    /// One line.
    pub(crate) message: String,
    /// The rank whose failure this one follows from.
    pub(crate) because_of: Option<usize>,
}

impl Failure {
    /// What befell this rank just now.
    pub(crate) fn now(kind: FaultKind, message: String, beat: Beat) -> Self {
        let nanoseconds = monotonic().as_nanos();
        Self {
            kind,
            phase: beat.phase.to_owned(),
            step: beat.step,
            time_ns: u64::try_from(nanoseconds).unwrap_or(u64::MAX),
            message,
            because_of: None,
        }
    }

    /// A fault of the trainer.
    pub(crate) fn of(fault: &Fault, beat: Beat) -> Self {
        Self::now(fault.kind(), fault.to_string(), beat)
    }

    /// When it was found, on the machine's monotonic clock.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.time_ns)
    }
}

/// The machine's monotonic clock, the same for all its processes.
pub(crate) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let whole = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(whole, u32::try_from(now.tv_nsec).unwrap_or(0))
}
