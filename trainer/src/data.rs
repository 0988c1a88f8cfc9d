//! From the run file's `[data]` to batches in a program's inputs.

use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;

use spd_dataloader::{
    Ahead, Batch, CheckedFiles, DataError, Dataset, Documents, Dtype, Features, Feed, Rows, Shard,
    Source, Windows,
};
use spd_engine::Given;
use spd_files::atomic::{make_dirs, write_shared};
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::cache_dir;
use crate::component_model::DataStream;
use crate::fault::Fault;
use crate::networks::{Input, Model};
use crate::run_file::{Active, Data, EvalData, Ids, Run};

/// Batches that wait to be used. A thread fills a batch of 64 rows of 512 tokens in 0.1 ms, and the
/// kernel is asked for those after it: no step is so short that it waits for a second one.
pub(crate) const AHEAD: Ahead = Ahead {
    batches: 4,
    threads: 1,
};

/// Training and held-out batches.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Training rows.
    pub train: Source,
    /// Held-out rows.
    pub eval: Source,
    /// Training rows of the non-target stream, if there is one.
    pub nontarget: Option<Source>,
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
            nontarget: None,
        });
    }
    let (
        Data::Tokens {
            train,
            eval,
            seq_len,
            ..
        },
        Input::Tokens { vocab, .. },
    ) = (&run.data, run.target.model.input())
    else {
        return Err(Fault::BadInput(
            "[data] kind does not fit the target".into(),
        ));
    };
    let vocab = u32::try_from(vocab)
        .map_err(|_| Fault::BadInput(format!("[target] vocab: {vocab} tokens are too many")))?;
    let of_train = windows(run, train, (*seq_len, vocab))?;
    let [of_train, of_eval] = match eval {
        EvalData::Dataset(path) => {
            let of_eval = windows(run, path, (*seq_len, vocab))?;
            check_tokenizers([(train, &of_train), (path, &of_eval)])?;
            [of_train, of_eval]
        }
        EvalData::HeldOut { held_out } => of_train.split(*held_out)?,
    };
    let nontarget = run.nontarget.as_ref().map(|said| {
        let (path, of_row) = (&said.data, said.seq_len.unwrap_or(*seq_len));
        // Its held-out rows are not trained on either.
        if path == train {
            if of_row == *seq_len {
                return Ok(of_train.clone());
            }
            return Err(Fault::BadInput(format!(
                "[nontarget] seq_len: expected that of [data], {seq_len}, for the dataset that [data] trains on, found {of_row}"
            )));
        }
        let windows = windows(run, path, (of_row, vocab))?;
        check_tokenizers([(train, &of_train), (path, &windows)])?;
        Ok::<_, Fault>(windows)
    });
    let nontarget = nontarget.transpose()?.map(Source::Tokens);
    Ok(Sources {
        train: Source::Tokens(of_train),
        eval: Source::Tokens(of_eval),
        nontarget,
    })
}

/// The rows of the dataset at a path.
///
/// - `seq_len`: tokens of a row
fn windows(run: &Run, path: &Path, (seq_len, vocab): (usize, u32)) -> Result<Windows, Fault> {
    let dataset = dataset(&run.data, path)?;
    if let Some(found) = dataset.vocab_size().filter(|&found| found > vocab) {
        let trained_on = datasets(run).first().copied();
        let has = match (&run.target.weights, trained_on) {
            (Some(weights), _) => format!(
                "the target's weights, {}, are for {vocab}; tokenize with the tokenizer of these weights",
                weights.display()
            ),
            // That of the training data fits.
            (None, Some(train)) if train != path => format!(
                "the target has {vocab}; tokenize with the tokenizer of {}",
                train.display()
            ),
            (None, _) => format!("the target has {vocab}; set [target] vocab = {found}"),
        };
        return Err(Fault::BadInput(format!(
            "{}: made for {found} tokens, {has}",
            path.display()
        )));
    }
    let Data::Tokens {
        cross_documents,
        document_end,
        ..
    } = &run.data
    else {
        return Err(Fault::BadInput("[data] kind: not of tokens".into()));
    };
    let documents = match document_end.map(u32::try_from) {
        _ if *cross_documents => Documents::Joined,
        None => Documents::Apart,
        Some(Ok(id)) if id < vocab => Documents::EndWith(id),
        Some(_) => {
            return Err(Fault::BadInput(format!(
                "[data] document_end: expected an id below the target's {vocab}, found {}",
                document_end.unwrap_or_default()
            )));
        }
    };
    let rows = Rows {
        seq_len,
        vocab,
        documents,
    };
    Ok(Windows::new(Arc::new(dataset), rows)?)
}

/// Opens the dataset at a path.
fn dataset(data: &Data, path: &Path) -> Result<Dataset, Fault> {
    let (dtype, make) = match data {
        Data::Tokens {
            dtype,
            make,
            train,
            eval,
            ..
        } => {
            let is_of_eval = matches!(eval, EvalData::Dataset(eval) if eval == path);
            // The command makes the datasets of `[data]`.
            let make = make.as_deref().filter(|_| train == path || is_of_eval);
            (*dtype, make)
        }
        Data::SparseFeatures { .. } => (None, None),
    };
    let dtype = dtype.map(|ids| match ids {
        Ids::U16 => Dtype::U16,
        Ids::U32 => Dtype::U32,
    });
    Dataset::open_as(path, dtype).map_err(|err| missing(err, make))
}

