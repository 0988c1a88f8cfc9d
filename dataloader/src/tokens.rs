//! One file of tokens, read by the row and checked on the way.

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::DataError;
use crate::Dtype;
use crate::hash::hex;
use crate::megatron::SequenceIndex;
use crate::opened::{Opened, PIECE_BYTES};

/// The tokens of one file.
#[derive(Debug)]
pub(crate) struct TokenFile {
    pub(crate) opened: Opened,
    pub(crate) dtype: Dtype,
    /// Range of the tokens in the file, in bytes: a whole number of ids.
    pub(crate) token_bytes: Range<u64>,
    pub(crate) ends: Ends,
}

/// The ends of documents.
#[derive(Debug)]
pub(crate) enum Ends {
    /// The format has none.
    Unknown,
    /// Numbers (u64 each) in this range of the same file.
    Stored(Range<u64>),
    /// In an index beside it.
    Listed(SequenceIndex),
}

impl TokenFile {
    pub(crate) fn path(&self) -> &Path {
        &self.opened.path
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> u64 {
        bytes_of(&self.token_bytes) / self.dtype.bytes() as u64
    }

    /// Number of documents that end in this file, if the format lists them.
    pub(crate) fn documents(&self) -> Option<u64> {
        match &self.ends {
            Ends::Unknown => None,
            Ends::Stored(bytes) => Some(bytes_of(bytes) / 8),
            Ends::Listed(index) => Some(index.documents()),
        }
    }

    /// Requests `count` tokens from `first` on, which must exist, from the kernel.
    pub(crate) fn will_need(&self, first: u64, count: usize) {
        self.opened.will_need(self.place(first, count));
    }

    /// The range of `count` tokens from `first` on, in bytes.
    fn place(&self, first: u64, count: usize) -> Range<u64> {
        let size = self.dtype.bytes() as u64;
        let start = self.token_bytes.start + first * size;
        start..start + count as u64 * size
    }

    /// Widens the tokens `first .. first + out.len()`, which must exist, into `out`. The caller
    /// runs [`Opened::check_unchanged`] before it uses them.
    ///
    /// - `stored`: memory for the stored tokens, reused by the next call
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
            .copy(self.place(first, out.len()).start, stored)?;
        // One pass without a branch for each token, so that it compiles to vector instructions.
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
        // The id may be junk of a file that is being written.
        self.opened.check_unchanged()?;
        Err(DataError::Vocabulary {
            path: self.path().to_owned(),
            offset: first + at as u64,
            id: out[at],
            vocab,
            hint: self.hint(out[at], vocab),
        })
    }

    /// Reads the whole file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or its document ends do not ascend within its tokens.
    pub(crate) fn read_all(&self) -> Result<Contents, DataError> {
        let (mut hash, mut largest) = (Xxh3::new(), 0);
        self.each_piece(|stored| {
            hash.update(stored);
            self.each_id(stored, |id| largest = largest.max(id));
        })?;
        let mut ends = Xxh3::new();
        let documents = match &self.ends {
            Ends::Unknown => None,
            Ends::Listed(index) => Some(index.fingerprint()?),
            Ends::Stored(_) => {
                self.each_document_end(|end| ends.update(&end.to_le_bytes()))?;
                Some(hex(ends.digest128()))
            }
        };
        Ok(Contents {
            xxh3: hex(hash.digest128()),
            largest,
            documents,
        })
    }

    fn each_piece(&self, mut each: impl FnMut(&[u8])) -> Result<(), DataError> {
        self.opened.read_pieces(self.token_bytes.clone(), |stored| {
            each(stored);
            Ok(())
        })
    }

    fn each_id(&self, stored: &[u8], mut each: impl FnMut(u32)) {
        match self.dtype {
            Dtype::U16 => {
                let ids = stored.as_chunks().0.iter();
                ids.for_each(|&id| each(u16::from_le_bytes(id).into()));
            }
            Dtype::U32 => {
                let ids = stored.as_chunks().0.iter();
                ids.for_each(|&id| each(u32::from_le_bytes(id)));
            }
        }
    }

    /// Calls `each` with the end of each document, if the format lists them.
    ///
    /// # Errors
    ///
    /// When they do not ascend within the tokens.
    pub(crate) fn each_document_end(&self, mut each: impl FnMut(u64)) -> Result<(), DataError> {
        let bytes = match &self.ends {
            Ends::Unknown => return Ok(()),
            Ends::Listed(index) => return index.each_document_end(each),
            Ends::Stored(bytes) => bytes.clone(),
        };
        let (mut last, most) = (0, self.len());
        self.opened.read_pieces(bytes, |stored| {
            for &end in stored.as_chunks().0 {
                let end = u64::from_le_bytes(end);
                // Each end lies beyond the one before, from 0 on.
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

    /// Calls `each` with the place after each token `id`, which ends documents.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub(crate) fn each_end_by(&self, id: u32, mut each: impl FnMut(u64)) -> Result<(), DataError> {
        let mut place = 0;
        self.each_piece(|stored| {
            self.each_id(stored, |found| {
                place += 1;
                if found == id {
                    each(place);
                }
            });
        })?;
        self.opened.check_unchanged()
    }

    /// Checks every token against a vocabulary.
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
        self.opened.check_unchanged()
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

/// A digest of a file whose document ends ascend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contents {
    /// xxh3-128 of the tokens as stored, 32 hexadecimal digits.
    pub(crate) xxh3: String,
    /// The largest id; 0 for a file without ids.
    pub(crate) largest: u32,
    /// xxh3-128 of the list of document ends, if the format has one.
    pub(crate) documents: Option<String>,
}

fn bytes_of(range: &Range<u64>) -> u64 {
    range.end - range.start
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
    fn tokens_are_read_from_an_odd_address() {
        let mut out = [0; 2];
        let bytes = [9, 1, 0, 255, 255];
        let largest = widen(&bytes[1..], &mut out, |pair: [u8; 2]| {
            u32::from(u16::from_le_bytes(pair))
        });
        assert_eq!((out, largest), ([1, 65_535], 65_535));
    }
}
