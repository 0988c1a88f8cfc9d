//! One mapped file of tokens: read where it lies, checked on the way.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

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

    /// What the file system says of the file that is mapped, whatever its path names by now.
    pub(crate) fn metadata(&self) -> Result<Metadata, DataError> {
        let found = self.file.metadata();
        found.map_err(DataError::io("stat", &self.path))
    }

    /// The bytes of the file, for one read at once: ask again before the next one.
    ///
    /// # Errors
    ///
    /// When the file has another length than when it was mapped.
    pub(crate) fn bytes(&self) -> Result<&[u8], DataError> {
        let now = self.metadata()?.len();
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

    /// xxh3-128 of the tokens as they are stored, and the largest of them; 0 where there is none.
    ///
    /// # Errors
    ///
    /// When the file has changed its length, or its document ends do not ascend within its tokens.
    pub(crate) fn read_all(&self) -> Result<(u128, u32), DataError> {
        let (mut hash, mut largest) = (Xxh3::new(), 0);
        for start in self.token_bytes.clone().step_by(CHUNK_BYTES) {
            let end = self.token_bytes.end.min(start + CHUNK_BYTES);
            let stored = &self.mapped.bytes()?[start..end];
            hash.update(stored);
            largest = largest.max(match self.dtype {
                Dtype::U16 => largest_of(stored, |bytes: [u8; 2]| {
                    u32::from(u16::from_le_bytes(bytes))
                }),
                Dtype::U32 => largest_of(stored, u32::from_le_bytes),
            });
        }
        self.check_document_ends()?;
        Ok((hash.digest128(), largest))
    }

    fn check_document_ends(&self) -> Result<(), DataError> {
        let bytes = &self.mapped.bytes()?[self.end_bytes.clone().unwrap_or_default()];
        let ends = bytes
            .as_chunks()
            .0
            .iter()
            .map(|&end| u64::from_le_bytes(end));
        let last = ends.clone().next_back().unwrap_or(0);
        // Each beyond the one before, from 0 on.
        let all = std::iter::once(0).chain(ends);
        if last <= self.len() as u64 && all.is_sorted_by(|a, b| a < b) {
            return Ok(());
        }
        Err(DataError::damaged(
            self.path(),
            "its document ends do not ascend within its tokens; copy it again, or tokenize again",
        ))
    }

    /// Reads every token against a vocabulary.
    ///
    /// # Errors
    ///
    /// The first token that is not below `vocab`.
    pub(crate) fn find_outside(&self, vocab: u32) -> Result<(), DataError> {
        let mut ids = vec![0; CHUNK_BYTES.min(self.len())];
        for first in (0..self.len()).step_by(CHUNK_BYTES) {
            let count = (self.len() - first).min(ids.len());
            self.copy(first, vocab, &mut ids[..count])?;
        }
        Ok(())
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

/// What is read at once: between two pieces the length of the file is looked at again. A multiple of an id's bytes.
const CHUNK_BYTES: usize = 1 << 20;

fn largest_of<const N: usize>(stored: &[u8], id: impl Fn([u8; N]) -> u32) -> u32 {
    let ids = stored.as_chunks().0.iter();
    ids.fold(0, |largest, &bytes| largest.max(id(bytes)))
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
