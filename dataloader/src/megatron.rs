//! Megatron's pairs of files: ids in `NAME.bin`, and the places of sequences and documents in
//! `NAME.idx`.
//!
//! ```text
//! "MMIDIDX\0\0"  u64 version = 1  u8 dtype  u64 sequences  u64 documents
//! i32 length of each sequence, in tokens
//! i64 begin of each sequence, in bytes of the .bin
//! i64 first sequence of each document, and the number of sequences at the end
//! i8  mode of each sequence, in some files
//! ```
//!
//! `documents` in the header is the length of that list, one more than the number of documents.

use std::fs;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::hash::hex;
use crate::opened::{Opened, PIECE_BYTES};
use crate::{DataError, Dtype};

const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
const HEADER: usize = 34;
const HEADER_BYTES: u64 = HEADER as u64;

/// An `.idx` file, checked when it was opened.
#[derive(Debug)]
pub(crate) struct SequenceIndex {
    opened: Opened,
    sequences: u64,
    /// Length of the list of documents.
    marks: u64,
}

/// The index of a path, `NAME.idx`, `NAME.bin` or `NAME`, if it exists.
pub(crate) fn index_of(path: &Path) -> Option<PathBuf> {
    let idx = match path.extension() {
        Some(end) if end == "idx" => path.to_owned(),
        Some(end) if end == "bin" => path.with_extension("idx"),
        _ => with_end(path, ".idx"),
    };
    // An index that cannot be read is an error; its .bin is not taken for bare ids.
    fs::symlink_metadata(&idx).is_ok().then_some(idx)
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Opens an index and its ids, and returns the dtype of the ids. Every number of the index is
/// checked.
pub(crate) fn open(idx: &Path) -> Result<(SequenceIndex, Opened, Dtype), DataError> {
    let damaged = |fault| DataError::damaged(idx, fault);
    let opened = Opened::open(idx)?;
    let mut header = [0; HEADER];
    if opened.bytes < HEADER_BYTES {
        return Err(damaged(format!(
            "has {} bytes, too few for an index of Megatron's",
            opened.bytes
        )));
    }
    opened.read(0, &mut header)?;
    let word = |at: usize| {
        let bytes = header[at..].first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    if header[..9] != MAGIC {
        return Err(damaged(
            "does not begin with MMIDIDX, as Megatron's indexes do; was it copied whole?"
                .to_owned(),
        ));
    }
    if word(9) != 1 {
        return Err(damaged(format!(
            "is of version {}; this program reads version 1",
            word(9)
        )));
    }
    let dtype = match header[17] {
        4 => Dtype::U32,
        8 => Dtype::U16,
        code => {
            return Err(damaged(format!(
                "says that ids are of Megatron's type {code}; 8 (uint16) and 4 (int32) are read"
            )));
        }
    };
    let (sequences, marks) = (word(18), word(26));
    let lists = sequences
        .checked_mul(12)
        .and_then(|bytes| bytes.checked_add(marks.checked_mul(8)?))
        .and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    let fits = lists.is_some_and(|bytes| {
        bytes == opened.bytes || bytes.checked_add(sequences) == Some(opened.bytes)
    });
    if !fits {
        return Err(damaged(format!(
            "promises {sequences} sequences and {marks} document marks, which {} bytes do not hold; was it \
             copied whole?",
            opened.bytes
        )));
    }
    let index = SequenceIndex {
        opened,
        sequences,
        marks,
    };
    let bin = Opened::open(&idx.with_extension("bin")).map_err(|error| match error {
        DataError::Io { path, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            damaged(format!("has no {} beside it; copy both", path.display()))
        }
        other => other,
    })?;
    index.check(&bin, dtype)?;
    Ok((index, bin, dtype))
}

impl SequenceIndex {
    /// Number of documents.
    pub(crate) fn documents(&self) -> u64 {
        self.marks - 1
    }

    /// Checks every length, place and document against the ids.
    fn check(&self, bin: &Opened, dtype: Dtype) -> Result<(), DataError> {
        let damaged = |fault| Err(DataError::damaged(&self.opened.path, fault));
        let (mut lengths, mut places) = (self.lengths(), self.places());
        let mut next = 0_u64;
        for sequence in 0..self.sequences {
            let length = i32::from_le_bytes(lengths.next()?);
            let place = i64::from_le_bytes(places.next()?);
            let Ok(tokens) = u64::try_from(length) else {
                return damaged(format!("says that sequence {sequence} has {length} tokens"));
            };
            if u64::try_from(place) != Ok(next) {
                return damaged(format!(
                    "says that sequence {sequence} begins at byte {place}, those before it end at {next}; \
                     sequences are read where they follow each other"
                ));
            }
            // Below 2^64: each of fewer than 2^62 lengths adds less than 2^33, and the file holds
            // 12 bytes for each.
            next = next.saturating_add(tokens * dtype.bytes() as u64);
        }
        if next != bin.bytes {
            return damaged(format!(
                "promises {next} bytes of ids, {} has {}; was it copied whole?",
                bin.path.display(),
                bin.bytes
            ));
        }
        let (mut marks, mut last) = (self.document_marks(), None);
        for mark in 0..self.marks {
            let found = u64::from_le_bytes(marks.next()?);
            let fits = match last {
                None => found == 0,
                Some(last) => found >= last && found <= self.sequences,
            };
            if !fits {
                return damaged(format!(
                    "says that document {mark} begins with sequence {found}, which does not follow the one \
                     before it"
                ));
            }
            last = Some(found);
        }
        if last != Some(self.sequences) {
            return damaged(format!(
                "lists documents that do not end with the last of its {} sequences",
                self.sequences
            ));
        }
        Ok(())
    }

    /// Calls `each` with the end of each document, in tokens. A document without tokens has no end.
    pub(crate) fn each_document_end(&self, mut each: impl FnMut(u64)) -> Result<(), DataError> {
        let (mut lengths, mut marks) = (self.lengths(), self.document_marks());
        let (mut sequence, mut end, mut last) = (0, 0_u64, 0);
        for _ in 0..self.marks {
            let mark = u64::from_le_bytes(marks.next()?);
            while sequence < mark {
                let length = i32::from_le_bytes(lengths.next()?);
                end = end.saturating_add(u64::try_from(length).unwrap_or(0));
                sequence += 1;
            }
            if end > last {
                each(end);
                last = end;
            }
        }
        self.opened.check_unchanged()
    }

    /// xxh3-128 of the file, 32 hexadecimal digits.
    pub(crate) fn fingerprint(&self) -> Result<String, DataError> {
        let mut hash = Xxh3::new();
        self.opened.read_pieces(0..self.opened.bytes, |piece| {
            hash.update(piece);
            Ok(())
        })?;
        Ok(hex(hash.digest128()))
    }

    fn lengths(&self) -> List<'_, 4> {
        List::new(&self.opened, HEADER_BYTES)
    }

    fn places(&self) -> List<'_, 8> {
        List::new(&self.opened, HEADER_BYTES + 4 * self.sequences)
    }

    fn document_marks(&self) -> List<'_, 8> {
        List::new(&self.opened, HEADER_BYTES + 12 * self.sequences)
    }
}

