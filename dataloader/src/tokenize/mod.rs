//! Text to token files, in parallel, with the same bytes for any number of threads.
//!
//! The inputs (`inputs.rs`) are taken in the given order: a text, or the documents of JSON lines
//! and parquet (`documents.rs`). First all threads measure them, which finds unreadable files. The
//! tail is held out. Each of the two parts is cut into chunks (`chunks.rs`), which a thread reads
//! ahead in groups. Each group is encoded in parallel (`encoder.rs`) and written in order
//! (`writer.rs`), so memory holds some groups and one shard. Nothing gets its final name before all
//! of it is on disk (`publish.rs`). A journal (`journal.rs`) lets an interrupted tokenization
//! continue.

mod caught;
mod chunks;
mod documents;
mod encoder;
mod inputs;
mod journal;
mod writer;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use crossbeam_channel::Sender;
use rayon::prelude::*;

use crate::DataError;
use crate::publish::{self, Staging};
use chunks::{Chunk, Cutting, Place};
use documents::Content;
use encoder::Encoder;
use inputs::{Form, Input};
use journal::Journal;
use writer::Writer;

/// Names of the two datasets in the output directory.
const TRAIN: &str = "train";
const VAL: &str = "val";
/// Bytes of text that are encoded at once, over all threads.
const GROUP_BYTES: usize = 8 << 20;
/// Most chunks of a group: documents may have only a few bytes.
const GROUP_CHUNKS: usize = 1 << 16;

/// The options of a tokenization.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokenize {
    /// Text files, JSON lines and parquet, packed by gzip or zstd or not, directories of them and
    /// patterns, in order. Each begins a document.
    pub inputs: Vec<PathBuf>,
    /// The output directory. Its `train` and `val` are the datasets.
    pub out: PathBuf,
    /// The tokenizer.
    pub tokenizer: TokenizerChoice,
    /// The text between documents of an input, which becomes no token. `None`: an input is a
    /// document.
    pub separator: Option<String>,
    /// The token to add after each document, by its text in the tokenizer's vocabulary.
    pub eos: Option<String>,
    /// Fraction of the text, at its end, that goes to `val`: in `[0, 1)`. With 0 there is no `val`.
    pub held_out: f64,
    /// The key of JSON lines, or the column of parquet, that holds the text, or ids of this
    /// tokenizer.
    pub column: String,
    /// Most tokens of a shard.
    pub shard_tokens: usize,
    /// Threads that encode; `None` is one for each core.
    pub threads: Option<usize>,
    /// Whether existing datasets at `out` are replaced.
    pub overwrite: bool,
}

impl Tokenize {
    /// Options with a tenth held out, shards of 2^26 tokens, bytes as ids, and each input a
    /// document.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf) -> Self {
        Self {
            inputs,
            out,
            tokenizer: TokenizerChoice::Bytes,
            separator: None,
            eos: None,
            held_out: 0.1,
            column: "text".to_owned(),
            shard_tokens: 1 << 26,
            threads: None,
            overwrite: false,
        }
    }
}

/// The tokenizer of a tokenization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// Each byte is an id; inputs may be any bytes.
    Bytes,
    /// A Hugging Face `tokenizer.json`; inputs are UTF-8.
    File(PathBuf),
}

/// The result of a tokenization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// Tokens of the training split.
    pub train_tokens: u64,
    /// Tokens of the held-out split.
    pub val_tokens: u64,
    /// Ids are below this.
    pub vocab: u32,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Bytes of text read.
    pub bytes: u64,
}

/// The progress of a tokenization in bytes of text, for another thread.
#[derive(Debug, Default)]
pub struct Watch {
    /// Set to stop it. The same call continues later.
    pub stop: Arc<AtomicBool>,
    /// Bytes that are encoded and written, by this process or an earlier one.
    pub done: AtomicU64,
    /// Bytes in all; 0 until they are known.
    pub total: AtomicU64,
}

