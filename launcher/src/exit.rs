//! How the program ends, as a number for scripts; `--help` lists the same codes.

use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// The end of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// All is done.
    Done,
    /// Something went wrong on the way.
    Failed,
    /// The user's to mend; nothing was created.
    BadInput,
    /// Asked to stop, and did: the same command goes on.
    Stopped,
    /// Asked twice: ranks were killed. Holds the signal.
    Killed(i32),
}

impl Exit {
    /// The code that the operating system sees.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::BadInput => 2,
            Self::Stopped => 3,
            // What a shell reports for a program that a signal ended.
            Self::Killed(signal) => 128 + u8::try_from(signal).unwrap_or(0),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
