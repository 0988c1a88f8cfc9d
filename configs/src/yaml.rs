//! YAML as the tables that a run file is read from, with the places of all keys. Scalars mean what
//! PyYAML and Pydantic make of them together: `1e-3` is a number, `yes` a flag, and null is a key
//! that is left out.

use std::{borrow::Cow, collections::BTreeMap};

use granit_parser::{Event, Parser, ScalarStyle, Span, Tag};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::faults::Note;

/// Nodes of a file, those of aliases counted wherever they stand: an alias of aliases makes
/// millions of a few lines.
const MOST_NODES: usize = 100_000;

/// Bytes of all scalars of a file, those of aliases and anchors counted wherever they are copied
/// to: a text of a megabyte has an alias of three bytes.
const MOST_BYTES: usize = 4 << 20;

/// Lists and maps inside of each other.
const DEEPEST: usize = 64;

/// A value, and the offset of its first byte.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Of its first byte.
    pub offset: usize,
    /// Its value.
    pub value: Value,
}

/// The value of a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Nothing: as a key that is left out.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// As TOML writes it.
    Number(String),
    /// A string.
    Text(String),
    /// Values in their order.
    List(Vec<Node>),
    /// Keys and their values, in their order.
    Map(Vec<Entry>),
}

/// A key of a map and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its name.
    pub key: String,
    /// Of the key.
    pub offset: usize,
    /// Its value.
    pub node: Node,
}

/// Reads a text of one document, which has to be a map.
pub fn parse(text: &str) -> Result<Vec<Entry>, Note> {
    let mut reader = Reader::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| Note {
            offset: error.marker().byte_offset().unwrap_or(text.len()),
            message: format!("not YAML: {}", error.info().replace(char::is_control, " ")),
        })?;
        reader.take(event, span)?;
    }
    match reader.root {
        Some(Node {
            value: Value::Map(entries),
            ..
        }) => Ok(entries),
        other => Err(Note {
            offset: other.map_or(0, |node| node.offset),
            message: "expected keys and their values, as in `steps: 100`, found none".to_owned(),
        }),
    }
}

/// The entries as a table; a key of null is left out.
pub fn table(entries: &[Entry]) -> DeTable<'_> {
    let entries = entries.iter().filter_map(|entry| {
        let value = entry.node.to_toml()?;
        let at = entry.offset..entry.offset;
        Some((Spanned::new(at, Cow::Borrowed(&*entry.key)), value))
    });
    entries.collect()
}

impl Node {
    /// The value in TOML, which has no null.
    fn to_toml(&self) -> Option<Spanned<DeValue<'_>>> {
        let value = match &self.value {
            Value::Null => return None,
            Value::Flag(flag) => DeValue::Boolean(*flag),
            Value::Number(digits) => match DeValue::parse(digits) {
                Ok(number) => number.into_inner(),
                Err(_) => DeValue::String(Cow::Borrowed(digits)),
            },
            Value::Text(text) => DeValue::String(Cow::Borrowed(text)),
            Value::List(items) => DeValue::Array(items.iter().filter_map(Self::to_toml).collect()),
            Value::Map(entries) => DeValue::Table(table(entries)),
        };
        Some(Spanned::new(self.offset..self.offset, value))
    }

    /// The node that a value of TOML is, placed at `offset` where it has no place of its own.
    pub fn of_toml(value: &DeValue<'_>, offset: usize) -> Self {
        let inner = |item: &Spanned<DeValue<'_>>| Self::of_toml(item.get_ref(), item.span().start);
        let value = match value {
            DeValue::Boolean(flag) => Value::Flag(*flag),
            DeValue::Integer(digits) => Value::Number(digits.to_string()),
            DeValue::Float(digits) => Value::Number(digits.to_string()),
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Datetime(date) => Value::Text(date.to_string()),
            DeValue::Array(items) => Value::List(items.iter().map(inner).collect()),
            DeValue::Table(table) => {
                let entries = table.iter().map(|(key, item)| Entry {
                    key: key.get_ref().to_string(),
                    offset: key.span().start,
                    node: inner(item),
                });
                Value::Map(entries.collect())
            }
        };
        Self { offset, value }
    }

    /// The value in JSON.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match &self.value {
            Value::Null => Json::Null,
            Value::Flag(flag) => (*flag).into(),
            Value::Number(digits) => serde_json::from_str(digits).unwrap_or(Json::Null),
            Value::Text(text) => text.as_str().into(),
            Value::List(items) => items.iter().map(Self::to_json).collect(),
            Value::Map(entries) => {
                let entries = entries.iter();
                entries
                    .map(|entry| (entry.key.clone(), entry.node.to_json()))
                    .collect()
            }
        }
    }
}

