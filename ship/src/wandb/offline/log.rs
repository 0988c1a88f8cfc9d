//! The file format of records: a head of seven bytes, then LevelDB's log, with plain CRC-32 as
//! checksums.
//!
//! The log consists of blocks of 32 KiB. A record is one chunk, or several if it crosses the end of
//! a block. A rest that is too short for the head of a chunk is zero.
//!
//! ```text
//! ":W&B" 0xBEE1 0    then chunks: CRC-32 of kind and bytes, u32 | length, u16 | kind, u8 | bytes
//! ```

use std::io::{self, Write};

/// The first bytes of the file, which are part of its first block.
const HEAD: [u8; 7] = *b":W&B\xe1\xbe\0";

/// Bytes of a block.
pub(super) const BLOCK: usize = 32 << 10;

/// Bytes of a chunk's head.
const CHUNK_HEAD: usize = 7;

/// Kinds of chunks: a whole record, its first, middle and last part.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// Writes records.
pub(super) struct Log<W: Write> {
    to: W,
    /// Bytes of the last block.
    used: usize,
}

impl<W: Write> Log<W> {
    /// An empty log.
    pub(super) fn begin(mut to: W) -> io::Result<Self> {
        to.write_all(&HEAD)?;
        let used = HEAD.len();
        Ok(Self { to, used })
    }

    /// Adds a record.
    pub(super) fn add(&mut self, mut record: &[u8]) -> io::Result<()> {
        let mut is_first = true;
        loop {
            let mut room = BLOCK - self.used;
            if room < CHUNK_HEAD {
                self.to.write_all(&[0; CHUNK_HEAD][..room])?;
                (self.used, room) = (0, BLOCK);
            }
            let (part, rest) = record.split_at(record.len().min(room - CHUNK_HEAD));
            self.chunk(
                match (is_first, rest.is_empty()) {
                    (true, true) => FULL,
                    (true, false) => FIRST,
                    (false, false) => MIDDLE,
                    (false, true) => LAST,
                },
                part,
            )?;
            if rest.is_empty() {
                return Ok(());
            }
            (record, is_first) = (rest, false);
        }
    }

    fn chunk(&mut self, kind: u8, bytes: &[u8]) -> io::Result<()> {
        let mut sum = crc32fast::Hasher::new();
        sum.update(&[kind]);
        sum.update(bytes);
        self.to.write_all(&sum.finalize().to_le_bytes())?;
        // The length of a block fits two bytes.
        #[expect(clippy::cast_possible_truncation, reason = "BLOCK is less than 64 KiB")]
        let length = bytes.len() as u16;
        self.to.write_all(&length.to_le_bytes())?;
        self.to.write_all(&[kind])?;
        self.used += CHUNK_HEAD + bytes.len();
        self.to.write_all(bytes)
    }

    /// The underlying writer.
    pub(super) fn into_inner(self) -> W {
        self.to
    }
}

/// The whole records of a file.
#[cfg(test)]
pub(super) fn read(file: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(file[..HEAD.len()], HEAD);
    let (mut records, mut parts) = (Vec::new(), Vec::new());
    for (number, block) in file.chunks(BLOCK).enumerate() {
        let mut at = if number == 0 { HEAD.len() } else { 0 };
        while let Some(head) = block.get(at..at + CHUNK_HEAD) {
            let (sum, kind) = (u32::from_le_bytes(head[..4].try_into().unwrap()), head[6]);
            let length = usize::from(u16::from_le_bytes(head[4..6].try_into().unwrap()));
            let Some(bytes) = block.get(at + CHUNK_HEAD..at + CHUNK_HEAD + length) else {
                return records;
            };
            assert_eq!(sum, crc32fast::hash(&[&[kind], bytes].concat()));
            at += CHUNK_HEAD + length;
            assert_eq!(parts.is_empty(), matches!(kind, FULL | FIRST), "{kind}");
            parts.push(bytes.to_vec());
            if matches!(kind, FULL | LAST) {
                records.push(parts.drain(..).flatten().collect());
            }
        }
        assert!(block[at..].iter().all(|&byte| byte == 0));
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(records: &[Vec<u8>]) -> Vec<u8> {
        let mut log = Log::begin(Vec::new()).unwrap();
        for record in records {
            log.add(record).unwrap();
        }
        log.into_inner()
    }

    // `printf '\001abc' | gzip -c | tail -c8 | head -c4 | xxd`.
    #[test]
    fn a_record_is_a_chunk_behind_its_sum() {
        assert_eq!(
            written(&[b"abc".to_vec()]),
            b":W&B\xe1\xbe\0\xa9\x20\x9d\x53\x03\0\x01abc"
        );
    }

    #[test]
    fn records_of_any_length_are_read_back_at_any_block_end() {
        let of = |length: usize| vec![u8::try_from(length % 251).unwrap(); length];
        // The second record begins with 0 to 14 bytes left in its block: no space for a head, for a
        // head only, for some bytes.
        for left in 0..15 {
            let first = BLOCK - HEAD.len() - CHUNK_HEAD - left;
            for second in [0, 1, 7, BLOCK - 7, BLOCK, 3 * BLOCK + 5] {
                let records = [of(first), of(second), of(3)];
                let file = written(&records);
                assert_eq!(read(&file), records, "{left} left, then {second}");
            }
        }
    }

    #[test]
    fn torn_chunks_are_no_records() {
        let records = [vec![1; 10], vec![2; 2 * BLOCK]];
        let file = written(&records);
        assert_eq!(read(&file[..file.len() - 1]), records[..1]);
        assert_eq!(read(&file), records);
    }
}