/// Consecutive numbers of `N` bytes in a file.
struct List<'o, const N: usize> {
    opened: &'o Opened,
    /// Place of the bytes after the buffer.
    rest: u64,
    buffer: Vec<u8>,
    at: usize,
}

impl<'o, const N: usize> List<'o, N> {
    fn new(opened: &'o Opened, start: u64) -> Self {
        Self {
            opened,
            rest: start,
            buffer: Vec::new(),
            at: 0,
        }
    }

    fn next(&mut self) -> Result<[u8; N], DataError> {
        if self.at == self.buffer.len() {
            let left = self.opened.bytes - self.rest;
            #[expect(clippy::cast_possible_truncation, reason = "at most a piece")]
            let bytes = left.min(PIECE_BYTES as u64) as usize / N * N;
            // At least one number, so that a list that is too short is a read error.
            self.buffer.resize(bytes.max(N), 0);
            self.opened.read(self.rest, &mut self.buffer)?;
            self.rest += self.buffer.len() as u64;
            self.at = 0;
        }
        let number = self.buffer[self.at..].first_chunk().copied();
        self.at += N;
        Ok(number.unwrap_or([0; N]))
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "tests make the files that others would leave"
)]
mod tests {
    use super::*;

    /// Bytes of an index as Megatron's `_IndexWriter` makes them.
    fn idx(dtype: u8, lengths: &[i32], marks: &[i64]) -> Vec<u8> {
        let size = if dtype == 8 { 2 } else { 4 };
        let mut file = MAGIC.to_vec();
        file.extend(1_u64.to_le_bytes());
        file.push(dtype);
        file.extend((lengths.len() as u64).to_le_bytes());
        file.extend((marks.len() as u64).to_le_bytes());
        file.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        let mut place = 0_i64;
        for &length in lengths {
            file.extend(place.to_le_bytes());
            place += i64::from(length) * size;
        }
        file.extend(marks.iter().flat_map(|mark| mark.to_le_bytes()));
        file
    }

