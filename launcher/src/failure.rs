//! The failure of a rank, as a message.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use spd_trainer::{Beat, Fault, FaultKind};

/// The reason why a rank exits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The kind of fault.
    pub(crate) kind: FaultKind,
    /// The phase.
    pub(crate) phase: String,
    /// Finished steps of the phase.
    pub(crate) step: u64,
    /// Time of detection, in nanoseconds of the machine's monotonic clock.
    pub(crate) time_ns: u64,
    /// The description, on one line.
    pub(crate) message: String,
    /// The rank whose failure caused this one.
    pub(crate) because_of: Option<usize>,
}

impl Failure {
    /// A failure of this rank at this moment.
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

    /// The failure for a fault of the trainer.
    pub(crate) fn of(fault: &Fault, beat: Beat) -> Self {
        Self::now(fault.kind(), fault.to_string(), beat)
    }

    /// Time of detection, on the machine's monotonic clock.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.time_ns)
    }
}

/// The machine's monotonic clock, which all its processes share.
pub(crate) fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}
