//! `spd-launch inspect PATH`: describes and verifies a dataset, checkpoint, file of weights or run
//! directory.

use std::io::Read;
use std::path::Path;

use indicatif::HumanCount;
use serde_json::Value;
use spd_checkpoint::{look, step_path, verify};
use spd_dataloader::{CheckedFiles, Dataset, Dtype};
use spd_trainer::Fault;
use spd_trainer::networks::describe;
use spd_trainer::run_file::Run;

use crate::cli::InspectArgs;
use crate::exit::Exit;
use crate::screen;
use crate::table::{Align, Table};

/// Describes the content of a path and verifies all its hashes.
///
/// # Errors
///
/// Bad input when it is none of these, or damaged.
pub(crate) fn inspect(asked: &InspectArgs) -> Result<Exit, Fault> {
    let path = &asked.path;
    let text = if path.join("manifest.json").is_file() {
        checkpoint(path)?
    } else if path.join("config.toml").is_file() {
        run(path)?
    } else if is_of_weights(path) {
        weights(path)?
    } else {
        dataset(path, asked)?
    };
    screen::result(&text);
    Ok(Exit::Done)
}

/// Number of excerpts of a dataset, and tokens of each.
const EXCERPTS: u64 = 3;
const EXCERPT_TOKENS: usize = 64;

fn dataset(path: &Path, asked: &InspectArgs) -> Result<String, Fault> {
    let dtype = asked.dtype.as_deref().map(|dtype| match dtype {
        "u32" => Dtype::U32,
        _ => Dtype::U16,
    });
    let dataset = Dataset::open_as(path, dtype)?;
    let mut known = CheckedFiles::default();
    dataset.check(dataset.vocab_size().unwrap_or(u32::MAX), &mut known)?;
    let mut table = Table::new(&[]);
    let count = |number: Option<u64>| {
        number.map_or("unknown".to_owned(), |number| {
            HumanCount(number).to_string()
        })
    };
    table.row(["dataset".to_owned(), path.display().to_string()]);
    table.row(["tokens", &count(Some(dataset.tokens()))]);
    table.row(["documents", &count(dataset.documents())]);
    table.row(["vocabulary", &count(dataset.vocab_size().map(u64::from))]);
    let tokenizer = dataset.tokenizer().map(ToString::to_string);
    table.row(["tokenizer", tokenizer.as_deref().unwrap_or("unknown")]);
    let stored = dataset.dtype().map(|dtype| dtype.to_string());
    table.row(["ids", &stored.unwrap_or_default()]);
    table.row(["files", &count(Some(dataset.paths().count() as u64))]);
    table.row(["fingerprint", &dataset.fingerprint(&mut known)?]);
    let whole = match dataset.vocab_size() {
        Some(_) => "intact: all hashes match, all ids are below the vocabulary",
        None => "read to the end; such files have no hashes",
    };
    let mut text = format!("{}  {whole}\n", table.text());
    for (first, excerpt) in dataset.excerpts(EXCERPTS, EXCERPT_TOKENS)? {
        text += &format!("\n  from token {} on: {excerpt:?}\n", HumanCount(first));
    }
    Ok(text)
}

fn checkpoint(path: &Path) -> Result<String, Fault> {
    let meta = verify(path).map_err(|error| Fault::BadInput(error.to_string()))?;
    let manifest = path.join("manifest.json");
    let manifest: Value = spd_files::read(&manifest)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    let manifest = &manifest["manifest"];
    let mut text = format!(
        "  checkpoint of step {} in {}\n  intact: all hashes match\n",
        manifest["step"],
        path.display()
    );
    let config = meta.get("config").and_then(Value::as_str);
    text += leak(config.unwrap_or_default());
    let mut table = Table::new(&[]);
    for (key, value) in &meta {
        // Long values, like the run file, have their own files.
        let value = value.to_string();
        if value.len() <= 200 {
            table.row([key.clone(), value]);
        }
    }
    text += &table.text();
    let tensors = manifest["tensors"].as_array().into_iter().flatten();
    let tensors = tensors.map(|tensor| {
        let word = |key: &str| tensor[key].as_str().unwrap_or_default().to_owned();
        (word("name"), word("dtype"), tensor["shape"].to_string())
    });
    text += &listed(tensors);
    Ok(text)
}

fn run(path: &Path) -> Result<String, Fault> {
    let root = path.join("checkpoints");
    let found = look(&root).map_err(|error| Fault::BadInput(error.to_string()))?;
    let mut text = format!("  run in {}\n", path.display());
    text += &match found.newest {
        Some((step, _)) => {
            format!("  its newest good checkpoint is of step {step}\n")
        }
        None => "  it has no good checkpoint\n".to_owned(),
    };
    for (path, reason) in found.damaged {
        text += &format!("  damaged: {}: {reason}\n", path.display());
    }
    // Including the shared file of frozen tensors.
    if let Some((step, _)) = found.newest
        && let Err(error) = verify(&step_path(&root, step))
    {
        text += &format!("  damaged: {error}\n");
    }
    let config = path.join("config.toml");
    let config = spd_files::read_to_string(&config)
        .map_err(|error| Fault::BadInput(format!("{}: cannot read: {error}", config.display())))?;
    Ok(format!("{text}{}\n{config}", leak(&config)))
}

/// A line about the target of a resolved run file if it leaks.
fn leak(config: &str) -> &'static str {
    match Run::from_resolved(config) {
        Ok(run) if run.target.allow_leak => {
            "  LEAKY: its target sees the tokens that it is to predict; its losses are none of a language model\n"
        }
        _ => "",
    }
}

/// Whether a path has weights: a safetensors file, a `torch.save` file, which is a zip archive, or
/// a directory of them.
pub(crate) fn is_of_weights(path: &Path) -> bool {
    if path.is_dir() {
        return path.join("config.json").is_file();
    }
    let is_zip = || {
        let mut first = [0; 4];
        let file = spd_files::open(path).and_then(|mut file| file.read_exact(&mut first));
        file.is_ok() && first == *b"PK\x03\x04"
    };
    path.extension().is_some_and(|end| end == "safetensors") || is_zip()
}

fn weights(path: &Path) -> Result<String, Fault> {
    let tensors = describe(path)?.into_iter();
    let tensors = tensors.map(|(name, dtype, dims)| (name, dtype, format!("{dims:?}")));
    Ok(format!(
        "  weights in {}\n  of the promised length; such files have no hashes\n{}",
        path.display(),
        listed(tensors)
    ))
}

/// Names, dtypes and shapes.
fn listed(tensors: impl Iterator<Item = (String, String, String)>) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for (name, dtype, shape) in tensors {
        table.row([name, dtype, shape.replace(", ", ",")]);
    }
    table.text()
}
