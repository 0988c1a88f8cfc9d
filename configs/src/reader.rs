//! One table of a file: keys are taken by name, faults are collected, and what nobody took is
//! unknown.

use std::collections::BTreeMap;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    faults::{Note, about},
    values::{Kind, brief, found},
};

/// A table being read. A method that returns `None` has noted a fault.
pub struct Table<'t> {
    /// Dotted, as in an override: `target.train`, `loss.0`; empty for the file itself.
    pub path: String,
    offset: usize,
    entries: BTreeMap<&'t str, Entry<'t>>,
    asked: Vec<&'static str>,
    /// Keys that are left out, and are read only where they are there.
    heard_of: Vec<&'static str>,
    /// Keys that are left out and have to be there, each with what is said of it.
    missing: Vec<(&'static str, String)>,
    notes: Vec<Note>,
    keys_known: bool,
}

/// The place of a key, and its value.
type Entry<'t> = (usize, &'t Spanned<DeValue<'t>>);

/// A struct, or a variant of an enum, of variables with the names of its fields, each an option:
/// `None` if one of them is, of which a fault is noted.
///
/// ```
/// struct Pair { left: u8, right: u8 }
/// let (left, right) = (Some(1), None);
/// assert!(spd_configs::all_read! { Pair: left, right }.is_none());
/// ```
#[macro_export]
macro_rules! all_read {
    ($($Struct:ident)::+: $($field:ident),+) => {
        match ($($field,)+) {
            ($(Some($field),)+) => Some($($Struct)::+ { $($field),+ }),
            _ => None,
        }
    };
}

