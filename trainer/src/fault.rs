//! How a rank ends.

use std::fmt;
use std::io::{self, ErrorKind};

use serde::{Deserialize, Serialize};
use spd_checkpoint::CheckpointError;
use spd_configs::Faults;
use spd_dataloader::DataError;
use spd_engine::{BuildError, TooManyThreads};
use spd_tracker::SpoolError;

/// Why a run cannot go on.
#[derive(Debug)]
pub enum Fault {
    /// The user's to mend: the run file, the data, the directory. One line, exit code 2.
    BadInput(String),
    /// Several of the same, such as all faults of a run file. A line each, exit code 2.
    BadInputs(Vec<String>),
    /// Another process has what this one needs. One line, exit code 2.
    Held(String),
    /// A loss or gradient is not finite. One line, exit code 1.
    NotFinite(String),
    /// Anything else, exit code 1.
    Failed(anyhow::Error),
}

/// Why work ends before its end: what `?` carries up to the run.
#[derive(Debug)]
pub(crate) enum Interrupt {
    /// A request to stop.
    Stop,
    /// A fault.
    Fault(Fault),
}

impl Interrupt {
    /// A stop, where one was asked for.
    pub(crate) fn when(is_asked: bool) -> Result<(), Self> {
        if is_asked { Err(Self::Stop) } else { Ok(()) }
    }
}

impl<E: Into<Fault>> From<E> for Interrupt {
    fn from(err: E) -> Self {
        Self::Fault(err.into())
    }
}

/// Kind of failure that ended a rank: it decides the message, and whether to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The user's to mend.
    BadInput,
    /// Another process has what this one needs.
    Held,
    /// A loss or gradient is not finite.
    NotFinite,
    /// The machine, a control group or a GPU had no memory to give.
    OutOfMemory,
    /// A disk refused.
    InputOutput,
    /// Another rank went away.
    PeerLost,
    /// No progress for too long.
    Hang,
    /// A panic, or an end that nothing explains.
    Bug,
    /// A signal that was not sent by the launcher.
    Killed,
    /// A failure of no kind above.
    Failed,
}

/// How a rank ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done and `summary.json` is written.
    Done,
    /// Asked to stop: a checkpoint of the last finished step is on disk. Exit code 3.
    Stopped,
}

impl Outcome {
    /// The outcome of a run that ended so.
    ///
    /// # Errors
    ///
    /// The run's fault.
    pub(crate) fn of(ended: Result<(), Interrupt>) -> Result<Self, Fault> {
        match ended {
            Ok(()) => Ok(Self::Done),
            Err(Interrupt::Stop) => Ok(Self::Stopped),
            Err(Interrupt::Fault(fault)) => Err(fault),
        }
    }
}

impl Fault {
    /// Its kind.
    pub fn kind(&self) -> FaultKind {
        match self {
            Self::BadInput(_) | Self::BadInputs(_) => FaultKind::BadInput,
            Self::Held(_) => FaultKind::Held,
            Self::NotFinite(_) => FaultKind::NotFinite,
            Self::Failed(error) => error.chain().find_map(kind).unwrap_or(FaultKind::Failed),
        }
    }
}

/// The kind of an error, or of what it names as its cause without holding it as a source.
fn kind(error: &(dyn std::error::Error + 'static)) -> Option<FaultKind> {
    if let Some(fault) = error.downcast_ref::<spd_engine::Fault>() {
        return fault.is_peer_lost().then_some(FaultKind::PeerLost);
    }
    let found = match error.downcast_ref::<CheckpointError>() {
        Some(CheckpointError::Io { found, .. } | CheckpointError::Denied { found, .. }) => {
            Some(found)
        }
        Some(CheckpointError::NoSpace { .. }) => return Some(FaultKind::InputOutput),
        Some(_) => None,
        None => match error.downcast_ref::<SpoolError>() {
            Some(SpoolError::Io { found, .. }) => Some(found),
            None => error.downcast_ref::<io::Error>(),
        },
    };
    Some(match found?.kind() {
        ErrorKind::OutOfMemory => FaultKind::OutOfMemory,
        _ => FaultKind::InputOutput,
    })
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadInput(line) | Self::Held(line) | Self::NotFinite(line) => f.write_str(line),
            Self::BadInputs(lines) => f.write_str(&lines.join("\n")),
            Self::Failed(err) => write!(f, "{err:#}"),
        }
    }
}

