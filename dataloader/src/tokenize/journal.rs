//! The progress of a tokenization, from which the next one continues.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::Tokenize;
use super::inputs::Input;
use crate::hash::hex;
use crate::index::{ShardEntry, TokenizerId};
use crate::{DataError, publish};

/// Name of the file beside the datasets that are being written.
pub(super) const FILE_NAME: &str = "journal.json";

/// The progress of a tokenization. It is written after every shard.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Journal {
    /// The tokenization: see [`key`].
    key: String,
    /// Bytes and documents of each input, once all are measured.
    pub(super) sizes: Option<Vec<(u64, u64)>>,
    /// The training split and the held-out one.
    pub(super) splits: [Split; 2],
}

/// The part of a split that is on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Split {
    pub(super) shards: Vec<ShardEntry>,
    /// Chunks that are wholly in its shards.
    pub(super) chunks: u64,
    /// Ids of the next chunk that are in its shards.
    pub(super) ids: usize,
}

/// Everything that the result depends on. Inputs are represented by their sizes and times.
pub(super) fn key(options: &Tokenize, inputs: &[Input], tokenizer: &TokenizerId) -> String {
    let inputs: Vec<_> = inputs
        .iter()
        .map(|input| (&input.path, input.bytes, input.modified))
        .collect();
    let Tokenize {
        separator,
        eos,
        held_out,
        shard_tokens,
        column,
        ..
    } = options;
    let all = format!(
        "{inputs:?} {tokenizer:?} {separator:?} {eos:?} {held_out:?} {shard_tokens} {column:?}"
    );
    hex(xxh3_128(all.as_bytes()))
}

/// A journal on disk. It decides what is skipped, so a journal with a changed digit is refused.
#[derive(Serialize, Deserialize)]
struct Sealed {
    /// A journal.
    journal: String,
    /// xxh3-128 of the journal, 32 hexadecimal digits.
    xxh3: String,
}

impl Sealed {
    fn of(journal: &Journal) -> serde_json::Result<Self> {
        let journal = serde_json::to_string(journal)?;
        let xxh3 = hex(xxh3_128(journal.as_bytes()));
        Ok(Self { journal, xxh3 })
    }

    fn open(self) -> Option<Journal> {
        let is_whole = self.xxh3 == hex(xxh3_128(self.journal.as_bytes()));
        let journal = is_whole.then_some(self.journal)?;
        serde_json::from_str(&journal).ok()
    }
}

impl Journal {
    /// The journal in a directory; an empty one if there is none of this key.
    pub(super) fn read(dir: &Path, key: String) -> Self {
        let text = spd_files::read(&dir.join(FILE_NAME)).ok();
        let found = text.and_then(|text| serde_json::from_slice::<Sealed>(&text).ok());
        let found = found.and_then(Sealed::open);
        found.filter(|found| found.key == key).unwrap_or(Self {
            key,
            ..Self::default()
        })
    }

    /// Whether it has no progress.
    pub(super) fn is_empty(&self) -> bool {
        self.splits.iter().all(|split| split.shards.is_empty())
    }

    pub(super) fn write(&self, dir: &Path) -> Result<(), DataError> {
        let path = place(dir);
        let text = Sealed::of(self)
            .and_then(|sealed| serde_json::to_vec(&sealed))
            .map_err(|fault| DataError::damaged(&path, format!("cannot be described: {fault}")))?;
        publish::replace(&path, &text)
    }
}

fn place(dir: &Path) -> PathBuf {
    dir.join(FILE_NAME)
}