/// Reads a whole file; `Err` holds every fault, in no order.
pub fn read_file<T>(
    file: &DeTable<'_>,
    read: impl FnOnce(&mut Table<'_>) -> Option<T>,
) -> Result<T, Vec<Note>> {
    let mut table = Table::new(String::new(), 0, Some(file));
    let value = read(&mut table);
    let notes = table.finish();
    match value {
        Some(value) if notes.is_empty() => Ok(value),
        _ => Err(notes),
    }
}

impl<'t> Table<'t> {
    fn new(path: String, offset: usize, table: Option<&'t DeTable<'t>>) -> Self {
        let entries = table.into_iter().flat_map(DeTable::iter);
        let entries = entries.map(|(key, value)| (&**key.get_ref(), (key.span().start, value)));
        Self {
            path,
            offset,
            entries: entries.collect(),
            asked: Vec::new(),
            heard_of: Vec::new(),
            missing: Vec::new(),
            notes: Vec::new(),
            keys_known: true,
        }
    }

    /// The value of a key that must be there.
    pub fn need<K: Kind>(&mut self, key: &'static str, kind: K) -> Option<K::Value> {
        match self.take(key) {
            Some(entry) => self.read(key, entry, &kind),
            None => self.lack(key, &kind.expected()),
        }
    }

    /// The value of a key that may be left out.
    pub fn or<K: Kind>(
        &mut self,
        key: &'static str,
        kind: K,
        default: K::Value,
    ) -> Option<K::Value> {
        Some(self.maybe(key, kind)?.unwrap_or(default))
    }

    /// The value of a key that has no default, `Some(None)` where it is left out.
    pub fn maybe<K: Kind>(&mut self, key: &'static str, kind: K) -> Option<Option<K::Value>> {
        match self.take(key) {
            Some(entry) => self.read(key, entry, &kind).map(Some),
            None => Some(None),
        }
    }

    /// A word that decides which other keys there are. Without it, no key of the table is called
    /// unknown.
    pub fn need_kind<K: Kind>(&mut self, key: &'static str, kind: K) -> Option<K::Value> {
        let word = self.need(key, kind);
        self.keys_known &= word.is_some();
        word
    }

    /// A table that must be there.
    pub fn table<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<T> {
        match self.take(key) {
            Some(entry) => self.read_table(key, "a table", entry, read),
            None => {
                let message = format!("missing table [{}]", self.child(key));
                self.missing.push((key, message));
                None
            }
        }
    }

    /// A table whose keys all have defaults: left out, it is read as an empty one.
    pub fn table_or_empty<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<T> {
        match self.take(key) {
            Some(entry) => self.read_table(key, "a table", entry, read),
            None => self.enter(Table::new(self.child(key), self.offset, None), read),
        }
    }

    /// A table that has no default, `Some(None)` where it is left out.
    pub fn maybe_table<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<Option<T>> {
        match self.take(key) {
            Some(entry) => self.read_table(key, "a table", entry, read).map(Some),
            None => Some(None),
        }
    }

    /// A table that may be left out, and whose keys all have defaults; `such` shows one.
    pub fn maybe_table_such_as<T>(
        &mut self,
        key: &'static str,
        such: &str,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<Option<T>> {
        let Some(entry) = self.take(key) else {
            return Some(None);
        };
        let expected = format!("a table such as {such}, or {{}} for its usual settings");
        self.read_table(key, &expected, entry, read).map(Some)
    }

    /// A list of at least one table.
    pub fn rows<T>(
        &mut self,
        key: &'static str,
        read: impl FnMut(&mut Table<'t>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(entry) = self.take(key) else {
            return self.lack(key, &self.list(key));
        };
        let rows = self.read_rows(key, entry, read)?;
        if rows.is_empty() {
            return self.refuse(key, "expected at least one table, found []");
        }
        Some(rows)
    }

    /// A list of tables, empty where it is left out.
    pub fn rows_or_none<T>(
        &mut self,
        key: &'static str,
        read: impl FnMut(&mut Table<'t>) -> Option<T>,
    ) -> Option<Vec<T>> {
        match self.take(key) {
            Some(entry) => self.read_rows(key, entry, read),
            None => Some(Vec::new()),
        }
    }

    /// The value of a key unchecked, and the place of the key; `None` if it is absent.
    pub fn raw(&mut self, key: &'static str) -> Option<(usize, &'t DeValue<'t>)> {
        let (offset, value) = self.take(key)?;
        Some((offset, value.get_ref()))
    }

    /// Calls no key of this table unknown: what it is, is refused as a whole or does not matter.
    pub fn pass_over(&mut self) {
        self.keys_known = false;
    }

    /// The place of a key or, where it is left out, of the table.
    pub fn place(&self, key: &str) -> usize {
        self.entries
            .get(key)
            .map_or(self.offset, |(offset, _)| *offset)
    }

    /// Whether the key is there, whatever it holds. A misspelt key may mean one that is not.
    pub fn has(&mut self, key: &'static str) -> bool {
        let is_there = self.entries.contains_key(key);
        if !is_there {
            self.heard_of.push(key);
        }
        is_there
    }

    /// Whether the key is there and holds a table.
    pub fn has_table(&self, key: &str) -> bool {
        self.entries
            .get(key)
            .is_some_and(|(_, value)| value.get_ref().is_table())
    }

    /// Whether the key is there and holds a list.
    pub fn has_list(&self, key: &str) -> bool {
        self.entries
            .get(key)
            .is_some_and(|(_, value)| value.get_ref().is_array())
    }

    /// Refuses a number that does not divide another one, `of`, where both were read.
    pub fn divides(
        &mut self,
        key: &'static str,
        number: Option<usize>,
        (of, whole): (&str, Option<usize>),
    ) {
        if let (Some(number), Some(whole)) = (number, whole)
            && !whole.is_multiple_of(number)
        {
            let message = format!("expected a divisor of {of} = {whole}, found {number}");
            self.refuse::<()>(key, message);
        }
    }

    /// Refuses a number that is not below another one, where both were read.
    pub fn in_order(
        &mut self,
        [low, high]: [&'static str; 2],
        numbers: (Option<f64>, Option<f64>),
    ) {
        if let (Some(below), Some(above)) = numbers
            && below >= above
        {
            let key = if self.has(high) { high } else { low };
            let found = format!("{} and {}", brief(below), brief(above));
            let message = format!("expected {low} below {high}, found {found}");
            self.refuse::<()>(key, message);
        }
    }

    /// Refuses a name that a row before has too; `seen` are those of the rows before.
    ///
    /// - `then`: what could be done, behind a semicolon
    pub fn once(&mut self, key: &str, name: &str, seen: &mut Vec<String>, then: &str) {
        if seen.iter().any(|known| known == name) {
            self.refuse::<()>(key, format!("found {name:?} twice{then}"));
        }
        seen.push(name.to_owned());
    }

    /// Notes a fault of a key, at the key or, where it is left out, at the table.
    pub fn refuse<T>(&mut self, key: &str, message: impl AsRef<str>) -> Option<T> {
        let offset = self.place(key);
        let message = about(&self.path, key) + message.as_ref();
        self.notes.push(Note { offset, message });
        None
    }

    /// Notes a fault of the table as a whole.
    pub fn refuse_table<T>(&mut self, message: impl AsRef<str>) -> Option<T> {
        let message = format!("[{}]: {}", self.path, message.as_ref());
        self.notes.push(Note {
            offset: self.offset,
            message,
        });
        None
    }

    fn take(&mut self, key: &'static str) -> Option<Entry<'t>> {
        self.asked.push(key);
        self.entries.get(key).copied()
    }

    fn read<K: Kind>(&mut self, key: &str, (_, value): Entry<'t>, kind: &K) -> Option<K::Value> {
        match kind.read(value.get_ref()) {
            Ok(value) => Some(value),
            Err(expected) => self.unexpected(key, &expected, value.get_ref()),
        }
    }

    fn read_table<T>(
        &mut self,
        key: &str,
        expected: &str,
        (_, value): Entry<'t>,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<T> {
        match value.get_ref() {
            DeValue::Table(table) => {
                let offset = value.span().start;
                self.enter(Table::new(self.child(key), offset, Some(table)), read)
            }
            other => self.unexpected(key, expected, other),
        }
    }

    fn read_rows<T>(
        &mut self,
        key: &str,
        (_, value): Entry<'t>,
        mut read: impl FnMut(&mut Table<'t>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let DeValue::Array(rows) = value.get_ref() else {
            return self.unexpected(key, &self.list(key), value.get_ref());
        };
        let mut values = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let DeValue::Table(table) = row.get_ref() else {
                return self.unexpected(key, &self.list(key), value.get_ref());
            };
            let path = format!("{}.{index}", self.child(key));
            values.push(self.enter(Table::new(path, row.span().start, Some(table)), &mut read));
        }
        values.into_iter().collect()
    }

    fn enter<T>(
        &mut self,
        mut table: Table<'t>,
        read: impl FnOnce(&mut Table<'t>) -> Option<T>,
    ) -> Option<T> {
        let value = read(&mut table);
        self.notes.extend(table.finish());
        value
    }

    fn unexpected<T>(&mut self, key: &str, expected: &str, value: &DeValue<'_>) -> Option<T> {
        self.refuse(key, format!("expected {expected}, found {}", found(value)))
    }

    fn lack<T>(&mut self, key: &'static str, expected: &str) -> Option<T> {
        let message = format!("missing key `{key}`{}; expected {expected}", self.within());
        self.missing.push((key, message));
        None
    }

    fn child(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    fn list(&self, key: &str) -> String {
        format!("a list of tables [[{}]]", self.child(key))
    }

    fn within(&self) -> String {
        if self.path.is_empty() {
            String::new()
        } else {
            format!(" in [{}]", self.path)
        }
    }

    /// All faults of the table, those of keys that nobody took included.
    fn finish(mut self) -> Vec<Note> {
        let unknown = self
            .entries
            .iter()
            .filter(|(key, _)| !self.asked.contains(key));
        for (key, (offset, _)) in unknown.filter(|_| self.keys_known) {
            let known = [&self.asked[..], &self.heard_of].concat();
            let advice = match nearest(key, &known) {
                Some(near) => {
                    // A misspelled key is one fault, not an unknown key and a missing one.
                    self.missing.retain(|(key, _)| *key != near);
                    format!("did you mean `{near}`?")
                }
                None => format!("known keys: `{}`", self.asked.join("`, `")),
            };
            let message = format!(
                "unknown key `{}`{}; {advice}",
                key.escape_debug(),
                self.within()
            );
            self.notes.push(Note {
                offset: *offset,
                message,
            });
        }
        let missing = self.missing.into_iter();
        self.notes.extend(missing.map(|(_, message)| Note {
            offset: self.offset,
            message,
        }));
        self.notes
    }
}

/// The key that `key` was probably meant to be.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    alike(key, known).first().copied()
}

/// The known words that resemble a word, most alike first.
pub fn alike<'k>(word: &str, known: &[&'k str]) -> Vec<&'k str> {
    // Above this, an abbreviation or a slip; below, another word.
    const ALIKE: f64 = 0.75;
    let word = word.to_lowercase();
    let mut found: Vec<(f64, &str)> = known
        .iter()
        .map(|known| (strsim::jaro_winkler(&word, &known.to_lowercase()), *known))
        .filter(|(likeness, _)| *likeness > ALIKE)
        .collect();
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    found.into_iter().map(|(_, known)| known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_key_and_another_word_does_not() {
        let known = ["steps", "batch_size", "lr", "clip_components", "C"];
        for (written, meant) in [
            ("lr_shedule", Some("lr")),
            ("step", Some("steps")),
            ("stpes", Some("steps")),
            ("batchsize", Some("batch_size")),
            ("clip", Some("clip_components")),
            ("c", Some("C")),
            ("momentum", None),
            ("", None),
        ] {
            assert_eq!(nearest(written, &known), meant, "{written}");
        }
    }
}