impl From<Faults> for Fault {
    fn from(faults: Faults) -> Self {
        Self::BadInputs(faults.iter().map(ToString::to_string).collect())
    }
}

impl From<anyhow::Error> for Fault {
    fn from(err: anyhow::Error) -> Self {
        Self::Failed(err)
    }
}

/// Linux's error for a link that leads to itself (`ELOOP`), for which `ErrorKind` has no stable
/// name.
const TOO_MANY_LINKS: i32 = 40;

impl From<DataError> for Fault {
    /// Data is the user's to mend, but for a disk that fails while it is read, and a machine that
    /// has no thread to give.
    fn from(err: DataError) -> Self {
        match &err {
            DataError::Io { source, .. }
                if !matches!(
                    source.kind(),
                    ErrorKind::NotFound
                        | ErrorKind::PermissionDenied
                        | ErrorKind::IsADirectory
                        | ErrorKind::NotADirectory
                        | ErrorKind::InvalidInput
                        | ErrorKind::InvalidFilename
                        | ErrorKind::FileTooLarge
                ) && source.raw_os_error() != Some(TOO_MANY_LINKS) =>
            {
                Self::Failed(err.into())
            }
            DataError::Thread(_) => Self::Failed(err.into()),
            _ => Self::BadInput(err.to_string()),
        }
    }
}

impl From<BuildError> for Fault {
    fn from(err: BuildError) -> Self {
        Self::Failed(err.into())
    }
}

impl From<TooManyThreads> for Fault {
    /// Bad input: the user can ask for fewer threads.
    fn from(err: TooManyThreads) -> Self {
        Self::BadInput(format!("--threads: {err}"))
    }
}

impl From<spd_engine::Fault> for Fault {
    fn from(err: spd_engine::Fault) -> Self {
        Self::Failed(err.into())
    }
}

impl From<SpoolError> for Fault {
    fn from(err: SpoolError) -> Self {
        Self::Failed(err.into())
    }
}

impl From<CheckpointError> for Fault {
    fn from(err: CheckpointError) -> Self {
        match err {
            CheckpointError::Held { .. } => Self::Held(err.to_string()),
            CheckpointError::Denied { .. }
            | CheckpointError::Format { .. }
            | CheckpointError::Frozen { .. }
            | CheckpointError::NoLocks { .. } => Self::BadInput(err.to_string()),
            other => Self::Failed(other.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_disk_that_refuses_is_no_bad_input_and_no_bug() {
        let full = || CheckpointError::NoSpace {
            path: "runs/x".into(),
            bytes: 7,
        };
        let stale = || io::Error::from_raw_os_error(116);
        for fault in [
            Fault::from(full()),
            Fault::from(anyhow::Error::from(full()).context("the last state")),
            Fault::from(SpoolError::Io {
                path: "runs/x".into(),
                doing: "write",
                found: stale(),
            }),
            Fault::from(DataError::Io {
                action: "read",
                path: "data/x".into(),
                source: stale(),
            }),
            Fault::from(Err::<(), _>(stale()).context("runs/x").unwrap_err()),
        ] {
            assert_eq!(fault.kind(), FaultKind::InputOutput, "{fault}");
        }
        let missing = DataError::Io {
            action: "open",
            path: "data/x".into(),
            source: ErrorKind::NotFound.into(),
        };
        assert_eq!(Fault::from(missing).kind(), FaultKind::BadInput);
        let no_thread = DataError::Thread(io::Error::from_raw_os_error(11));
        assert!(matches!(Fault::from(no_thread), Fault::Failed(_)));
        let memory = io::Error::from(ErrorKind::OutOfMemory);
        let memory = Fault::from(anyhow::Error::from(memory));
        assert_eq!(memory.kind(), FaultKind::OutOfMemory);
        let peer = spd_engine::Fault::peer_lost("rank 1 has gone");
        assert_eq!(Fault::from(peer).kind(), FaultKind::PeerLost);
        let gpu = spd_engine::Fault::new("the GPU cannot go on");
        assert_eq!(Fault::from(gpu).kind(), FaultKind::Failed);
        let other = Fault::from(anyhow::anyhow!("no idea"));
        assert_eq!(other.kind(), FaultKind::Failed);
    }
}
