//! One file of tokens: read by the row, checked on the way.

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::DataError;
use crate::opened::{Opened, PIECE_BYTES};

/// How an id is stored; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Two bytes an id.
    U16,
    /// Four bytes an id.
    U32,
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
        })
    }
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

/// The tokens of one file.
#[derive(Debug)]
pub(crate) struct TokenFile {
    pub(crate) opened: Opened,
    pub(crate) dtype: Dtype,
    /// Where the tokens lie in the file, in bytes: a whole number of ids, inside the file.
    pub(crate) token_bytes: Range<u64>,
    /// Where the document ends (u64 each) lie, if the format has them.
    pub(crate) end_bytes: Option<Range<u64>>,
}

impl TokenFile {
    pub(crate) fn path(&self) -> &Path {
        self.opened.path()
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> u64 {
        bytes_of(&self.token_bytes) / self.dtype.bytes() as u64
    }

    /// Number of documents that end in this file, if the format says so.
    pub(crate) fn documents(&self) -> Option<u64> {
        self.end_bytes.as_ref().map(|bytes| bytes_of(bytes) / 8)
    }

    /// Asks the kernel to read `count` tokens from `first` on, which must exist, ahead of time.
    pub(crate) fn will_need(&self, first: u64, count: usize) {
        self.opened.will_need(self.place(first, count));
    }

    /// Where `count` tokens from `first` on lie, in bytes.
    fn place(&self, first: u64, count: usize) -> Range<u64> {
        let size = self.dtype.bytes() as u64;
        let start = self.token_bytes.start + first * size;
        start..start + count as u64 * size
    }

    /// Widens the tokens `first .. first + out.len()`, which must exist, into `out`.
    ///
    /// - `stored`: memory for them as they are stored, used again by the next call
    ///
    /// # Errors
    ///
    /// When one of them is not below `vocab`, or they cannot be read. `out` then holds junk.
    pub(crate) fn copy(
        &self,
        first: u64,
        vocab: u32,
        stored: &mut Vec<u8>,
        out: &mut [u32],
    ) -> Result<(), DataError> {
        stored.resize(out.len() * self.dtype.bytes(), 0);
        self.opened
            .read(self.place(first, out.len()).start, stored)?;
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
        // Junk may be of a file that is being written just now.
        self.opened.check_unchanged()?;
        Err(DataError::Vocabulary {
            path: self.path().to_owned(),
            offset: first + at as u64,
            id: out[at],
            vocab,
            hint: self.hint(out[at], vocab),
        })
    }

    /// xxh3-128 of the tokens as they are stored, and the largest of them; 0 where there is none.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or its document ends do not ascend within its tokens.
    pub(crate) fn read_all(&self) -> Result<(u128, u32), DataError> {
        let (mut hash, mut largest) = (Xxh3::new(), 0);
        self.opened
            .read_pieces(self.token_bytes.clone(), |stored| {
                hash.update(stored);
                largest = largest.max(match self.dtype {
                    Dtype::U16 => largest_of(stored, |bytes: [u8; 2]| {
                        u32::from(u16::from_le_bytes(bytes))
                    }),
                    Dtype::U32 => largest_of(stored, u32::from_le_bytes),
                });
                Ok(())
            })?;
        self.each_document_end(|_| {})?;
        Ok((hash.digest128(), largest))
    }

    /// Calls `each` with the end of each document, where the format has them.
    ///
    /// # Errors
    ///
    /// When they do not ascend within the tokens.
    pub(crate) fn each_document_end(&self, mut each: impl FnMut(u64)) -> Result<(), DataError> {
        let (mut last, most) = (0, self.len());
        let bytes = self.end_bytes.clone().unwrap_or_default();
        self.opened.read_pieces(bytes, |stored| {
            for &end in stored.as_chunks().0 {
                let end = u64::from_le_bytes(end);
                // Each beyond the one before, from 0 on.
                if end <= last || end > most {
                    return Err(DataError::damaged(
                        self.path(),
                        "its document ends do not ascend within its tokens; copy it again, or tokenize again",
                    ));
                }
                each(end);
                last = end;
            }
            Ok(())
        })
    }

    /// Reads every token against a vocabulary.
    ///
    /// # Errors
    ///
    /// The first token that is not below `vocab`.
    pub(crate) fn find_outside(&self, vocab: u32) -> Result<(), DataError> {
        let (mut ids, mut stored) = (vec![0; PIECE_BYTES], Vec::new());
        let mut first = 0;
        while first < self.len() {
            #[expect(clippy::cast_possible_truncation, reason = "at most a piece")]
            let count = (self.len() - first).min(PIECE_BYTES as u64) as usize;
            self.copy(first, vocab, &mut stored, &mut ids[..count])?;
            first += count as u64;
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

fn bytes_of(range: &Range<u64>) -> u64 {
    range.end - range.start
}

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
}
