//! One mapped file of tokens: read where it lies, checked on the way.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::DataError;

/// How an id is stored; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Two bytes an id.
    U16,
    /// Four bytes an id.
    U32,
}

impl Dtype {
    /// Bytes of one id.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// The smallest dtype that holds all ids below `vocab`.
    pub const fn holding(vocab: u32) -> Self {
        if vocab <= 1 << 16 {
            Self::U16
        } else {
            Self::U32
        }
    }
}

/// A whole file in memory, and the handle to ask whether it still is whole.
#[derive(Debug)]
pub(crate) struct Mapped {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl Mapped {
    /// Maps a regular file that is not empty.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = spd_files::open(path).map_err(DataError::io("open", path))?;
        if file.metadata().map_err(DataError::io("open", path))?.len() == 0 {
            return Err(DataError::damaged(
                path,
                "is empty; was it still being written?",
            ));
        }
        #[expect(
            unsafe_code,
            reason = "datasets are larger than memory, and every rank shares the pages"
        )]
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

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// The bytes of the file, for one read at once: ask again before the next one.
    ///
    /// # Errors
    ///
    /// When the file has another length than when it was mapped.
    pub(crate) fn bytes(&self) -> Result<&[u8], DataError> {
        let now = self
            .file
            .metadata()
            .map_err(DataError::io("stat", &self.path))?
            .len();
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

/// The tokens of one mapped file.
#[derive(Debug)]
pub(crate) struct TokenFile {
    pub(crate) mapped: Mapped,
    pub(crate) dtype: Dtype,
    /// Where the tokens lie in the file, in bytes: a whole number of ids, inside the file.
    pub(crate) token_bytes: Range<usize>,
    /// Where the document ends (u64 each) lie, if the format has them.
    pub(crate) end_bytes: Option<Range<usize>>,
}

impl TokenFile {
    pub(crate) fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.token_bytes.len() / self.dtype.bytes()
    }

    /// Number of documents that end in this file, if the format says so.
    pub(crate) fn documents(&self) -> Option<usize> {
        self.end_bytes.as_ref().map(|bytes| bytes.len() / 8)
    }

    /// Widens the tokens `first .. first + out.len()`, which must exist, into `out`.
    ///
    /// # Errors
    ///
    /// When one of them is not below `vocab`, or the file has changed its length. `out` then holds junk.
    pub(crate) fn copy(&self, first: usize, vocab: u32, out: &mut [u32]) -> Result<(), DataError> {
        let size = self.dtype.bytes();
        let start = self.token_bytes.start + first * size;
        let stored = &self.mapped.bytes()?[start..start + out.len() * size];
        // One pass, without a branch for each token, so that it compiles to vector instructions.
        let largest = match self.dtype {
            Dtype::U16 => widen(stored, out, |bytes: [u8; 2]| {
                u32::from(u16::from_le_bytes(bytes))
            }),
            Dtype::U32 => widen(stored, out, u32::from_le_bytes),
        };
        if largest < vocab {
            return Ok(());
        }
        let at = out.iter().position(|&id| id >= vocab).unwrap_or(0);
        Err(DataError::Vocabulary {
            path: self.path().to_owned(),
            offset: (first + at) as u64,
            id: out[at],
            vocab,
            hint: self.hint(out[at], vocab),
        })
    }

    /// xxh3-128 of the tokens as they are stored.
    pub(crate) fn hash(&self) -> Result<u128, DataError> {
        Ok(xxh3_128(&self.mapped.bytes()?[self.token_bytes.clone()]))
    }

    /// Where documents end, exclusive, in tokens.
    pub(crate) fn document_ends(&self) -> Result<impl Iterator<Item = u64>, DataError> {
        let bytes = &self.mapped.bytes()?[self.end_bytes.clone().unwrap_or_default()];
        Ok(bytes
            .as_chunks()
            .0
            .iter()
            .map(|&end| u64::from_le_bytes(end)))
    }

    fn hint(&self, id: u32, vocab: u32) -> &'static str {
        let two_ids = id & 0xffff < vocab && id >> 16 < vocab;
        if self.dtype == Dtype::U32 && two_ids {
            "it would be two ids of u16: was u32 the right dtype?"
        } else {
            "was the text tokenized for another model?"
        }
    }
}

/// Returns the largest id.
fn widen<const N: usize>(stored: &[u8], out: &mut [u32], id: impl Fn([u8; N]) -> u32) -> u32 {
    let mut largest = 0;
    for (slot, &bytes) in out.iter_mut().zip(stored.as_chunks().0) {
        *slot = id(bytes);
        largest = largest.max(*slot);
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_five_thousand_five_hundred_and_thirty_six_ids_fit_two_bytes() {
        assert_eq!(Dtype::holding(65_536), Dtype::U16);
        assert_eq!(Dtype::holding(65_537), Dtype::U32);
    }

    #[test]
    fn tokens_are_read_from_an_odd_address() {
        let mut out = [0; 2];
        let bytes = [9, 1, 0, 255, 255];
        let largest = widen(&bytes[1..], &mut out, |pair: [u8; 2]| {
            u32::from(u16::from_le_bytes(pair))
        });
        assert_eq!((out, largest), ([1, 65_535], 65_535));
    }

    #[test]
    fn a_directory_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = Mapped::open(dir.path()).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{}: cannot open: expected a file, found a directory",
                dir.path().display()
            )
        );
    }
}
