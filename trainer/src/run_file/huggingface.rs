//! A directory of weights as Hugging Face lays it out: its `config.json` says which network it is
//! and how large, so that nobody types it. Keys that the run file has too must agree. A directory
//! of the hub is looked up by the caller.

use std::{
    borrow::Cow,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use spd_configs::{
    faults::{Note, about},
    values::{Kind, Number, found},
};

use crate::networks::KINDS;
use crate::run_file::{
    config_json::{ConfigJson, Said, shown_value},
    reference::{self, Beside},
    target::SCHEME,
};

/// Longer files are refused.
const MOST_BYTES: u64 = 1 << 20;

/// The name of the file.
const FILE: &str = "config.json";

/// Weights of the hub of Hugging Face that a run file names.
#[derive(Debug, Clone, Copy)]
pub struct OnHub<'a> {
    /// As the file says it: `hf://OWNER/NAME@REVISION`.
    pub name: &'a str,
    /// The commit, where the file says it.
    pub commit: Option<&'a str>,
    /// The name of the run, which may have found the commit before.
    pub run: Option<&'a str>,
}

/// Weights of the hub, found.
#[derive(Debug, Clone)]
pub struct OnDisk {
    /// The commit of their revision.
    pub commit: String,
    /// The directory that has its `config.json`, and is to have its tensors.
    pub dir: PathBuf,
}

/// A function that looks weights up on the hub; an error is one line.
pub type LookUp<'l> = dyn FnMut(&OnHub<'_>) -> Result<OnDisk, String> + 'l;

/// The keys of `[target]` that the weights' own directory says, as TOML; nothing where `weights`
/// names no directory, or one without a `config.json` beside a `kind` of the run file.
///
/// # Errors
///
/// Notes at the key `weights`, when the file cannot be read or says what is not supported.
pub(crate) fn look(
    run_file: &DeTable<'_>,
    look_up: &mut LookUp<'_>,
) -> Result<Option<ConfigKeys>, Vec<Note>> {
    let target = run_file.get("target").and_then(|t| t.get_ref().as_table());
    let Some(target) = target else {
        return Ok(None);
    };
    let Some((key, weights)) = target.get_key_value("weights") else {
        return Ok(None);
    };
    let offset = key.span().start;
    let note = |message: String| Note {
        offset,
        message: about("target", "weights") + &message,
    };
    let Some(dir) = weights.get_ref().as_str().filter(|dir| !dir.is_empty()) else {
        return Ok(None);
    };
    let text = |table: &DeTable<'_>, key: &str| {
        let value = table.get(key)?.get_ref().as_str()?;
        Some(value.to_owned())
    };
    let found = match dir.starts_with(SCHEME) {
        true => {
            let (commit, run) = (text(target, "commit"), text(run_file, "name"));
            let asked = OnHub {
                name: dir,
                commit: commit.as_deref(),
                run: run.as_deref(),
            };
            Some(look_up(&asked).map_err(|line| vec![note(line)])?)
        }
        false => None,
    };
    let dir = match &found {
        Some(found) => &found.dir,
        None => Path::new(dir),
    };
    if found.is_none() {
        let kind = target.get("kind").and_then(|kind| kind.get_ref().as_str());
        let data = run_file.get("data").and_then(|d| d.get_ref().as_table());
        let synced = data.is_some_and(|data| data.contains_key("synced_inputs"));
        let beside = reference::beside(dir, kind, synced).map_err(|message| vec![note(message)])?;
        if let Some(Beside { json, weights }) = beside {
            return ConfigKeys::checked(offset, json, Some(weights), note).map(Some);
        }
    }
    let json = config_json(dir, target.contains_key("kind"));
    let mut json = json.map_err(|message| vec![note(message)])?;
    if let Some(found) = &found {
        let json = json.get_or_insert_with(|| ConfigJson::new(dir.join(FILE), Map::new()));
        json.say("commit", &format!("{:?}", found.commit), SCHEME);
    }
    json.map(|json| ConfigKeys::checked(offset, json, None, note))
        .transpose()
}

/// The `config.json` of a directory; `None` for a file, or if the run file has a `kind` and the
/// directory no `config.json`.
fn config_json(dir: &Path, has_kind: bool) -> Result<Option<ConfigJson>, String> {
    match fs::metadata(dir) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(None),
        Err(_) if has_kind || names_file(dir) => return Ok(None),
        Err(error) => {
            return Err(format!(
                "{}: {error}; expected a directory with a {FILE}, or a file and its `kind`",
                dir.display()
            ));
        }
    }
    let path = dir.join(FILE);
    if has_kind && !path.try_exists().unwrap_or(true) {
        return Ok(None);
    }
    read(path).map(Some)
}

/// Whether a path is one of a file of weights, though there is none.
fn names_file(path: &Path) -> bool {
    let ends = ["safetensors", "bin", "pt", "pth"];
    path.extension()
        .is_some_and(|end| ends.iter().any(|known| end == *known))
}