/// Makes datasets of text files.
///
/// The result depends on the inputs and on every option but `threads` and `overwrite`. If the
/// process ends early, the same call continues after the last shard that was written.
///
/// # Errors
///
/// When an input or the tokenizer cannot be read, the tokenizer cannot encode a text, `out` is not
/// empty or cannot be written, or a split would be empty. `out` is then unchanged.
/// [`DataError::Asked`] after a stop of `watch`, from which the same call continues.
pub fn tokenize(options: &Tokenize, watch: &Watch) -> Result<Report, DataError> {
    let start = Instant::now();
    check(options)?;
    let encoder = Encoder::load(&options.tokenizer, options.eos.as_deref())?;
    let inputs = inputs::find(&options.inputs)?;
    let key = journal::key(options, &inputs, &encoder.id);
    let mut journal = Journal::default();
    let mut staging = Staging::begin(&options.out, &[VAL, TRAIN], options.overwrite, |partial| {
        journal = Journal::read(partial, key);
        !journal.is_empty()
    })?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|error| DataError::Request(format!("cannot start threads: {error}; use fewer")))?;
    let work = Work {
        options,
        inputs: &inputs,
        encoder: &encoder,
        watch,
        pool: &pool,
        cutting: Cutting {
            separator: options.separator.as_deref().map(str::as_bytes),
            column: &options.column,
            any_boundary: encoder.any_boundary(),
        },
    };
    let made = work.make(&staging, &mut journal);
    staging.is_kept = matches!(made, Err(DataError::Asked)) && !journal.is_empty();
    let [train_tokens, val_tokens] = made?;
    staging.publish()?;
    Ok(Report {
        train_tokens,
        val_tokens,
        vocab: encoder.vocab,
        seconds: start.elapsed().as_secs_f64(),
        bytes: watch.total.load(Ordering::Relaxed),
    })
}

fn check(options: &Tokenize) -> Result<(), DataError> {
    let refuse = |fault: String| Err(DataError::Request(fault));
    if options.inputs.is_empty() {
        return refuse("no text files were given; name at least one".to_owned());
    }
    if !(0.0..1.0).contains(&options.held_out) {
        return refuse(format!(
            "held-out part is {}, must be at least 0 and below 1",
            options.held_out
        ));
    }
    if options.shard_tokens == 0 {
        return refuse("shards of 0 tokens were asked for; use at least 1".to_owned());
    }
    if options.separator.as_deref() == Some("") {
        return refuse("the separator is empty; leave it out, or give its text".to_owned());
    }
    Ok(())
}

/// The shared parts of a tokenization.
struct Work<'a> {
    options: &'a Tokenize,
    inputs: &'a [Input],
    encoder: &'a Encoder,
    watch: &'a Watch,
    pool: &'a rayon::ThreadPool,
    cutting: Cutting<'a>,
}

