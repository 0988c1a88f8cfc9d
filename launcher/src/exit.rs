//! Exit codes for scripts; `--help` lists them.

use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// The result of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// Success.
    Done,
    /// A failure.
    Failed,
    /// Bad input; nothing was created.
    BadInput,
    /// Stopped on request: the same command goes on.
    Stopped,
    /// Ranks were killed by a second request, with this signal.
    Killed(i32),
}

impl Exit {
    /// The exit code.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::BadInput => 2,
            Self::Stopped => 3,
            // A shell reports this code for a program that died of a signal.
            Self::Killed(signal) => 128 + u8::try_from(signal).unwrap_or(0),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
