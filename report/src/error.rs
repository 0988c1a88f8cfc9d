//! Why there is no page. Each text is one line that says what to try.

use std::io;
use std::path::PathBuf;

/// Why a page cannot be made or written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The path stands for nothing that has curves.
    #[error("{}: a run directory (with config.toml) or that of a sweep (with sweep.json) is wanted, and {found}; give one, like runs/tms_5-2", path.display())]
    NoRun {
        /// What was given.
        path: PathBuf,
        /// What is there.
        found: String,
    },

    /// There is nothing to look into for runs.
    #[error("{}: a directory with runs is wanted, and {found} is there; give one, like runs", path.display())]
    NoDirectory {
        /// What was given.
        path: PathBuf,
        /// What is there.
        found: String,
    },

    /// The page was made and cannot be put where it belongs.
    #[error("{}: cannot write the page: {found}; {}", path.display(), spd_files::advice(found).unwrap_or("is the disk there, writable and not full?"))]
    Write {
        /// The page.
        path: PathBuf,
        /// The operating system's answer.
        found: io::Error,
    },
}
