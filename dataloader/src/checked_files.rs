//! Hashes of the token files that were checked, so that a file is read again only when its size or time has changed.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::tokens::{Contents, TokenFile};

/// What [`Dataset::check`](crate::Dataset::check) found in files. The caller keeps it where it likes, as JSON.
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

/// A file that has not been changed since has the same. The time of the last change of its inode (ctime) is among them
/// because, unlike mtime, nobody can set it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    bytes: u64,
    inode: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl CheckedFiles {
    /// What a file holds: as it was found, or read now.
    pub(crate) fn contents(&mut self, file: &TokenFile) -> Result<Contents, DataError> {
        let (path, state) = (path(file), State::of(&file.opened.metadata()?));
        if let Some(known) = self.files.get(&path).filter(|known| known.state == state) {
            return Ok(known.contents.clone());
        }
        let contents = file.read_all()?;
        // What was changed while it was read is not known.
        if State::of(&file.opened.metadata()?) == state {
            let contents = contents.clone();
            self.files.insert(path, File { state, contents });
        }
        Ok(contents)
    }

    /// What does not hold is read again the next time: it may have been the reading that failed.
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
