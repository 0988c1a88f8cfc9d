//! Hashes of token files that were checked. A file is read again only when its size or time has
//! changed.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::tokens::{Contents, TokenFile};

/// The results of [`Dataset::check`](crate::Dataset::check) for each file. The caller stores them
/// as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedFiles {
    /// By canonical path.
    files: BTreeMap<PathBuf, File>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct File {
    #[serde(flatten)]
    state: State,
    #[serde(flatten)]
    contents: Contents,
}

/// The state of a file, which changes with every write. It includes the time of the last change of
/// the inode (ctime), which no program can set back, unlike mtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    bytes: u64,
    inode: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl CheckedFiles {
    /// The contents of a file, from an earlier check or read now.
    pub(crate) fn contents(&mut self, file: &TokenFile) -> Result<Contents, DataError> {
        let (path, state) = (path(file), State::of(&file.opened.metadata()?));
        if let Some(known) = self.files.get(&path).filter(|known| known.state == state) {
            return Ok(known.contents.clone());
        }
        let contents = file.read_all()?;
        // A file that changed during the read is not remembered.
        if State::of(&file.opened.metadata()?) == state {
            let contents = contents.clone();
            self.files.insert(path, File { state, contents });
        }
        Ok(contents)
    }

    /// Drops the result of a file, so that the next check reads it again: the read itself may have
    /// failed.
    pub(crate) fn forget(&mut self, file: &TokenFile) {
        self.files.remove(&path(file));
    }
}

impl State {
    fn of(found: &Metadata) -> Self {
        Self {
            bytes: found.len(),
            inode: found.ino(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

fn path(file: &TokenFile) -> PathBuf {
    fs::canonicalize(file.path()).unwrap_or_else(|_| file.path().to_owned())
}
