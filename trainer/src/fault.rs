//! How a rank ends.

use std::fmt;

use spd_checkpoint::CheckpointError;
use spd_dataloader::DataError;
use spd_engine::{BuildError, TooManyThreads};
use spd_tracker::SpoolError;

/// Why a run cannot go on.
#[derive(Debug)]
pub enum Fault {
    /// The user's to mend: the run file, the data, the directory. One line, exit code 2.
    BadInput(String),
    /// Anything else, exit code 1.
    Failed(anyhow::Error),
}

/// How a rank ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done and `summary.json` is written.
    Done,
    /// Asked to stop: a checkpoint of the last finished step is on disk. Exit code 3.
    Stopped,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadInput(line) => f.write_str(line),
            Self::Failed(err) => write!(f, "{err:#}"),
        }
    }
}

impl From<anyhow::Error> for Fault {
    fn from(err: anyhow::Error) -> Self {
        Self::Failed(err)
    }
}

impl From<DataError> for Fault {
    /// Data is the user's to mend.
    fn from(err: DataError) -> Self {
        Self::BadInput(err.to_string())
    }
}

impl From<BuildError> for Fault {
    fn from(err: BuildError) -> Self {
        Self::Failed(err.into())
    }
}

impl From<TooManyThreads> for Fault {
    /// Who asks for threads, or limits them, can ask for fewer.
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
    /// Rows that are not those of the checkpoint are the user's to put back.
    fn from(err: SpoolError) -> Self {
        match err {
            SpoolError::Short { .. } | SpoolError::Differs { .. } => {
                Self::BadInput(err.to_string())
            }
            SpoolError::Io { .. } => Self::Failed(err.into()),
        }
    }
}

impl From<CheckpointError> for Fault {
    fn from(err: CheckpointError) -> Self {
        match err {
            CheckpointError::NoSpace { .. }
            | CheckpointError::Denied { .. }
            | CheckpointError::Format { .. }
            | CheckpointError::Held { .. } => Self::BadInput(err.to_string()),
            other => Self::Failed(other.into()),
        }
    }
}