impl Work<'_> {
    /// Makes both splits; returns their tokens.
    fn make(&self, staging: &Staging, journal: &mut Journal) -> Result<[u64; 2], DataError> {
        let partial = staging.partial();
        let sizes = self.sizes(journal)?;
        journal.sizes = Some(sizes.clone());
        journal.write(&partial)?;
        let total = sizes.iter().map(|(bytes, _)| bytes).sum();
        self.watch.total.store(total, Ordering::Relaxed);
        let cuts = self.cuts(&sizes)?;
        let mut tokens = [0; 2];
        for (split, name) in [TRAIN, VAL].into_iter().enumerate() {
            if name == VAL && self.options.held_out == 0.0 {
                continue;
            }
            let dir = staging.create_dir(name)?;
            let done = journal.splits[split].clone();
            discard_others(&dir, &done)?;
            let shard_tokens = self.options.shard_tokens;
            let mut writer = Writer::new(dir, self.encoder.vocab, shard_tokens, done);
            let parts: Vec<_> = cuts
                .iter()
                .map(|&(cut, end)| if name == TRAIN { (0, cut) } else { (cut, end) })
                .collect();
            self.write(&parts, &mut writer, |done| {
                journal.splits[split].clone_from(done);
                journal.write(&partial)
            })?;
            let made = writer.finish(&self.encoder.id, self.encoder.json.as_deref())?;
            tokens[split] = made.ok_or_else(|| {
                DataError::Request(format!(
                    "{}: the {name} split would have no tokens with {} of the text held out; use more text or \
                     another part",
                    self.options.out.display(),
                    self.options.held_out
                ))
            })?;
        }
        Ok(tokens)
    }

    /// Bytes and documents of each input. All inputs but plain text are read.
    fn sizes(&self, journal: &Journal) -> Result<Vec<(u64, u64)>, DataError> {
        if let Some(sizes) = &journal.sizes {
            return Ok(sizes.clone());
        }
        let measure = |input| {
            self.go_on()?;
            chunks::measure(input, &self.options.column)
        };
        let sizes: Vec<_> = self
            .pool
            .install(|| self.inputs.par_iter().map(measure).collect());
        sizes.into_iter().collect()
    }

    /// The cut of each input between the splits, and its end.
    fn cuts(&self, sizes: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, DataError> {
        let total: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the bytes"
        )]
        let held_out = (total as f64 * self.options.held_out).round() as u64;
        let mut before = total - held_out.min(total);
        let mut cuts = Vec::new();
        for (input, &(bytes, documents)) in self.inputs.iter().zip(sizes) {
            let end = match input.form {
                Form::Text => bytes,
                Form::JsonLines | Form::Parquet => documents,
            };
            let cut = match before {
                0 => 0,
                wanted if wanted >= bytes => end,
                wanted => self.cutting.cut(input, wanted, bytes)?,
            };
            before -= before.min(bytes);
            cuts.push((cut, end));
        }
        // The cut lies in the last document: all of it is held out.
        if held_out > 0
            && cuts.iter().all(|(cut, end)| cut == end)
            && let (Some(last), Some(input)) = (cuts.last_mut(), self.inputs.last())
            && input.form != Form::Text
        {
            last.0 -= 1;
        }
        Ok(cuts)
    }

    /// Writes the parts of all inputs from the writer's place on. Calls `saved` after each shard.
    fn write(
        &self,
        parts: &[(u64, u64)],
        writer: &mut Writer,
        mut saved: impl FnMut(&journal::Split) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let skipped = writer.done().chunks;
        thread::scope(|scope| {
            let (groups_in, groups) = crossbeam_channel::bounded(1);
            let read = move || {
                if let Err(error) = self.read(parts, skipped, &groups_in) {
                    drop(groups_in.send(Err(error)));
                }
            };
            thread::Builder::new()
                .name("text".to_owned())
                .spawn_scoped(scope, read)
                .map_err(DataError::Thread)?;
            for group in groups {
                let group: Vec<Chunk> = group?;
                let encode =
                    || -> Vec<_> { group.par_iter().map(|chunk| self.encode(chunk)).collect() };
                let encoded = self.pool.install(encode);
                for (chunk, ids) in group.iter().zip(encoded) {
                    self.go_on()?;
                    let before = writer.done().shards.len();
                    let pushed = writer.push_chunk(&ids?, chunk.ends_document, || self.go_on());
                    // Also when the shard ended in the middle of a chunk.
                    if writer.done().shards.len() > before {
                        saved(writer.done())?;
                    }
                    pushed?;
                    let bytes = chunk.piece.bytes();
                    self.watch.done.fetch_add(bytes, Ordering::Relaxed);
                }
            }
            Ok(())
        })
    }

    /// Sends groups of chunks, without those that are written already.
    fn read(
        &self,
        parts: &[(u64, u64)],
        mut skipped: u64,
        groups: &Sender<Result<Vec<Chunk>, DataError>>,
    ) -> Result<(), DataError> {
        let (mut group, mut group_bytes) = (Vec::new(), 0);
        for (number, (input, &(start, end))) in self.inputs.iter().zip(parts).enumerate() {
            self.cutting.each(number, input, start..end, |chunk| {
                self.go_on()?;
                let bytes = chunk.piece.bytes();
                if skipped > 0 {
                    skipped -= 1;
                    self.watch.done.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(true);
                }
                group_bytes += bytes;
                group.push(chunk);
                if group_bytes < GROUP_BYTES as u64 && group.len() < GROUP_CHUNKS {
                    return Ok(true);
                }
                group_bytes = 0;
                // The receiver is gone after an error.
                Ok(groups.send(Ok(std::mem::take(&mut group))).is_ok())
            })?;
        }
        drop(groups.send(Ok(group)));
        Ok(())
    }

    fn encode(&self, chunk: &Chunk) -> Result<Vec<u32>, DataError> {
        self.go_on()?;
        let damaged = |at: usize, text: &str| {
            let place = match chunk.place {
                Place::Byte(first) => format!("byte {}", first + at as u64),
                Place::Line(line) => format!("line {line}"),
                Place::Row(row) => format!("row {row}"),
            };
            let path = &self.inputs[chunk.input].path;
            DataError::damaged(path, format!("{place}: {text}"))
        };
        let mut ids = match &chunk.piece {
            Content::Text(text) => self
                .encoder
                .encode(text)
                .map_err(|fault| damaged(fault.at, &fault.text))?,
            Content::Ids(ids) => ids.clone(),
        };
        let vocab = self.encoder.vocab;
        if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
            let text =
                format!("holds the id {id}, the tokenizer has {vocab}; is it of another one?");
            return Err(damaged(0, &text));
        }
        if chunk.ends_document {
            ids.extend(&self.encoder.eos);
        }
        Ok(ids)
    }

    fn go_on(&self) -> Result<(), DataError> {
        match self.watch.stop.load(Ordering::Relaxed) {
            true => Err(DataError::Asked),
            false => Ok(()),
        }
    }
}

/// Removes files that the journal does not list.
fn discard_others(dir: &Path, done: &journal::Split) -> Result<(), DataError> {
    let known: BTreeSet<_> = done.shards.iter().map(|shard| &*shard.file).collect();
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    for entry in entries.map_err(DataError::io("list", dir))? {
        let name = entry.file_name();
        if !name.to_str().is_some_and(|name| known.contains(name)) {
            publish::discard(&entry.path())?;
        }
    }
    Ok(())
}
