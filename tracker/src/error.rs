//! What can go wrong with a spool. Each text is one line and holds the system's own words.

use std::io;
use std::path::{Path, PathBuf};

/// Why a spool cannot be opened or rolled back. Rows that are damaged are no reason.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The operating system refused.
    #[error("{}: cannot {doing}: {found}; {}", path.display(), spd_files::advice(found).unwrap_or("is the disk there, writable and not full?"))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
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

/// Why a row could not be read. The reader may be asked again.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The line is no row. The next call goes on behind it.
    #[error("{}: line {line} is no row: {reason}; it is skipped", path.display())]
    Junk {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },

    /// No line is that long: the file is no spool. Every further call says so again.
    #[error("{}: line {line} is longer than {longest} bytes; is this a metrics spool?", path.display())]
    Endless {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// The longest a line can be.
        longest: usize,
    },

    /// Where the run has been started again is not known. The next call tries again.
    #[error("{found}")]
    Starts {
        /// What is wrong with `starts.jsonl`.
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
