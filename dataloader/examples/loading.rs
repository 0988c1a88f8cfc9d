//! The cost of reading batches: nanoseconds a token, bytes of memory beside the files, and how long
//! a step waits.
//!
//! ```sh
//! cargo run --release -p spd-dataloader --example loading -- /tmp/loading.bin [MILLIONS_OF_TOKENS]
//! ```
//!
//! Makes a file of u16 ids unless it exists (as nanoGPT's, 256 million tokens), and reads it in the
//! order of a run: 64 rows of 512 tokens a step. "Cold" is with the file dropped from the page
//! cache. A step is a sleep of 20 ms.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "an example that is run by hand, on a file of its own"
)]

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use spd_dataloader::{
    Ahead, Batch, Dataset, Documents, Dtype, Feed, Loader, Rows, Shard, Source, Windows,
};

const SEQ_LEN: usize = 512;
const FEED: Feed = Feed {
    seed: 1,
    rows: 64,
    shard: Shard::ALONE,
};
const AHEAD: Ahead = Ahead {
    batches: 4,
    threads: 1,
};
const BATCHES: u64 = 1000;
const STEP: Duration = Duration::from_millis(20);

fn main() {
    let mut words = std::env::args().skip(1);
    let path = PathBuf::from(words.next().unwrap_or("/tmp/loading.bin".to_owned()));
    let millions: u64 = words.next().map_or(256, |word| word.parse().unwrap());
    if !path.exists() {
        make(&path, millions << 20);
    }
    fill(&opened(&path), "first");
    fill(&opened(&path), "again");
    for measure in [ahead, wait] {
        drop_from_cache(&path);
        measure(&opened(&path), "cold");
        measure(&opened(&path), "warm");
    }
}

/// Opens the file again; the page cache keeps mapped pages.
fn opened(path: &Path) -> Source {
    let dataset = Dataset::open_as(path, Some(Dtype::U16)).unwrap();
    let rows = Rows {
        seq_len: SEQ_LEN,
        vocab: 50_257,
        documents: Documents::Joined,
    };
    Source::Tokens(Windows::new(Arc::new(dataset), rows).unwrap())
}

/// Ids below 50,257, without order.
fn make(path: &Path, tokens: u64) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    for number in 0..tokens {
        let id = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 50_257;
        file.write_all(&(id as u16).to_le_bytes()).unwrap();
    }
    file.into_inner().unwrap().sync_all().unwrap();
}

fn drop_from_cache(path: &Path) {
    fadvise(File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
}

/// Time a token of all batches, with the rows in the page cache.
fn fill(source: &Source, name: &str) {
    let mut batch = Batch::default();
    let mut start = Instant::now();
    for number in 0..2 * BATCHES {
        if number == BATCHES {
            start = Instant::now();
        }
        let position = number % BATCHES * FEED.rows as u64;
        source.fill(&FEED, position, &mut batch).unwrap();
    }
    println!("fill, {name}: {:.2} ns a token", ns(start));
}

/// As [`fill`], with batches that a loader fills ahead.
fn ahead(source: &Source, name: &str) {
    let mut loader = Loader::spawn(source.clone(), FEED, 0, AHEAD).unwrap();
    let start = Instant::now();
    for _ in 0..BATCHES {
        let batch = loader.next().unwrap();
        loader.recycle(batch);
    }
    println!("loader, {name}: {:.2} ns a token", ns(start));
}

fn ns(start: Instant) -> f64 {
    let tokens = BATCHES * (FEED.rows * SEQ_LEN) as u64;
    start.elapsed().as_secs_f64() * 1e9 / tokens as f64
}

/// The time that each step waits for its batch.
fn wait(source: &Source, name: &str) {
    let mut loader = Loader::spawn(source.clone(), FEED, 1 << 20, AHEAD).unwrap();
    let mut waits = Vec::new();
    for _ in 0..300 {
        let start = Instant::now();
        let batch = loader.next().unwrap();
        waits.push(start.elapsed());
        thread::sleep(STEP);
        loader.recycle(batch);
    }
    // The first batch is never ready in time.
    waits.remove(0);
    waits.sort();
    let at = |percent: usize| waits[(waits.len() - 1) * percent / 100];
    println!(
        "wait of a step of 20 ms, {name}: median {:?}, p99 {:?} ({:.3} % of the step), longest {:?}",
        at(50),
        at(99),
        at(99).as_secs_f64() / STEP.as_secs_f64() * 100.0,
        at(100)
    );
}
