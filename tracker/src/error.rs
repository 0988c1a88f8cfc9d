//! Errors of a spool. Each text is one line and holds the system's own words.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why a spool cannot be opened or rolled back. Damaged rows are not an error.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The operating system refused.
    #[error(
        "{}: cannot {doing}: {found}; {}",
        path.display(),
        spd_files::advice(found).unwrap_or("is the disk there, writable and not full?")
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// The action, as in "cannot open".
        doing: &'static str,
        /// The operating system's answer.
        found: io::Error,
    },
}

impl SpoolError {
    pub(crate) fn io(path: &Path, doing: &'static str, found: io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            doing,
            found,
        }
    }
}

/// The reason why a row could not be read. The reader may be called again.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The line is not a row. The next call continues after it.
    #[error("{}: line {line} is no row: {reason}; it is skipped", path.display())]
    Junk {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// The fault.
        reason: String,
    },

    /// The line is longer than any row, so the file is not a spool. Every further call returns
    /// this.
    #[error(
        "{}: line {line} is longer than {longest} bytes; is this a metrics spool?",
        path.display()
    )]
    Endless {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// Most bytes of a line.
        longest: usize,
    },

    /// The starts of the run cannot be read. The next call tries again.
    #[error("{found}")]
    Starts {
        /// The fault of `starts.jsonl`.
        found: SpoolError,
    },

    /// The operating system refused; the next call tries again.
    #[error("{}: cannot read: {found}; it is tried again", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        found: io::Error,
    },
}
