//! Text to token files: in parallel, with the same bytes whatever the number of threads.
//!
//! The inputs are read as one text, in the order given. Its tail is held out; each of the two parts is
//! cut into documents, and long documents into chunks (`chunks.rs`). Groups of chunks are encoded in
//! parallel (`encoder.rs`) and written in order (`writer.rs`), so that memory holds one group and one
//! shard. Nothing appears under the final name before all of it is on disk (`publish.rs`).

mod chunks;
mod encoder;
mod mapped;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::prelude::*;

use crate::DataError;
use crate::publish::Staging;
use chunks::{Chunk, Chunks, Span};
use encoder::Encoder;
use mapped::Mapped;
use writer::Writer;

/// Names of the two datasets in the output directory.
const TRAIN: &str = "train";
const VAL: &str = "val";
/// Text that is encoded at once, over all threads.
const GROUP_BYTES: usize = 8 << 20;
/// Most chunks of it: documents may be a few bytes short.
const GROUP_CHUNKS: usize = 1 << 16;

/// What to make of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokenize {
    /// Text files, in order; each begins a document.
    pub inputs: Vec<PathBuf>,
    /// The directory to make; `train` and `val` in it are the datasets.
    pub out: PathBuf,
    /// What makes ids of text.
    pub tokenizer: TokenizerChoice,
    /// What stands between documents in an input, and becomes no token. None: an input is a document.
    pub separator: Option<String>,
    /// The token to add after each document, by its text in the tokenizer's vocabulary.
    pub eos: Option<String>,
    /// Part of the text, at its end, that goes to `val`: in `[0, 1)`. With 0 there is no `val`.
    pub held_out: f64,
    /// Most tokens of a shard.
    pub shard_tokens: usize,
    /// Threads that encode; None is one for each core.
    pub threads: Option<usize>,
    /// Whether datasets at `out` are replaced.
    pub overwrite: bool,
}

impl Tokenize {
    /// A tenth held out, shards of 2^26 tokens, bytes as ids, each input a document.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf) -> Self {
        Self {
            inputs,
            out,
            tokenizer: TokenizerChoice::Bytes,
            separator: None,
            eos: None,
            held_out: 0.1,
            shard_tokens: 1 << 26,
            threads: None,
            overwrite: false,
        }
    }
}

/// What makes ids of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// Each byte is an id; any file will do.
    Bytes,
    /// A Hugging Face `tokenizer.json`; inputs are UTF-8.
    File(PathBuf),
}

/// What was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// Tokens of the training split.
    pub train_tokens: u64,
    /// Tokens of the held-out split.
    pub val_tokens: u64,
    /// Ids are below this.
    pub vocab: u32,
    /// Wall time.
    pub seconds: f64,
    /// Text read.
    pub bytes: u64,
}

/// Makes datasets of text files.
///
/// The result depends on the inputs and on every option but `threads` and `overwrite`.
///
/// # Errors
///
/// When an input or the tokenizer cannot be read, a text is not what the tokenizer takes, `out` is taken
/// or cannot be written, or a split would be empty. `out` is then as it was.
pub fn tokenize(options: &Tokenize) -> Result<Report, DataError> {
    tokenize_unless(options, &AtomicBool::new(false))
}

/// The same, unless `stop` is raised before all text is encoded.
///
/// # Errors
///
/// As [`tokenize`], and [`DataError::Asked`].
pub fn tokenize_unless(options: &Tokenize, stop: &AtomicBool) -> Result<Report, DataError> {
    let start = Instant::now();
    check(options)?;
    let encoder = Encoder::load(&options.tokenizer, options.eos.as_deref())?;
    let inputs = options
        .inputs
        .iter()
        .map(|path| open_input(path))
        .collect::<Result<Vec<_>, _>>()?;
    let staging = Staging::begin(&options.out, &[VAL, TRAIN], options.overwrite)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|error| DataError::Request(format!("cannot start threads: {error}; use fewer")))?;

    let texts = inputs
        .iter()
        .map(Mapped::bytes)
        .collect::<Result<Vec<_>, _>>()?;
    let [train, val] = chunks::split(&texts, options, encoder.any_boundary());
    let mut counts = [0; 2];
    for ((name, spans), count) in [(TRAIN, train), (VAL, val)].into_iter().zip(&mut counts) {
        if name == VAL && options.held_out == 0.0 {
            continue;
        }
        let dir = staging.create_dir(name)?;
        let mut writer = Writer::new(dir, encoder.vocab(), options.shard_tokens);
        let encoding = Encoding {
            options,
            inputs: &inputs,
            encoder: &encoder,
            stop,
        };
        pool.install(|| encoding.write(spans, &mut writer))?;
        *count = writer.finish(encoder.id())?.ok_or_else(|| {
            DataError::Request(format!(
                "{}: the {name} split would have no tokens with {} of the text held out; use more text or \
                 another part",
                options.out.display(),
                options.held_out
            ))
        })?;
    }
    staging.publish()?;
    Ok(Report {
        train_tokens: counts[0],
        val_tokens: counts[1],
        vocab: encoder.vocab(),
        seconds: start.elapsed().as_secs_f64(),
        bytes: texts.iter().map(|text| text.len() as u64).sum(),
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

fn open_input(path: &Path) -> Result<Mapped, DataError> {
    Mapped::open(path).map_err(|error| match error {
        DataError::Damaged { path, fault } if fault.starts_with("is empty") => DataError::Damaged {
            path,
            fault: "is empty; there is nothing to tokenize".to_owned(),
        },
        other => other,
    })
}

/// One pass over the spans of a split.
struct Encoding<'a> {
    options: &'a Tokenize,
    inputs: &'a [Mapped],
    encoder: &'a Encoder,
    stop: &'a AtomicBool,
}

impl<'a> Encoding<'a> {
    fn write(&self, spans: Vec<Span<'a>>, writer: &mut Writer) -> Result<(), DataError> {
        let separator = self.options.separator.as_deref().map(str::as_bytes);
        let mut chunks = Chunks::new(spans, separator, self.encoder.any_boundary());
        loop {
            let group = next_group(&mut chunks);
            if group.is_empty() {
                return Ok(());
            }
            // A shorter file is an error here, where reading on would end the process.
            for input in self.inputs {
                input.bytes()?;
            }
            let encoded: Vec<_> = group.par_iter().map(|chunk| self.encode(chunk)).collect();
            for (chunk, ids) in group.iter().zip(encoded) {
                writer.push(&ids?)?;
                if chunk.ends_document {
                    writer.push(self.encoder.eos())?;
                    writer.end_document();
                }
            }
        }
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Vec<u32>, DataError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(DataError::Asked);
        }
        self.encoder.encode(chunk.text).map_err(|fault| {
            let place = chunk.first_byte + fault.at;
            DataError::damaged(
                self.inputs[chunk.input].path(),
                format!("byte {place}: {}", fault.text),
            )
        })
    }
}

fn next_group<'a>(chunks: &mut Chunks<'a>) -> Vec<Chunk<'a>> {
    let mut bytes = 0;
    let mut group = Vec::new();
    while bytes < GROUP_BYTES
        && group.len() < GROUP_CHUNKS
        && let Some(chunk) = chunks.next()
    {
        bytes += chunk.text.len();
        group.push(chunk);
    }
    group
}
