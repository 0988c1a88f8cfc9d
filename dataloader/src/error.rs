//! What can be wrong with data, told in one line each.

use std::io;
use std::path::{Path, PathBuf};

/// Why there is no batch, or no dataset. Every text names the file or the value at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Nothing is at the dataset's path: the caller may know the command that makes it.
    #[error("{}: no such dataset", path.display())]
    Missing {
        /// The directory or file that was asked for.
        path: PathBuf,
    },
    /// A file is not what its name, its header or its index promises: copied in part, damaged, or changed
    /// while it was in use.
    #[error("{}: {fault}", path.display())]
    Damaged {
        /// The file at fault.
        path: PathBuf,
        /// What was promised, what was found, and what to try.
        fault: String,
    },
    /// A token that the vocabulary does not have: the wrong tokenizer, or the wrong dtype.
    #[error("{}: token {offset} is {id}, but the vocabulary has {vocab} ids; {hint}", path.display())]
    Vocabulary {
        /// The file that holds the token.
        path: PathBuf,
        /// Index of the token among those of the file.
        offset: u64,
        /// The id found.
        id: u32,
        /// Ids must be below this.
        vocab: u32,
        /// What to try.
        hint: &'static str,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}{}", path.display(), advice(source))]
    Io {
        /// What was tried, as in "cannot open".
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The thread that reads ahead could not be started.
    #[error("cannot start the data thread: {0}; is a limit reached?")]
    Thread(io::Error),
    /// The caller asked for something that no file can give; the text says what.
    #[error("{0}")]
    Request(String),
    /// Whoever asked for something changed their mind. Nothing is left of it.
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

    /// For `map_err`: the action is what "cannot" is followed by.
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
    fn a_full_disk_says_what_to_do() {
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
    fn a_file_that_a_server_has_no_more_says_so() {
        let error = io::Error::from_raw_os_error(rustix::io::Errno::STALE.raw_os_error());
        assert_eq!(
            DataError::io("read", Path::new("data/m.bin"))(error).to_string(),
            "data/m.bin: cannot read: Stale file handle (os error 116); the server has the file that was opened no more: was it \
             replaced there? start again"
        );
    }
}