/// Refuses two datasets whose ids mean different things.
fn check_tokenizers(both: [(&PathBuf, &Windows); 2]) -> Result<(), Fault> {
    let [train, eval] = both.map(|(_, windows)| windows.dataset().tokenizer());
    match (train, eval) {
        (Some(train), Some(eval)) if !train.is_same(eval) => {
            let [(train_path, _), (eval_path, _)] = both;
            Err(Fault::BadInput(format!(
                "{}: made by {eval}, {} by {train}; tokenize both with one tokenizer",
                eval_path.display(),
                train_path.display()
            )))
        }
        _ => Ok(()),
    }
}

/// The same, with everything read that is not known to be whole: hashes of the tokens, and ids
/// against the vocabulary.
///
/// The result is cached, so the data are read once; without a writable cache they are read each
/// time.
///
/// # Errors
///
/// As [`open`], and the file that is not what its dataset promises.
pub fn open_checked(run: &Run) -> Result<Sources, Fault> {
    let sources = open(run)?;
    let all = [&sources.train, &sources.eval].into_iter();
    for (path, source) in datasets(run).into_iter().zip(all.chain(&sources.nontarget)) {
        remembering(path, |known| source.check(known))?;
    }
    Ok(sources)
}

/// Paths of a run's datasets, for training, for evaluation and for the non-target stream, if there
/// is one; a dataset that is cut in two comes twice. None where rows are generated.
pub(crate) fn datasets(run: &Run) -> Vec<&Path> {
    let Data::Tokens { train, eval, .. } = &run.data else {
        return Vec::new();
    };
    let eval = match eval {
        EvalData::Dataset(eval) => eval,
        EvalData::HeldOut { .. } => train,
    };
    let nontarget = run.nontarget.iter().map(|said| &said.data);
    let all = [train, eval].into_iter().chain(nontarget);
    all.map(PathBuf::as_path).collect()
}

/// Identity of a dataset, independent of its path; see [`Dataset::fingerprint`].
pub(crate) fn fingerprint(data: &Data, path: &Path) -> Result<String, Fault> {
    let dataset = dataset(data, path)?;
    Ok(remembering(path, |known| dataset.fingerprint(known))?)
}

/// Identity of a dataset for targets trained on it: its `index.json`, or the hash of a dataset
/// without one.
pub(crate) fn key(data: &Data, path: &Path) -> Result<String, Fault> {
    if !path.is_dir() {
        return fingerprint(data, path);
    }
    let index = path.join("index.json");
    spd_files::read_to_string(&index)
        .map_err(|err| Fault::BadInput(format!("{}: cannot be read: {err}", index.display())))
}

/// Does something with what was found of the files of a dataset before, and keeps what is found now
/// in the cache.
fn remembering<T>(
    path: &Path,
    with: impl FnOnce(&mut CheckedFiles) -> Result<T, DataError>,
) -> Result<T, DataError> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = xxh3_64(path.as_os_str().as_encoded_bytes());
    let record = cache_dir()
        .join("datasets")
        .join(format!("{name:016x}.json"));
    let before = spd_files::read(&record).ok();
    let before = before.and_then(|text| serde_json::from_slice(&text).ok());
    let before: CheckedFiles = before.unwrap_or_default();
    let mut known = before.clone();
    let found = with(&mut known);
    if known != before
        && let Ok(text) = serde_json::to_vec(&known)
        && let Some(parent) = record.parent()
        && make_dirs(parent).is_ok()
    {
        // If it cannot be cached, it is read again.
        let _ = write_shared(&record, &[&text]);
    }
    found
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
        _ => err.into(),
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

/// How batches of the non-target stream are read: in another order, of the same dataset too.
pub(crate) fn nontarget_feed(seed: u64, rows: usize) -> Feed {
    training_feed(seed ^ 0x6e6f_6e74, rows)
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
pub fn fill(given: &mut Given, batch: &Batch) {
    fill_block(given, slice::from_ref(batch), 0, 1);
}

/// The same with one of `blocks` equal blocks of the rows of each stream's batch.
pub(crate) fn fill_block(given: &mut Given, batches: &[Batch], block: usize, blocks: usize) {
    for (stream, batch) in DataStream::ALL.into_iter().zip(batches) {
        fill_stream(given, (stream, batch), block, blocks);
    }
}

fn fill_stream(
    given: &mut Given,
    (stream, batch): (DataStream, &Batch),
    block: usize,
    blocks: usize,
) {
    let rows = batch.rows / blocks;
    let of_block = |values: usize| block * rows * values..(block + 1) * rows * values;
    // A rank has whole blocks.
    let number = u32::try_from(batch.first_row / rows + block);
    given.parameters.block = number.expect("a batch has fewer than 2^32 blocks");
    if !batch.features.is_empty() {
        let features = &batch.features[of_block(batch.features.len() / batch.rows)];
        given.input(&stream.name("input")).copy_from_slice(features);
        return;
    }
    let width = batch.tokens.len() / batch.rows;
    let rows = || batch.tokens[of_block(width)].chunks_exact(width);
    let input = given.input_u32(&stream.name("input"));
    let input = input.chunks_exact_mut(width - 1);
    for (to, row) in input.zip(rows()) {
        to.copy_from_slice(&row[..width - 1]);
    }
    let labels = stream.name("labels");
    if given.has_input(&labels) {
        let labels = given.input_u32(&labels).chunks_exact_mut(width - 1);
        for (to, row) in labels.zip(rows()) {
            to.copy_from_slice(&row[1..]);
        }
    }
}