/// The keys of `[target]` that a `config.json` says.
pub(crate) struct ConfigKeys {
    /// Of the key `weights` in the run file.
    offset: usize,
    json: ConfigJson,
    /// The file of weights, where that is found in the directory that the run file names.
    weights: Option<PathBuf>,
}

impl ConfigKeys {
    /// # Errors
    ///
    /// Unsupported keys of the file.
    fn checked(
        offset: usize,
        json: ConfigJson,
        weights: Option<PathBuf>,
        note: impl Fn(String) -> Note,
    ) -> Result<Self, Vec<Note>> {
        match json.faults.is_empty() {
            true => Ok(Self {
                offset,
                json,
                weights,
            }),
            false => Err(json.faults.into_iter().map(note).collect()),
        }
    }

    /// Puts the keys into the run file, and notes those of it that disagree.
    pub(crate) fn put<'s>(&'s self, file: &mut DeTable<'s>) -> Vec<Note> {
        let mut notes = Vec::new();
        let Some(DeValue::Table(target)) = file.get_mut("target").map(Spanned::get_mut) else {
            return notes;
        };
        for Said { key, value, by } in &self.json.said {
            let Ok(value) = DeValue::parse(value) else {
                continue;
            };
            let value = value.into_inner();
            let mut place = self.offset;
            if let Some((typed_key, typed)) = target.get_key_value(*key) {
                place = typed_key.span().start;
                if !is_same(typed.get_ref(), &value) {
                    let message = format!(
                        "expected {}, as `{by}` of {} says, found {}; leave it out",
                        found(&value),
                        self.json.path.display(),
                        found(typed.get_ref())
                    );
                    notes.push(Note {
                        offset: place,
                        message: about("target", key) + &message,
                    });
                }
                target.remove(*key);
            }
            let at = place..place;
            let key = Spanned::new(at.clone(), Cow::Borrowed(*key));
            target.insert(key, Spanned::new(at, value));
        }
        if let Some(weights) = self.weights.as_deref().and_then(Path::to_str) {
            let at = self.offset..self.offset;
            let key = Spanned::new(at.clone(), Cow::Borrowed("weights"));
            let value = DeValue::String(Cow::Borrowed(weights));
            target.insert(key, Spanned::new(at, value));
        }
        notes
    }

    /// Says of a fault that the reader found at `weights` where its value is from.
    pub(crate) fn explain(&self, note: &mut Note) {
        let of_weights = about("target", "weights");
        if note.offset == self.offset && !note.message.starts_with(&of_weights) {
            note.message += &format!(" ({} says so)", self.json.path.display());
        }
    }
}

/// Whether two values of TOML mean the same, whole numbers and decimals alike.
fn is_same(one: &DeValue<'_>, other: &DeValue<'_>) -> bool {
    let number = |value: &DeValue<'_>| Number::FINITE.read(value).ok().map(f64::to_bits);
    match (one, other) {
        (DeValue::Array(one), DeValue::Array(other)) => {
            let pairs = || one.iter().zip(other.iter());
            one.len() == other.len() && pairs().all(|(a, b)| is_same(a.get_ref(), b.get_ref()))
        }
        (DeValue::Table(one), DeValue::Table(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, a)| {
                    let b = other.get(&**key.get_ref());
                    b.is_some_and(|b| is_same(a.get_ref(), b.get_ref()))
                })
        }
        (DeValue::String(one), DeValue::String(other)) => one == other,
        (DeValue::Boolean(one), DeValue::Boolean(other)) => one == other,
        _ => number(one).is_some() && number(one) == number(other),
    }
}

/// Reads the file, and the keys that its architecture has.
fn read(path: PathBuf) -> Result<ConfigJson, String> {
    let shown = path.display();
    let bytes = spd_files::read_at_most(&path, MOST_BYTES).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => format!(
            "no {shown}, which says what network the weights are of; put it there, or give `kind` and its sizes"
        ),
        _ => format!("{shown}: cannot be read: {error}"),
    })?;
    let object: Map<String, Value> = serde_json::from_slice(&bytes)
        .map_err(|error| format!("{shown}: no JSON object: {error}"))?;
    let known = KINDS.0.iter().flat_map(|(word, kind)| {
        let architectures = kind.architectures().iter();
        architectures.map(move |(model_type, read)| (*model_type, *word, *read))
    });
    let model_type = object.get("model_type");
    let is_of = |(known, ..): &(&str, _, _)| model_type.and_then(Value::as_str) == Some(known);
    let Some((_, kind, read)) = known.clone().find(is_of) else {
        let known: Vec<_> = known.map(|(model_type, ..)| model_type).collect();
        let found = match model_type {
            Some(found) => format!("is {}, which is not here", shown_value(found)),
            None => "is missing".to_owned(),
        };
        let known = known.join(", ");
        return Err(format!(
            "{shown}: `model_type` {found}; architectures that are: {known}"
        ));
    };
    let mut json = ConfigJson::new(path, object);
    json.say("kind", &format!("{:?}", kind), "model_type");
    json.only("quantization_config", &[]);
    read(&mut json);
    Ok(json)
}
