//! A text that is mapped.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::DataError;

/// A whole file in memory, and the handle to ask whether it still is whole.
#[derive(Debug)]
pub(super) struct Mapped {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl Mapped {
    /// Maps a regular file that is not empty.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let file = spd_files::open(path).map_err(DataError::io("open", path))?;
        if file.metadata().map_err(DataError::io("open", path))?.len() == 0 {
            return Err(DataError::damaged(
                path,
                "is empty; was it still being written?",
            ));
        }
        #[expect(unsafe_code, reason = "texts are larger than memory")]
        // SAFETY: the bytes are only read, and nothing of ours writes to a file that has its final name:
        // `publish` renames whole directories into place. Another program could still overwrite or
        // shorten the file. Every read goes through `bytes`, which refuses a shorter file first; a file
        // that shrinks between that check and the read ends the process by SIGBUS, as FORMAT.md says.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io("map", path))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            map,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file, for one read at once: ask again before the next one.
    ///
    /// # Errors
    ///
    /// When the file has another length than when it was mapped.
    pub(super) fn bytes(&self) -> Result<&[u8], DataError> {
        let found = self.file.metadata();
        let now = found.map_err(DataError::io("stat", &self.path))?.len();
        if now == self.map.len() as u64 {
            return Ok(&self.map);
        }
        Err(DataError::damaged(
            &self.path,
            format!(
                "had {} bytes when it was opened, has {now} now; restore it, and replace files in use by \
                 renaming, never in place",
                self.map.len()
            ),
        ))
    }
}
