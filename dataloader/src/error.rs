//! Errors of data, one line each.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why there is no batch or no dataset. Every text names the file or the value at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The dataset's path does not exist. The caller may know the command that makes it.
    #[error("{}: no such dataset", path.display())]
    Missing {
        /// The directory or file that was asked for.
        path: PathBuf,
    },
    /// A file differs from its name, its header or its index: copied in part, damaged, or changed
    /// while it was in use.
    #[error("{}: {fault}", path.display())]
    Damaged {
        /// The file at fault.
        path: PathBuf,
        /// The expected and the found value, and a remedy.
        fault: String,
    },
    /// A token is outside of the vocabulary: the wrong tokenizer, or the wrong dtype.
    #[error(
        "{}: token {offset} is {id}, but the vocabulary has {vocab} ids; {hint}",
        path.display()
    )]
    Vocabulary {
        /// The file that holds the token.
        path: PathBuf,
        /// Index of the token among those of the file.
        offset: u64,
        /// The id found.
        id: u32,
        /// Ids must be below this.
        vocab: u32,
        /// A remedy.
        hint: &'static str,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}{}", path.display(), advice(source))]
    Io {
        /// The action, as in "cannot open".
        action: &'static str,
        /// The file of the action.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The thread that reads ahead could not be started.
    #[error("cannot start the data thread: {0}; is a limit reached?")]
    Thread(io::Error),
    /// The caller's request cannot be met; the text gives the reason.
    #[error("{0}")]
    Request(String),
    /// The caller stopped the work.
    #[error("stopped on request")]
    Asked,
    /// [`Loader::next`](crate::Loader::next) was called again after it had returned an error.
    #[error("the data loader has stopped, after an error it has reported; start another one")]
    Stopped,
}

impl DataError {
    pub(crate) fn damaged(path: &Path, fault: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            fault: fault.into(),
        }
    }

    /// For `map_err`. The message says "cannot" and then `action`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; make room, or write to another file system"
        }
        io::ErrorKind::StaleNetworkFileHandle => {
            "; the server has the file that was opened no more: was it replaced there? start again"
        }
        io::ErrorKind::OutOfMemory => {
            "; is there memory left, and may this process take it (ulimit -v)?"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_has_advice() {
        let error = DataError::io("write", Path::new("out/train/tokens-00000.safetensors"))(
            io::Error::from(io::ErrorKind::StorageFull),
        );
        assert_eq!(
            error.to_string(),
            "out/train/tokens-00000.safetensors: cannot write: no storage space; make room, or write to \
             another file system"
        );
    }

    #[test]
    fn stale_file_handle_has_advice() {
        let error = io::Error::from_raw_os_error(rustix::io::Errno::STALE.raw_os_error());
        assert_eq!(
            DataError::io("read", Path::new("data/m.bin"))(error).to_string(),
            "data/m.bin: cannot read: Stale file handle (os error 116); the server has the file that was opened no more: was it \
             replaced there? start again"
        );
    }
}
