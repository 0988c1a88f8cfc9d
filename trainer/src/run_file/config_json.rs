//! A `config.json` of Hugging Face on its way to keys of `[target]`: what is said, and what is not
//! supported.

use std::{path::PathBuf, str::FromStr};

use serde_json::{Map, Value};
use spd_files::foreign::cut;

/// A `config.json` on its way to keys of `[target]`.
pub(crate) struct ConfigJson {
    pub(crate) path: PathBuf,
    object: Map<String, Value>,
    pub(crate) said: Vec<Said>,
    /// Unsupported and missing keys, a line each.
    pub(crate) faults: Vec<String>,
}

/// A key of `[target]`, as the file says it.
pub(crate) struct Said {
    pub(crate) key: &'static str,
    /// TOML.
    pub(crate) value: String,
    /// The key of the file that says it.
    pub(crate) by: &'static str,
}

impl ConfigJson {
    pub(crate) fn new(path: PathBuf, object: Map<String, Value>) -> Self {
        Self {
            path,
            object,
            said: Vec::new(),
            faults: Vec::new(),
        }
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
                Some(value @ (Value::Number(_) | Value::Bool(_))) => {
                    let value = value.to_string();
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

    /// Rows are no longer here than a window is wide, so that no query has a key beyond it: `key`,
    /// the number of positions, is the window's where that is smaller.
    pub(crate) fn within_window(&mut self, key: &'static str) {
        const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
        let kinds = self.get("layer_types").cloned();
        let of = |known: &[&str]| {
            kinds.as_ref().is_none_or(|kinds| {
                let is_known =
                    |kind: &Value| kind.as_str().is_some_and(|kind| known.contains(&kind));
                kinds
                    .as_array()
                    .is_some_and(|kinds| kinds.iter().all(is_known))
            })
        };
        if !of(&KINDS) {
            let found = kinds.as_ref().map(shown_value).unwrap_or_default();
            return self.refuse(format!(
                "`layer_types` is {found}, which is not supported; supported: \"full_attention\", \"sliding_attention\""
            ));
        }
        if self.get("use_sliding_window") == Some(&Value::Bool(false)) {
            return;
        }
        let Some(window) = self.get("sliding_window") else {
            if !of(&KINDS[..1]) {
                self.refuse("missing key `sliding_window`, which `layer_types` asks for");
            }
            return;
        };
        let Some(window) = window.as_u64().filter(|window| *window > 0) else {
            let found = shown_value(window);
            return self.refuse(format!(
                "`sliding_window`: expected null or a number of positions, found {found}"
            ));
        };
        if self.number::<u64>(key).is_some_and(|most| most > window) {
            self.said.retain(|said| said.key != key);
            self.say(key, &window.to_string(), "sliding_window");
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
pub(crate) fn shown_value(value: &Value) -> String {
    cut(value.to_string(), 60)
}
