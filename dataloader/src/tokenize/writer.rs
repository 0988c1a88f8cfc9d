//! Writes ids to the shards and the index of one dataset.

use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_128;

use super::journal::Split;
use crate::hash::hex;
use crate::index::{self, FORMAT_VERSION, Index, ShardEntry, TokenizerId};
use crate::{DataError, Dtype, publish, shard};

/// Collects a shard in memory, and writes it when it is full.
pub(super) struct Writer {
    dir: PathBuf,
    vocab: u32,
    dtype: Dtype,
    shard_tokens: usize,
    /// Ids of the shard being collected, as stored.
    tokens: Vec<u8>,
    /// Its document ends, as stored.
    document_ends: Vec<u8>,
    /// The part on disk. Its `chunks` and `ids` are the place after the last shard.
    done: Split,
    /// Chunks that were pushed whole, and ids of the current one.
    at: (u64, usize),
}

impl Writer {
    /// - `dir`: the directory of the dataset, which is not published
    /// - `done`: the part that an earlier writer wrote
    pub(super) fn new(dir: PathBuf, vocab: u32, shard_tokens: usize, done: Split) -> Self {
        Self {
            dir,
            vocab,
            dtype: Dtype::holding(vocab),
            shard_tokens,
            tokens: Vec::new(),
            document_ends: Vec::new(),
            at: (done.chunks, 0),
            done,
        }
    }

    /// Appends the ids of the next chunk; of the first one, without the ids that an earlier writer
    /// wrote.
    ///
    /// # Errors
    ///
    /// When a shard cannot be written, and the error of `go_on`, which is called before each shard.
    /// [`Writer::done`] is then the part on disk.
    pub(super) fn push_chunk(
        &mut self,
        ids: &[u32],
        ends_document: bool,
        go_on: impl Fn() -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        if self.at.0 == self.done.chunks {
            self.at.1 = self.done.ids.min(ids.len());
        }
        self.push(&ids[self.at.1..], go_on)?;
        if ends_document {
            self.end_document();
        }
        self.at = (self.at.0 + 1, 0);
        Ok(())
    }

    /// The part on disk.
    pub(super) fn done(&self) -> &Split {
        &self.done
    }

    /// Appends ids of the chunk. They continue in the next shard when this one is full.
    fn push(
        &mut self,
        mut ids: &[u32],
        go_on: impl Fn() -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        while !ids.is_empty() {
            // A full shard is written only when more ids come: a document may end with its last id.
            if self.shard_len() == self.shard_tokens {
                go_on()?;
                self.write_shard()?;
            }
            let (now, later) = ids.split_at(ids.len().min(self.shard_tokens - self.shard_len()));
            match self.dtype {
                Dtype::U16 => self.tokens.extend(now.iter().flat_map(|id| {
                    let [low, high, ..] = id.to_le_bytes();
                    [low, high]
                })),
                Dtype::U32 => self
                    .tokens
                    .extend(now.iter().flat_map(|id| id.to_le_bytes())),
            }
            ids = later;
            self.at.1 += now.len();
        }
        Ok(())
    }

    /// Marks the end of a document after the last id. A document without ids leaves no mark.
    fn end_document(&mut self) {
        let end = (self.shard_len() as u64).to_le_bytes();
        if self.shard_len() > 0 && self.document_ends.last_chunk() != Some(&end) {
            self.document_ends.extend(end);
        }
    }

    /// Writes the last shard, then the tokenizer and the index. Returns the number of tokens, or
    /// `None` if there are none.
    pub(super) fn finish(
        mut self,
        tokenizer: &TokenizerId,
        json: Option<&[u8]>,
    ) -> Result<Option<u64>, DataError> {
        if !self.tokens.is_empty() {
            self.write_shard()?;
        }
        let shards = self.done.shards;
        if shards.is_empty() {
            return Ok(None);
        }
        let tokens = shards.iter().map(|shard| shard.tokens).sum();
        if let Some(json) = json {
            publish::write_new(&self.dir.join(index::TOKENIZER), &[json])?;
        }
        let path = self.dir.join(index::FILE_NAME);
        let index = Index {
            format_version: FORMAT_VERSION,
            tokenizer: tokenizer.clone(),
            vocab_size: self.vocab,
            dtype: self.dtype,
            tokens,
            shards,
        };
        let mut json = serde_json::to_vec_pretty(&index)
            .map_err(|fault| DataError::damaged(&path, format!("cannot be described: {fault}")))?;
        json.push(b'\n');
        publish::write_new(&path, &[&json])?;
        Ok(Some(tokens))
    }

    fn shard_len(&self) -> usize {
        self.tokens.len() / self.dtype.bytes()
    }

    fn write_shard(&mut self) -> Result<(), DataError> {
        let file = shard::file_name(self.done.shards.len());
        shard::write(
            &self.dir.join(&file),
            self.dtype,
            &self.tokens,
            &self.document_ends,
        )?;
        self.done.shards.push(ShardEntry {
            file,
            tokens: self.shard_len() as u64,
            documents: (self.document_ends.len() / 8) as u64,
            xxh3: hex(xxh3_128(&self.tokens)),
            document_ends_xxh3: Some(hex(xxh3_128(&self.document_ends))),
        });
        (self.done.chunks, self.done.ids) = self.at;
        self.tokens.clear();
        self.document_ends.clear();
        Ok(())
    }
}
