//! From the run file's `[data]` to batches in a program's inputs.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use spd_configs::{Active, Data, Input, Model, Run};
use spd_dataloader::{
    Ahead, Batch, CheckedFiles, DataError, Dataset, Features, Feed, Shard, Source,
};
use spd_engine::Executor;
use spd_files::atomic::{make_dir, write_shared};
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::cache_dir;
use crate::fault::Fault;

/// Batches that wait to be used. A thread fills a batch of 64 rows of 512 tokens in 0.1 ms, and the kernel is asked for those
/// after it: no step is so short that it waits for a second one.
pub(crate) const AHEAD: Ahead = Ahead {
    batches: 4,
    threads: 1,
};

/// Training and held-out batches.
#[derive(Debug, Clone)]
pub struct Sources {
    /// What is trained on.
    pub train: Source,
    /// What is evaluated on.
    pub eval: Source,
}

/// Opens the data of a run.
///
/// # Errors
///
/// When a dataset is missing, plainly damaged, or of another vocabulary.
pub fn open(run: &Run) -> Result<Sources, Fault> {
    if let Some(features) = features(&run.data, &run.target.model)? {
        let source = Source::Features(features);
        return Ok(Sources {
            train: source.clone(),
            eval: source,
        });
    }
    match (&run.data, run.target.model.input()) {
        (
            Data::Tokens {
                train,
                eval,
                seq_len,
                make,
            },
            Input::Tokens { vocab, .. },
        ) => {
            let vocab = u32::try_from(vocab).map_err(|_| {
                Fault::BadInput(format!("[target] vocab: {vocab} tokens are too many"))
            })?;
            let open = |dir: &Path| -> Result<Source, Fault> {
                let dataset = Dataset::open(dir).map_err(|err| missing(err, make.as_deref()))?;
                if let Some(found) = dataset.vocab_size().filter(|&found| found > vocab) {
                    return Err(Fault::BadInput(format!(
                        "{}: made for {found} tokens, the target has {vocab}; set [target] vocab = {found}",
                        dir.display()
                    )));
                }
                Ok(Source::tokens(Arc::new(dataset), *seq_len, vocab)?)
            };
            Ok(Sources {
                train: open(train)?,
                eval: open(eval)?,
            })
        }
        _ => Err(Fault::BadInput(
            "[data] kind does not fit the target".into(),
        )),
    }
}

/// The same, with everything read that is not known to be whole: hashes of the tokens, and ids against the vocabulary.
///
/// What was found is kept in the cache, so that it is read once; where the cache cannot be written, it is read each time.
///
/// # Errors
///
/// As [`open`], and the file that is not what its dataset promises.
pub fn open_checked(run: &Run) -> Result<Sources, Fault> {
    let sources = open(run)?;
    if let Data::Tokens { train, eval, .. } = &run.data {
        for (dir, source) in [(train, &sources.train), (eval, &sources.eval)] {
            let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
            let name = xxh3_64(dir.as_os_str().as_encoded_bytes());
            let record = cache_dir().join("datasets");
            check(source, &record.join(format!("{name:016x}.json")))?;
        }
    }
    Ok(sources)
}

/// Checks a source; what was found of its files is kept in `record`.
fn check(source: &Source, record: &Path) -> Result<(), Fault> {
    let before = spd_files::read(record).ok();
    let before = before.and_then(|text| serde_json::from_slice(&text).ok());
    let before: CheckedFiles = before.unwrap_or_default();
    let mut known = before.clone();
    let checked = source.check(&mut known);
    if known != before
        && let Ok(text) = serde_json::to_vec(&known)
        && let Some(parent) = record.parent()
        && make_dir(parent).is_ok()
    {
        // Where it cannot be kept, it is read again.
        let _ = write_shared(record, &[&text]);
    }
    Ok(checked?)
}

/// The generator of a run's features; `None` where the data or the target are of another kind.
pub(crate) fn features(data: &Data, model: &Model) -> Result<Option<Features>, DataError> {
    let (Data::SparseFeatures { active, low, high }, Input::Features(n_features)) =
        (data, model.input())
    else {
        return Ok(None);
    };
    let made = match active {
        Active::ByChance {
            probability,
            synced_inputs,
        } => Features::new(n_features, *probability, *low, *high)?.synced(synced_inputs)?,
        Active::Exactly { exactly_active } => {
            Features::exactly(n_features, *exactly_active, *low, *high)?
        }
    };
    Ok(Some(made))
}

fn missing(err: DataError, make: Option<&str>) -> Fault {
    match (&err, make) {
        (DataError::Missing { .. }, Some(make)) => {
            Fault::BadInput(format!("{err}; this command makes it: {make}"))
        }
        _ => Fault::BadInput(err.to_string()),
    }
}

/// How a run's training batches are read.
pub fn training_feed(seed: u64, rows: usize) -> Feed {
    Feed {
        seed,
        rows,
        shard: Shard::ALONE,
    }
}

/// How held-out batches are read: another order, so that generated features are other ones too.
pub fn eval_feed(seed: u64, rows: usize) -> Feed {
    Feed {
        seed: seed ^ 0x6576_616c,
        rows,
        shard: Shard::ALONE,
    }
}

/// Copies a batch into a program's inputs: `input`, and `labels` where the program has them.
pub fn fill(executor: &mut Executor, batch: &Batch) {
    fill_block(executor, batch, 0, 1);
}

/// The same with one of `blocks` equal blocks of the rows of a batch.
pub(crate) fn fill_block(executor: &mut Executor, batch: &Batch, block: usize, blocks: usize) {
    let rows = batch.rows / blocks;
    let of_block = |values: usize| block * rows * values..(block + 1) * rows * values;
    let first_row = batch.first_row + block * rows;
    let number_from = |executor: &mut Executor, positions: usize| {
        let first = u32::try_from(first_row * positions);
        executor.parameters().first_row = first.expect("rows of a batch are numbered in 32 bits");
    };
    if !batch.features.is_empty() {
        let features = &batch.features[of_block(batch.features.len() / batch.rows)];
        executor.input("input").copy_from_slice(features);
        number_from(executor, 1);
        return;
    }
    let width = batch.tokens.len() / batch.rows;
    number_from(executor, width - 1);
    let rows = || batch.tokens[of_block(width)].chunks_exact(width);
    let input = executor.input_u32("input").chunks_exact_mut(width - 1);
    for (to, row) in input.zip(rows()) {
        to.copy_from_slice(&row[..width - 1]);
    }
    if executor.has_input("labels") {
        let labels = executor.input_u32("labels").chunks_exact_mut(width - 1);
        for (to, row) in labels.zip(rows()) {
            to.copy_from_slice(&row[1..]);
        }
    }
}
