//! Tests of the public interface, from text to batches.
#![expect(
    clippy::unwrap_used,
    reason = "the helpers of tests stop a test as its own body would"
)]

mod batches;
mod changed;
mod formats;
mod inputs;
mod junk;
mod spoiled;
mod tokenizing;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spd_dataloader::{
    DataError, Dataset, Documents, Feed, Report, Rows, Shard, Source, Tokenize, Watch, Windows,
};
use tempfile::TempDir;

/// A new directory, removed when it goes out of scope.
fn fresh() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[expect(
    clippy::disallowed_methods,
    reason = "tests make the files that others would leave"
)]
fn put(path: &Path, bytes: &[u8]) -> PathBuf {
    std::fs::write(path, bytes).unwrap();
    path.to_owned()
}

/// Bytes 0, 1, 2 .. as tokens, in shards of at most `shard_tokens`. Returns the dataset directory.
fn counting_dataset(dir: &Path, tokens: usize, shard_tokens: usize) -> PathBuf {
    let text: Vec<u8> = (0..=255).cycle().take(tokens).collect();
    let options = Tokenize {
        held_out: 0.0,
        shard_tokens,
        ..Tokenize::new(vec![put(&dir.join("text"), &text)], dir.join("data"))
    };
    tokenize(&options).unwrap();
    dir.join("data/train")
}

/// The feed of a single rank.
fn alone(seed: u64, rows: usize) -> Feed {
    Feed {
        seed,
        rows,
        shard: Shard::ALONE,
    }
}

/// Tokenizes without a stop.
fn tokenize(options: &Tokenize) -> Result<Report, DataError> {
    spd_dataloader::tokenize(options, &Watch::default())
}

/// Windows of a dataset that ignore its documents.
fn token_source(dataset: Arc<Dataset>, seq_len: usize, vocab: u32) -> Result<Source, DataError> {
    let rows = Rows {
        seq_len,
        vocab,
        documents: Documents::Joined,
    };
    Windows::new(dataset, rows).map(Source::Tokens)
}
