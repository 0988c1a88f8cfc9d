//! A directory of weights as Hugging Face lays it out: its `config.json` says which network it is and how large, so that nobody types
//! it. What a run file says too has to agree.

use std::{
    borrow::Cow,
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde_json::{Map, Value};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    faults::{Note, about},
    networks::{ARCHITECTURES, Architecture},
    values::found,
};

/// The name of the file.
const FILE: &str = "config.json";

/// A `config.json` on its way to keys of `[target]`.
pub(crate) struct ConfigJson {
    path: PathBuf,
    object: Map<String, Value>,
    said: Vec<Said>,
    /// What is not supported or missing, a line each.
    faults: Vec<String>,
}

/// A key of `[target]`, as the file says it.
struct Said {
    key: &'static str,
    /// TOML.
    value: String,
    /// The key of the file that says it.
    by: &'static str,
}

/// The keys of `[target]` that the weights' own directory says, as TOML; nothing where `weights` names no directory, or one without a
/// `config.json` beside a `kind` of the run file.
///
/// # Errors
///
/// Notes at the key `weights`, when the file cannot be read or says what is not supported.
pub(crate) fn look(run_file: &DeTable<'_>) -> Result<Option<ConfigKeys>, Vec<Note>> {
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
    if let Some(name) = dir.strip_prefix("hf://") {
        let message = format!(
            "expected a path, found {dir:?}; fetch it with `hf download {} --local-dir DIR`, and give DIR",
            name.split('@').next().unwrap_or(name).escape_debug()
        );
        return Err(vec![note(message)]);
    }
    let dir = Path::new(dir);
    let has_kind = target.contains_key("kind");
    match fs::metadata(dir) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(None),
        Err(_) if has_kind || names_file(dir) => return Ok(None),
        Err(error) => {
            let message = format!(
                "{}: {error}; expected a directory with a {FILE}, or a file and its `kind`",
                dir.display()
            );
            return Err(vec![note(message)]);
        }
    }
    let path = dir.join(FILE);
    if has_kind && !path.try_exists().unwrap_or(true) {
        return Ok(None);
    }
    let json = ConfigJson::read(path).map_err(|message| vec![note(message)])?;
    match json.faults.is_empty() {
        true => Ok(Some(ConfigKeys { offset, json })),
        false => Err(json.faults.into_iter().map(note).collect()),
    }
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
}

impl ConfigKeys {
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
    let number = |value: &DeValue<'_>| match value {
        DeValue::Integer(digits) => i64::from_str_radix(digits.as_str(), digits.radix())
            .ok()
            .map(|number| number.to_string()),
        _ => None,
    };
    let decimal = |value: &DeValue<'_>| match value {
        DeValue::Float(float) => float.as_str().parse::<f64>().ok(),
        _ => number(value).and_then(|digits| digits.parse().ok()),
    };
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
        _ => match (number(one), number(other)) {
            (Some(one), Some(other)) => one == other,
            _ => match (decimal(one), decimal(other)) {
                (Some(one), Some(other)) => one.to_bits() == other.to_bits(),
                _ => match (one, other) {
                    (DeValue::String(one), DeValue::String(other)) => one == other,
                    (DeValue::Boolean(one), DeValue::Boolean(other)) => one == other,
                    _ => false,
                },
            },
        },
    }
}

