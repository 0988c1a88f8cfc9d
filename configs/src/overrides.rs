//! Overrides: `KEY=VALUE` replaces one key of a run file for one invocation.

use std::borrow::Cow;

use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

use crate::{
    faults::{Note, Source},
    values::found,
};

/// Puts the overrides of `source` into the table of its file, and notes those that have no place
/// there.
///
/// A key is dotted, rows of a list are numbered from 0, or named by their `name`, `kind` or
/// `pattern`: `train.steps=5`, `loss.0.coeff=0.1`, `loss.faithfulness.coeff=1e5`. A value is TOML
/// or, where it is not, a string. Tables on the way are made; whether their keys are known is for
/// the reader to say.
pub fn apply<'s>(source: &Source<'s>, file: DeTable<'s>) -> (DeTable<'s>, Vec<Note>) {
    let mut root = Spanned::new(0..0, DeValue::Table(file));
    let mut notes = Vec::new();
    for (offset, key, value) in source.overrides() {
        let steps: Vec<_> = key.split('.').collect();
        let put = match value {
            Some(value) if steps.iter().all(|step| !step.is_empty()) => Override {
                key,
                value: parse(value, offset),
                offset,
            }
            .put(&mut root, &steps),
            _ => Err("expected KEY=VALUE, such as train.steps=100".to_owned()),
        };
        notes.extend(put.err().map(|message| Note { offset, message }));
    }
    match root.into_inner() {
        DeValue::Table(file) => (file, notes),
        _ => (DeTable::new(), notes),
    }
}

struct Override<'s> {
    key: &'s str,
    value: DeValue<'s>,
    offset: usize,
}

impl<'s> Override<'s> {
    /// Walks down `steps` from `at`, and leaves the value there.
    fn put(self, at: &mut Spanned<DeValue<'s>>, steps: &[&'s str]) -> Result<(), String> {
        let Some((step, below)) = steps.split_first() else {
            *at = self.here(self.value.clone());
            return Ok(());
        };
        match at.get_mut() {
            DeValue::Table(table) => {
                if below.is_empty() {
                    // A map keeps its old key, and with it the place where it was said first.
                    table.remove(*step);
                }
                let child = table
                    .entry(self.here(Cow::Borrowed(*step)))
                    .or_insert(self.here(DeValue::Table(DeTable::new())));
                self.put(child, below)
            }
            DeValue::Array(rows) => {
                let named = named(rows, step);
                let row = step.parse().ok().or(match named[..] {
                    [row] => Some(row),
                    _ => None,
                });
                let count = rows.len();
                match row.and_then(|row: usize| rows.get_mut(row)) {
                    Some(row) => self.put(row, below),
                    None if named.len() > 1 => Err(format!(
                        "`{}` has {} rows of the name `{step}`: {}; give the number of one",
                        self.above(steps),
                        named.len(),
                        {
                            let numbers: Vec<_> = named.iter().map(usize::to_string).collect();
                            numbers.join(", ")
                        }
                    )),
                    None => Err(format!(
                        "`{}` has {count} row{}, numbered from 0{}; found no `{}`",
                        self.above(steps),
                        if count == 1 { "" } else { "s" },
                        named_too(rows),
                        step.escape_debug()
                    )),
                }
            }
            other => Err(format!(
                "`{}` is {}, which has no key `{}`",
                self.above(steps),
                found(other),
                step.escape_debug()
            )),
        }
    }

    fn here<T>(&self, value: T) -> Spanned<T> {
        Spanned::new(self.offset..self.offset, value)
    }

    /// The part of the key that is above `steps`.
    fn above(&self, steps: &[&str]) -> String {
        let all: Vec<_> = self.key.split('.').collect();
        all[..all.len() - steps.len()]
            .join(".")
            .escape_debug()
            .to_string()
    }
}

/// The name of a row: its `name`, or else its `kind`, or its `pattern`.
fn name_of<'r>(row: &'r Spanned<DeValue<'_>>) -> Option<&'r str> {
    let row = row.get_ref().as_table()?;
    let mut keys = ["name", "kind", "pattern"].iter();
    keys.find_map(|key| row.get(*key)?.get_ref().as_str())
}

/// The rows that have a name.
fn named(rows: &DeArray<'_>, name: &str) -> Vec<usize> {
    let rows = rows.iter().enumerate();
    let rows = rows.filter(|(_, row)| name_of(row) == Some(name));
    rows.map(|(index, _)| index).collect()
}

/// The names of rows, as part of a message about an unknown one.
fn named_too(rows: &DeArray<'_>) -> String {
    let names = rows.iter().filter_map(name_of);
    let names: Vec<_> = names
        .map(|name| format!("`{}`", name.escape_debug()))
        .collect();
    if names.is_empty() {
        return String::new();
    }
    format!(" or named {}", names.join(", "))
}

fn parse(text: &str, offset: usize) -> DeValue<'_> {
    match DeValue::parse(text) {
        Ok(value) => move_to(value.into_inner(), offset),
        Err(_) => DeValue::String(Cow::Borrowed(text)),
    }
}

/// The value with everything inside it placed at `offset`.
fn move_to(value: DeValue<'_>, offset: usize) -> DeValue<'_> {
    let moved =
        |value: Spanned<_>| Spanned::new(offset..offset, move_to(value.into_inner(), offset));
    match value {
        DeValue::Array(items) => {
            DeValue::Array(items.into_iter().map(moved).collect::<DeArray<'_>>())
        }
        DeValue::Table(table) => {
            let key = |key: Spanned<_>| Spanned::new(offset..offset, key.into_inner());
            DeValue::Table(
                table
                    .into_iter()
                    .map(|(k, value)| (key(k), moved(value)))
                    .collect(),
            )
        }
        scalar => scalar,
    }
}
