//! Frames between ranks: a header of 40 bytes, and values.

use std::io::{self, ErrorKind};

use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a header: words of eight bytes, the last of which is the hash of the others.
pub(super) const HEADER: usize = 40;
const HASHED: usize = HEADER - 8;

/// Most values of a frame: 256 KiB stay in the nearer caches while they are received, added and
/// sent on.
pub(super) const MOST: usize = 1 << 16;

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A slice of a part.
    Part,
    /// A slice of a sum.
    Slice,
    /// A broadcast of the first rank.
    Broadcast,
    /// The sender wants to stop.
    Stop,
    /// The sender leaves, and needs nothing more.
    Left,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Part,
        Self::Slice,
        Self::Broadcast,
        Self::Stop,
        Self::Left,
    ];
}

/// A frame to send.
pub(super) struct Frame {
    pub(super) header: [u8; HEADER],
    pub(super) values: Vec<f32>,
}

impl Frame {
    pub(super) fn new(kind: Kind, sum: u64, values: Vec<f32>) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let hash = xxh3_64(bytes);
        let mut header = [0; HEADER];
        let words = [kind as u64, sum, bytes.len() as u64, hash];
        for (at, word) in header.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        let hash = xxh3_64(&header[..HASHED]);
        header[HASHED..].copy_from_slice(&hash.to_le_bytes());
        Self { header, values }
    }

    /// The same frame for another rank, with a copy of its values, which are hashed once.
    pub(super) fn again(&self, values: Vec<f32>) -> Self {
        let header = self.header;
        Self { header, values }
    }
}

/// The header of a frame.
#[derive(Clone, Copy)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) sum: u64,
    /// Number of values.
    pub(super) len: usize,
    hash: u64,
}

impl Header {
    /// Parses a header.
    ///
    /// # Errors
    ///
    /// [`damaged`], if its hash differs.
    pub(super) fn read(bytes: &[u8; HEADER]) -> io::Result<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..8 * (at + 1)]);
            u64::from_le_bytes(word)
        };
        let [kind, sum, bytes_after, hash, of_header] = [0, 1, 2, 3, 4].map(word);
        let kind = Kind::ALL.into_iter().find(|known| *known as u64 == kind);
        let len = usize::try_from(bytes_after / 4).ok();
        let len = len.filter(|&len| len <= MOST);
        match (kind, len, xxh3_64(&bytes[..HASHED]) == of_header) {
            (Some(kind), Some(len), true) => Ok(Self {
                kind,
                sum,
                len,
                hash,
            }),
            _ => Err(damaged()),
        }
    }

    /// Whether the values have the hash of this header.
    pub(super) fn is_of(&self, values: &[f32]) -> bool {
        values.len() == self.len && xxh3_64(bytemuck::cast_slice(values)) == self.hash
    }
}

/// A received frame differs from the one that was sent.
pub(super) fn damaged() -> io::Error {
    ErrorKind::InvalidData.into()
}