impl ConfigJson {
    /// Reads the file, and the keys that its architecture has.
    fn read(path: PathBuf) -> Result<Self, String> {
        let shown = path.display();
        let bytes = spd_files::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => format!(
                "no {shown}, which says what network the weights are of; put it there, or give `kind` and its sizes"
            ),
            _ => format!("{shown}: cannot be read: {error}"),
        })?;
        let object: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| format!("{shown}: no JSON object: {error}"))?;
        let is_of = |architecture: &&Architecture| {
            object.get("model_type").and_then(Value::as_str) == Some(architecture.model_type)
        };
        let Some(architecture) = ARCHITECTURES.iter().find(is_of) else {
            let known: Vec<_> = ARCHITECTURES.iter().map(|known| known.model_type).collect();
            let found = match object.get("model_type") {
                Some(found) => format!("is {}, which is not here", shown_value(found)),
                None => "is missing".to_owned(),
            };
            let known = known.join(", ");
            return Err(format!(
                "{shown}: `model_type` {found}; architectures that are: {known}"
            ));
        };
        let mut json = Self {
            path,
            object,
            said: Vec::new(),
            faults: Vec::new(),
        };
        json.say("kind", &format!("{:?}", architecture.kind), "model_type");
        json.only("quantization_config", &[]);
        (architecture.read)(&mut json);
        Ok(json)
    }

    /// A key that the architecture has by itself, or that is made of several; `value` is TOML.
    pub(crate) fn say(&mut self, key: &'static str, value: &str, by: &'static str) {
        let value = value.to_owned();
        self.said.push(Said { key, value, by });
    }

    fn refuse(&mut self, message: impl AsRef<str>) {
        let line = format!("{}: {}", self.path.display(), message.as_ref());
        self.faults.push(line);
    }

    /// The value of `name`, which may lie in a table: `table.name`. Null is nothing.
    fn get(&self, name: &str) -> Option<&Value> {
        let value = match name.split_once('.') {
            Some((table, name)) => self.object.get(table)?.get(name),
            None => self.object.get(name),
        };
        value.filter(|value| !value.is_null())
    }

    /// A number that the file has to say, under the first of some names.
    pub(crate) fn size(&mut self, key: &'static str, names: &[&'static str]) {
        if !self.maybe(key, names) {
            self.refuse(format!("missing key `{}`", names[0]));
        }
    }

    /// A number or a flag that the file may say, and whether it does.
    pub(crate) fn maybe(&mut self, key: &'static str, names: &[&'static str]) -> bool {
        for name in names {
            match self.get(name) {
                None => {}
                Some(Value::Number(number)) => {
                    let value = number.to_string();
                    self.say(key, &value, name);
                    return true;
                }
                Some(Value::Bool(flag)) => {
                    let value = flag.to_string();
                    self.say(key, &value, name);
                    return true;
                }
                Some(other) => {
                    let found = shown_value(other);
                    self.refuse(format!(
                        "`{name}`: expected a number or a flag, found {found}"
                    ));
                    return true;
                }
            }
        }
        false
    }

    /// A word, if the file says one, in our words for some of its.
    pub(crate) fn word(&mut self, key: &'static str, name: &'static str, words: &[(&str, &str)]) {
        let Some(found) = self.get(name) else {
            return;
        };
        match words.iter().find(|(theirs, _)| found == theirs) {
            Some((_, ours)) => self.say(key, &format!("{ours:?}"), name),
            None => {
                let supported: Vec<Value> =
                    words.iter().map(|(theirs, _)| (*theirs).into()).collect();
                self.only(name, &supported);
            }
        }
    }

    /// Refuses a feature unless it is left out, null or one of these values.
    pub(crate) fn only(&mut self, name: &'static str, supported: &[Value]) {
        let Some(found) = self.get(name).filter(|found| !supported.contains(found)) else {
            return;
        };
        let found = shown_value(found);
        let supported: Vec<_> = match supported {
            [] => vec!["null".to_owned()],
            some => some.iter().map(shown_value).collect(),
        };
        let supported = supported.join(", ");
        self.refuse(format!(
            "`{name}` is {found}, which is not supported; supported: {supported}"
        ));
    }

    /// A number that was said already.
    fn number<N: FromStr>(&self, key: &str) -> Option<N> {
        let said = self.said.iter().find(|said| said.key == key)?;
        said.value.parse().ok()
    }

    /// The columns of a head that are turned, from the part of them that the file gives.
    pub(crate) fn rotary_part(&mut self, key: &'static str, width: &str, heads: &str) {
        const NAMES: [&str; 2] = ["rotary_pct", "rope_parameters.partial_rotary_factor"];
        let part = NAMES
            .into_iter()
            .find_map(|name| Some((name, self.get(name)?)));
        let (by, part) = match part.map(|(by, part)| (by, part.as_f64())) {
            None => (NAMES[0], 0.25),
            Some((by, Some(part))) if part > 0.0 && part <= 1.0 => (by, part),
            Some((by, _)) => {
                let found = self.get(by).map(shown_value).unwrap_or_default();
                return self.refuse(format!(
                    "`{by}`: expected a number in (0, 1], found {found}"
                ));
            }
        };
        if let (Some(width), Some(heads)) = (self.number::<f64>(width), self.number::<f64>(heads))
            && heads > 0.0
        {
            let columns = ((width / heads).floor() * part).floor();
            self.say(key, &format!("{columns:.0}"), by);
        }
    }

    /// The blocks with a window: the file has a list of patterns and how often each is repeated.
    pub(crate) fn local_layers(&mut self, key: &'static str, name: &'static str) {
        let Some(found) = self.get(name) else {
            return;
        };
        let n_layer = self.number::<usize>("n_layer").unwrap_or_default();
        let Some(layers) = expanded(found) else {
            let found = shown_value(found);
            return self.refuse(format!(
                "`{name}`: expected patterns of \"global\" and \"local\" and how often each is repeated, such as \
                 [[[\"global\", \"local\"], 4]], found {found}"
            ));
        };
        if layers.len() != n_layer {
            let count = layers.len();
            return self.refuse(format!(
                "`{name}` is of {count} layers, `num_layers` says {n_layer}"
            ));
        }
        let local = layers.iter().enumerate().filter(|(_, is_local)| **is_local);
        let local: Vec<String> = local.map(|(layer, _)| layer.to_string()).collect();
        self.say(key, &format!("[{}]", local.join(", ")), name);
    }

    /// How angles are scaled: not at all, or as in Llama 3.1.
    pub(crate) fn rope_scaling(&mut self, key: &'static str) {
        for table in ["rope_scaling", "rope_parameters"] {
            let Some(found) = self.get(table) else {
                continue;
            };
            let kind = found.get("rope_type").or_else(|| found.get("type"));
            let kind = kind.filter(|kind| !kind.is_null());
            match kind.map_or(Some("default"), Value::as_str) {
                Some("default") => {}
                Some("llama3") => {
                    let names = [
                        ("factor", "factor"),
                        ("low", "low_freq_factor"),
                        ("high", "high_freq_factor"),
                        ("n_ctx", "original_max_position_embeddings"),
                    ];
                    let number = |name| found.get(name).and_then(Value::as_number);
                    let all =
                        names.map(|(ours, theirs)| Some(format!("{ours} = {}", number(theirs)?)));
                    match all.into_iter().collect::<Option<Vec<_>>>() {
                        Some(all) => self.say(key, &format!("{{ {} }}", all.join(", ")), table),
                        None => {
                            let theirs = names.map(|(_, theirs)| theirs).join(", ");
                            self.refuse(format!("`{table}`: expected numbers {theirs}"));
                        }
                    }
                }
                _ => {
                    let kind = kind.map(shown_value).unwrap_or_default();
                    self.refuse(format!(
                        "`{table}.rope_type` is {kind}, which is not supported; supported: \"default\", \"llama3\""
                    ));
                }
            }
        }
    }

    /// Refuses windows that a query cannot see beyond.
    pub(crate) fn no_window(&mut self) {
        let full = |kinds: &Value| {
            let kinds = kinds.as_array();
            kinds.is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention"))
        };
        if let Some(kinds) = self.get("layer_types").filter(|kinds| !full(kinds)) {
            let found = shown_value(kinds);
            self.refuse(format!(
                "`layer_types` is {found}, which is not supported; supported: \"full_attention\" alone"
            ));
        }
        if self.get("use_sliding_window") == Some(&Value::Bool(false)) {
            return;
        }
        let reaches = |window: &Value| window.as_f64() >= self.number("n_ctx");
        if let Some(window) = self.get("sliding_window").filter(|window| !reaches(window)) {
            let found = shown_value(window);
            self.refuse(format!(
                "`sliding_window` is {found}, which is not supported; supported: null, or all of `max_position_embeddings`"
            ));
        }
    }
}

/// Whether each layer is local.
fn expanded(patterns: &Value) -> Option<Vec<bool>> {
    /// More layers than any network has.
    const MOST: usize = 10_000;
    let mut all = Vec::new();
    for pattern in patterns.as_array()? {
        let [kinds, times] = &pattern.as_array()?[..] else {
            return None;
        };
        let kinds = kinds.as_array()?.iter().map(|kind| match kind.as_str()? {
            "global" => Some(false),
            "local" => Some(true),
            _ => None,
        });
        let kinds = kinds.collect::<Option<Vec<bool>>>()?;
        let times = usize::try_from(times.as_u64()?).ok()?;
        if all.len() + kinds.len().checked_mul(times)? > MOST {
            return None;
        }
        all.extend(kinds.repeat(times));
    }
    Some(all)
}

/// A value as a message shows it, in one short line.
fn shown_value(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