/// A list or a map that is not closed yet.
struct Open {
    /// The node as it is so far.
    whole: Whole,
    anchor: usize,
    /// A key that waits for its value.
    key: Option<(String, usize)>,
}

/// A node, how many nodes it is, how many bytes its scalars have, and how deep.
#[derive(Clone)]
struct Whole {
    node: Node,
    nodes: usize,
    bytes: usize,
    depth: usize,
}

#[derive(Default)]
struct Reader {
    open: Vec<Open>,
    anchored: BTreeMap<usize, Whole>,
    root: Option<Node>,
    nodes: usize,
    bytes: usize,
}

impl Reader {
    fn take(&mut self, event: Event<'_>, span: Span) -> Result<(), Note> {
        let offset = span.byte_range().map_or(0, |range| range.start);
        let note = |message: &str| Note {
            offset,
            message: format!("not YAML that is read here: {message}"),
        };
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let tag = known_tag(tag.as_deref()).map_err(|tag| note(&tag))?;
                let bytes = text.len();
                let value = match (style, tag) {
                    (ScalarStyle::Plain, None) => plain(&text),
                    _ => Value::Text(text.into_owned()),
                };
                let node = Node { offset, value };
                let whole = Whole {
                    node,
                    nodes: 1,
                    bytes,
                    depth: 0,
                };
                self.close(whole, (1, bytes), anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                known_tag(tag.as_deref()).map_err(|tag| note(&tag))?;
                self.open(offset, anchor, Value::List(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                known_tag(tag.as_deref()).map_err(|tag| note(&tag))?;
                self.open(offset, anchor, Value::Map(Vec::new()))
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                None => Ok(()),
                Some(done) => self.close(done.whole, (1, 0), done.anchor),
            },
            Event::Alias(anchor) => match self.anchored.get(&anchor) {
                // Counted before it is copied.
                Some(whole) => {
                    let (nodes, bytes) = (whole.nodes, whole.bytes);
                    self.count(nodes, bytes, offset)?;
                    match self.anchored.get(&anchor).cloned() {
                        Some(whole) => self.close(whole, (0, 0), 0),
                        None => Ok(()),
                    }
                }
                None => Err(note("an alias of what it stands in")),
            },
            Event::DocumentStart(..) if self.root.is_some() => {
                Err(note("a second document; expected one"))
            }
            _ => Ok(()),
        }
    }

    fn open(&mut self, offset: usize, anchor: usize, value: Value) -> Result<(), Note> {
        if self.open.len() >= DEEPEST {
            return Err(too_deep(offset));
        }
        self.open.push(Open {
            whole: Whole {
                node: Node { offset, value },
                nodes: 1,
                bytes: 0,
                depth: 1,
            },
            anchor,
            key: None,
        });
        Ok(())
    }

    /// Counts what is held of the file.
    fn count(&mut self, nodes: usize, bytes: usize, offset: usize) -> Result<(), Note> {
        self.nodes = self.nodes.saturating_add(nodes);
        self.bytes = self.bytes.saturating_add(bytes);
        let (most, what) = match (self.nodes > MOST_NODES, self.bytes > MOST_BYTES) {
            (true, _) => (MOST_NODES, "values"),
            (_, true) => (MOST_BYTES, "bytes of text"),
            _ => return Ok(()),
        };
        Err(Note {
            offset,
            message: format!(
                "expected at most {most} {what}, found more; aliases count wherever they stand"
            ),
        })
    }

    /// Puts a finished node where it belongs.
    ///
    /// - `new`: nodes of it, and bytes of their scalars, that are not counted yet
    fn close(&mut self, whole: Whole, new: (usize, usize), anchor: usize) -> Result<(), Note> {
        let offset = whole.node.offset;
        self.count(new.0, new.1, offset)?;
        if self.open.len() + whole.depth > DEEPEST {
            return Err(too_deep(offset));
        }
        if anchor != 0 {
            self.count(whole.nodes, whole.bytes, offset)?;
            self.anchored.insert(anchor, whole.clone());
        }
        let Some(Open {
            whole: parent, key, ..
        }) = self.open.last_mut()
        else {
            self.root = Some(whole.node);
            return Ok(());
        };
        parent.nodes += whole.nodes;
        parent.bytes += whole.bytes;
        parent.depth = parent.depth.max(whole.depth + 1);
        match (&mut parent.node.value, key.take()) {
            (Value::Map(entries), Some((key, offset))) => {
                let node = whole.node;
                entries.push(Entry { key, offset, node });
            }
            (Value::Map(entries), None) => {
                let name = key_of(whole.node)?;
                if entries.iter().any(|entry| entry.key == name) {
                    return Err(Note {
                        offset,
                        message: format!("found the key `{}` twice", name.escape_debug()),
                    });
                }
                *key = Some((name, offset));
            }
            (Value::List(items), _) => items.push(whole.node),
            // Nothing else is opened.
            _ => {}
        }
        Ok(())
    }
}

fn too_deep(offset: usize) -> Note {
    Note {
        offset,
        message: format!("expected at most {DEEPEST} lists and maps inside of each other"),
    }
}

/// The word that a node is as a key.
fn key_of(node: Node) -> Result<String, Note> {
    let offset = node.offset;
    let note = |message: &str| Note {
        offset,
        message: message.to_owned(),
    };
    match node.value {
        Value::Text(key) if key == "<<" => Err(note("merge keys are not read; write the keys out")),
        Value::Text(key) | Value::Number(key) => Ok(key),
        Value::Flag(flag) => Ok(flag.to_string()),
        Value::Null => Ok("null".to_owned()),
        Value::List(_) | Value::Map(_) => {
            Err(note("expected a word for a key, found a list or a map"))
        }
    }
}

/// The effect of a tag on a scalar: a string, or none.
fn known_tag(tag: Option<&Tag>) -> Result<Option<()>, String> {
    match tag {
        None => Ok(None),
        Some(tag) if tag.is_yaml_core_schema_tag("str") => Ok(Some(())),
        Some(tag) => Err(format!(
            "the tag `{}`; leave it out",
            tag.original().escape_debug()
        )),
    }
}

/// The value of an unquoted scalar.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        ".inf" | ".Inf" | ".INF" | "+.inf" => return Value::Number("inf".to_owned()),
        "-.inf" | "-.Inf" | "-.INF" => return Value::Number("-inf".to_owned()),
        ".nan" | ".NaN" | ".NAN" => return Value::Number("nan".to_owned()),
        _ => {}
    }
    let words = [
        ("true", true),
        ("yes", true),
        ("on", true),
        ("false", false),
        ("no", false),
        ("off", false),
    ];
    let in_case = |word: &str| {
        let (first, rest) = text.split_at(text.len().min(1));
        text == word
            || text == word.to_uppercase()
            || word.starts_with(&first.to_lowercase()) && word.get(1..) == Some(rest)
    };
    if text.is_ascii()
        && let Some((_, flag)) = words.iter().find(|(word, _)| in_case(word))
    {
        return Value::Flag(*flag);
    }
    number(text).map_or_else(|| Value::Text(text.to_owned()), Value::Number)
}

/// The number that a scalar without quotes is, as TOML writes it.
fn number(text: &str) -> Option<String> {
    let first = text.trim_start_matches(['+', '-']).chars().next()?;
    if !first.is_ascii_digit() && first != '.' || text.contains("__") || text.ends_with('_') {
        return None;
    }
    let digits = text.replace('_', "");
    if let Ok(whole) = digits.parse::<i64>() {
        return Some(whole.to_string());
    }
    let of_number = |c: char| c.is_ascii_digit() || ".eE+-".contains(c);
    let number: f64 = digits
        .chars()
        .all(of_number)
        .then_some(digits)?
        .parse()
        .ok()?;
    // As TOML has it, with a point or an exponent.
    Some(format!("{number:?}"))
}

#[cfg(test)]
mod tests;
