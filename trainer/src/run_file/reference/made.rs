//! A table of a run file while it is made of another one.

use std::path::Path;

use toml::{
    Spanned,
    de::{DeString, DeValue},
};

use spd_configs::{
    reader::Table,
    values::Kind,
    yaml::{Entry, Node, Value},
};

/// A table of a run file; each key stands where the reference's key stood that it is made of.
#[derive(Default)]
pub struct Made(Vec<Entry>);

impl Made {
    pub(crate) fn into_entries(self) -> Vec<Entry> {
        self.0
    }

    /// Puts the keys of another one behind its own.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// One key of it.
    pub(super) fn only(mut self, key: &str) -> Self {
        self.0.retain(|entry| entry.key == key);
        self
    }

    pub(crate) fn put(&mut self, key: &str, offset: usize, value: Value) {
        let node = Node { offset, value };
        let key = key.to_owned();
        self.0.push(Entry { key, offset, node });
    }

    pub(crate) fn text(&mut self, key: &str, offset: usize, text: &str) {
        self.put(key, offset, Value::Text(text.to_owned()));
    }

    pub(crate) fn table(&mut self, key: &str, offset: usize, table: Self) {
        self.put(key, offset, Value::Map(table.0));
    }

    pub(crate) fn rows(&mut self, key: &str, offset: usize, rows: Vec<Self>) {
        let rows = rows.into_iter().map(|row| Node {
            offset: row.0.first().map_or(offset, |entry| entry.offset),
            value: Value::Map(row.0),
        });
        self.put(key, offset, Value::List(rows.collect()));
    }

    /// The value of a key under our name for it, if it is given; the reader of run files checks it.
    pub(crate) fn carry(&mut self, table: &mut Table<'_>, theirs: &'static str, ours: &str) {
        if let Some((offset, value)) = given(table, theirs) {
            self.put(ours, offset, value);
        }
    }

    /// The same, or else another value at a place.
    pub(crate) fn carry_or(
        &mut self,
        table: &mut Table<'_>,
        theirs: &'static str,
        ours: &str,
        other: (usize, Value),
    ) {
        let (offset, value) = given(table, theirs).unwrap_or(other);
        self.put(ours, offset, value);
    }

    /// The same for a required key.
    pub(crate) fn need(
        &mut self,
        table: &mut Table<'_>,
        (theirs, expected): (&'static str, &'static str),
        ours: &str,
    ) {
        if let Some(node) = table.need(theirs, Anything(expected)) {
            self.put(ours, table.place(theirs), node.value);
        }
    }
}

fn given(table: &mut Table<'_>, key: &'static str) -> Option<(usize, Value)> {
    let (offset, value) = table.raw(key)?;
    Some((offset, Node::of_toml(value, offset).value))
}

/// Any value; what it has to be is said only where it is missing.
pub(super) struct Anything(pub(super) &'static str);

impl Kind for Anything {
    type Value = Node;

    fn expected(&self) -> String {
        self.0.to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<Node, String> {
        Ok(Node::of_toml(value, 0))
    }
}

/// A table of at least `least` names, where something holds of each name with its value.
pub(super) struct ByName<F> {
    pub(super) least: usize,
    pub(super) expected: String,
    pub(super) holds: F,
}

impl<F: Fn(&str, &DeValue<'_>) -> bool> Kind for ByName<F> {
    type Value = Vec<(String, Node)>;

    fn expected(&self) -> String {
        self.expected.clone()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        let table = value.as_table().filter(|table| table.len() >= self.least);
        let read = |(name, value): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>)| {
            let (offset, name, value) = (name.span().start, name.get_ref(), value.get_ref());
            (self.holds)(name, value).then(|| (name.to_string(), Node::of_toml(value, offset)))
        };
        table
            .and_then(|table| table.iter().map(read).collect())
            .ok_or_else(|| self.expected())
    }
}

/// The name of the directory of a run: made of any name, or else of that of its file.
pub(super) fn named_after(name: Option<String>, path: &Path) -> String {
    let name = name.unwrap_or_else(|| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        stem.strip_suffix("_config").unwrap_or(&stem).to_owned()
    });
    let letter = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "._-".contains(c) => c,
        _ => '-',
    };
    let name: String = name.chars().map(letter).collect();
    let name = name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if name.is_empty() {
        "reference".to_owned()
    } else {
        name.to_owned()
    }
}