    type Found = Result<(SequenceIndex, Opened, Dtype), DataError>;

    fn opened(idx: &[u8], bin: &[u8]) -> (tempfile::TempDir, Found) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.idx"), idx).unwrap();
        std::fs::write(dir.path().join("a.bin"), bin).unwrap();
        let found = open(&dir.path().join("a.idx"));
        (dir, found)
    }

    fn refusal(idx: &[u8], bin: &[u8]) -> String {
        let (dir, found) = opened(idx, bin);
        let text = found.unwrap_err().to_string();
        text.replace(&format!("{}/", dir.path().display()), "")
    }

    #[test]
    fn documents_end_where_their_last_sequence_does() {
        // Documents of sequences 0, 1 and 2, of none, and of 3.
        for (dtype, stored, bytes) in [(8, Dtype::U16, 2), (4, Dtype::U32, 4)] {
            let file = idx(dtype, &[3, 0, 2, 4], &[0, 3, 3, 4]);
            let with_modes = [&file[..], &[0; 4]].concat();
            for file in [file, with_modes] {
                let (_dir, found) = opened(&file, &vec![1; 9 * bytes]);
                let (index, bin, dtype) = found.unwrap();
                assert_eq!((dtype, bin.bytes), (stored, 9 * bytes as u64));
                assert_eq!(index.documents(), 3);
                let mut ends = Vec::new();
                index.each_document_end(|end| ends.push(end)).unwrap();
                assert_eq!(ends, [5, 9]);
            }
        }
    }

    #[test]
    fn an_index_that_lies_is_refused_by_name() {
        let good = idx(8, &[3, 2], &[0, 1, 2]);
        let with = |at: usize, bytes: &[u8]| {
            let mut file = good.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            file
        };
        let bin = [1; 10];
        assert!(opened(&good, &bin).1.is_ok());
        for (file, text) in [
            (
                good[..20].to_vec(),
                "a.idx: has 20 bytes, too few for an index of Megatron's",
            ),
            (
                with(0, b"X"),
                "a.idx: does not begin with MMIDIDX, as Megatron's indexes do; was it copied whole?",
            ),
            (
                with(9, &[2]),
                "a.idx: is of version 2; this program reads version 1",
            ),
            (
                with(17, &[5]),
                "a.idx: says that ids are of Megatron's type 5; 8 (uint16) and 4 (int32) are read",
            ),
            (
                with(18, &u64::MAX.to_le_bytes()),
                "a.idx: promises 18446744073709551615 sequences and 3 document marks, which 82 bytes do not \
                 hold; was it copied whole?",
            ),
            (
                with(34, &(-1_i32).to_le_bytes()),
                "a.idx: says that sequence 0 has -1 tokens",
            ),
            (
                with(34, &4_i32.to_le_bytes()),
                "a.idx: says that sequence 1 begins at byte 6, those before it end at 8; sequences are read \
                 where they follow each other",
            ),
            (
                with(58, &[1]),
                "a.idx: says that document 0 begins with sequence 1, which does not follow the one before it",
            ),
            (
                with(74, &[1]),
                "a.idx: lists documents that do not end with the last of its 2 sequences",
            ),
        ] {
            assert_eq!(refusal(&file, &bin), text);
        }
        let text = refusal(&good, &bin[..8]);
        assert!(
            text.starts_with("a.idx: promises 10 bytes of ids, ")
                && text.ends_with("a.bin has 8; was it copied whole?"),
            "{text}"
        );
    }
}
