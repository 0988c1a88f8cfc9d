//! Errors of a page. Each text is one line with a remedy.

use std::io;
use std::path::PathBuf;

/// The reason why a page cannot be made or written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The path is neither a run nor a sweep.
    #[error(
        "{}: expected the directory of a run (with config.toml) or a sweep (with sweep.json), found {found}; give one, like runs/tms_5-2",
        path.display()
    )]
    NoRun {
        /// The given path.
        path: PathBuf,
        /// The found file, in words.
        found: String,
    },

    /// The path is not a directory.
    #[error(
        "{}: expected a directory with runs, found {found}; give one, like runs",
        path.display()
    )]
    NoDirectory {
        /// The given path.
        path: PathBuf,
        /// The found file, in words.
        found: String,
    },

    /// The page cannot be written.
    #[error(
        "{}: cannot write the page: {found}; {}",
        path.display(),
        spd_files::advice(found).unwrap_or("is the disk there, writable and not full?")
    )]
    Write {
        /// The page.
        path: PathBuf,
        /// The operating system's answer.
        found: io::Error,
    },
}
