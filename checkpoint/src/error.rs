//! Errors of checkpoints, for the user who started the run.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::FORMAT;

/// Why a checkpoint was not written or not read.
///
/// Each text is one line and includes the operating system's message, so no variant has a source
/// that would repeat it.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk, or the user's quota on it, is full. The unfinished files have been removed.
    #[error(
        "no space left on {}: {bytes} bytes were needed; free some or point --out elsewhere",
        path.display()
    )]
    NoSpace {
        /// The file or directory to write.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },

    /// The user lacks the permission.
    #[error(
        "{}: cannot {doing}: {found}; allow it to this user or point --out elsewhere",
        path.display()
    )]
    Denied {
        /// The file or directory.
        path: PathBuf,
        /// The attempted change.
        doing: &'static str,
        /// The operating system's error.
        found: io::Error,
    },

    /// Any other error of the operating system.
    #[error(
        "{}: cannot {doing}: {found}; {}",
        path.display(),
        spd_files::advice(found).unwrap_or("is the disk there and in order?")
    )]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The attempted operation.
        doing: &'static str,
        /// The operating system's error.
        found: io::Error,
    },

    /// The directory does not match its manifest: a bad disk, an incomplete copy, or an edit.
    #[error("{}: {reason}; resume from an older checkpoint", path.display())]
    Damaged {
        /// The directory of the step.
        path: PathBuf,
        /// The fault, and its file or tensor.
        reason: String,
    },

    /// The file of frozen tensors, which all checkpoints of a run share, does not match a manifest.
    /// It can be written again from the tensors.
    #[error(
        "{}: {reason}; put it back, or go on with the run, which writes it again",
        path.display()
    )]
    Frozen {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },

    /// A complete checkpoint of a format that this build does not read.
    #[error(
        "{}: written in checkpoint format {found}, this build reads formats up to {FORMAT}; \
         resume with the build that wrote it or move the directory away",
        path.display()
    )]
    Format {
        /// The directory of the step.
        path: PathBuf,
        /// The format in its manifest.
        found: u64,
    },

    /// The caller's snapshot cannot be stored.
    #[error("step {step}: tensor `{name}` {fault}")]
    Tensor {
        /// The step of the snapshot.
        step: u64,
        /// The tensor.
        name: String,
        /// The fault, and the remedy.
        fault: String,
    },

    /// The caller could not fill in the snapshot. Nothing was written.
    #[error("{found}")]
    Source {
        /// The cause.
        found: Box<dyn Error + Send + Sync>,
    },

    /// The file system has no locks, so two processes could own the run directory.
    #[error(
        "{}: its file system keeps no locks ({found}), and two runs might write there at once; \
         mount it with flock or point --out elsewhere",
        path.display()
    )]
    NoLocks {
        /// The lock file.
        path: PathBuf,
        /// The operating system's error.
        found: io::Error,
    },

    /// The run directory has lost its name while its lock was held.
    #[error("{}: the run directory was removed or renamed during the run; the run ends, since nothing more of it would be kept", path.display())]
    Gone {
        /// The run directory, as it was called.
        path: PathBuf,
    },

    /// Another process owns the run directory.
    #[error(
        "{}: held by {holder}; wait for it, stop it or choose another run directory",
        path.display()
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// The process and its host.
        holder: String,
    },
}

impl CheckpointError {
    /// An error of the operating system on locking.
    pub(crate) fn lock(path: &Path, found: io::Error) -> Self {
        match Errno::from_io_error(&found) {
            Some(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP) => Self::NoLocks {
                path: path.to_path_buf(),
                found,
            },
            _ => Self::io(path, "lock", found),
        }
    }

    /// An error of the operating system on an operation that needs no space.
    pub(crate) fn io(path: &Path, doing: &'static str, found: io::Error) -> Self {
        let path = path.to_path_buf();
        match found.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                Self::Denied { path, doing, found }
            }
            _ => Self::Io { path, doing, found },
        }
    }

    /// An error of the operating system on writing `bytes` bytes.
    pub(crate) fn write(path: &Path, bytes: u64, found: io::Error) -> Self {
        match found.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::NoSpace {
                path: path.to_path_buf(),
                bytes,
            },
            _ => Self::io(path, "write", found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Linux's error numbers.
    const EIO: i32 = 5;
    const EAGAIN: i32 = 11;
    const ENOMEM: i32 = 12;
    const EACCES: i32 = 13;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    const EDQUOT: i32 = 122;

    fn text(number: i32) -> String {
        let found = io::Error::from_raw_os_error(number);
        CheckpointError::write(Path::new("runs/a/step-00000007"), 4096, found).to_string()
    }

    #[test]
    fn a_full_disk_names_the_bytes_that_were_needed() {
        let full = "no space left on runs/a/step-00000007: 4096 bytes were needed; \
                    free some or point --out elsewhere";
        assert_eq!(text(ENOSPC), full);
        assert_eq!(text(EDQUOT), full);
    }

    #[test]
    fn a_denied_write_says_so() {
        assert_eq!(
            text(EACCES),
            "runs/a/step-00000007: cannot write: Permission denied (os error 13); \
             allow it to this user or point --out elsewhere"
        );
        assert_eq!(
            text(EROFS),
            "runs/a/step-00000007: cannot write: Read-only file system (os error 30); \
             allow it to this user or point --out elsewhere"
        );
    }

    #[test]
    fn a_lack_of_memory_is_not_blamed_on_the_disk() {
        assert_eq!(
            text(ENOMEM),
            "runs/a/step-00000007: cannot write: Cannot allocate memory (os error 12); \
             is there memory left, and may this process take it (ulimit -v)?"
        );
        assert_eq!(
            text(EAGAIN),
            "runs/a/step-00000007: cannot write: Resource temporarily unavailable (os error 11); \
             is there memory and room for another thread (ulimit -v, ulimit -u)?"
        );
    }

    #[test]
    fn a_file_system_without_locks_is_named() {
        for errno in [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP] {
            let said = CheckpointError::lock(Path::new("runs/a/lock"), errno.into()).to_string();
            let start = "runs/a/lock: its file system keeps no locks (";
            let end = "), and two runs might write there at once; mount it with flock or point --out elsewhere";
            assert!(said.starts_with(start) && said.ends_with(end), "{said}");
        }
        let other = CheckpointError::lock(Path::new("a"), Errno::IO.into());
        assert!(matches!(other, CheckpointError::Io { doing: "lock", .. }));
    }

    #[test]
    fn any_other_error_is_passed_on() {
        assert_eq!(
            text(EIO),
            "runs/a/step-00000007: cannot write: Input/output error (os error 5); \
             is the disk there and in order?"
        );
    }
}
