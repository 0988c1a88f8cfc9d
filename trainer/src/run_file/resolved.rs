//! A run with every default filled in: written as a run file, and compared key by key.

use serde::Serializer;
use toml::Value;

use spd_configs::Tracker;

use crate::run_file::{Recompute, Run};

impl Run {
    /// The run as a run file of its own, every default filled in.
    ///
    /// # Panics
    ///
    /// When a path is not UTF-8, which no file can bring about.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("what was read from TOML can be written as TOML")
    }

    /// Differences, key by key: `train.steps: 10000 here, 500 there`. Empty when the runs are
    /// equal.
    ///
    /// # Panics
    ///
    /// As [`Run::to_toml`].
    pub fn differences(&self, there: &Self) -> Vec<String> {
        let [here, there] = [self, there].map(|run| {
            // Neither the destinations of metrics nor the memory of a step count.
            let mut run = Self {
                tracker: Tracker::default(),
                ..run.clone()
            };
            run.train.recompute = Recompute::default();
            Value::try_from(run).expect("what was read from TOML can be written as TOML")
        });
        let mut lines = Vec::new();
        compare("", Some(&here), Some(&there), &mut lines);
        lines
    }
}

/// Adds a line for each leaf below `key` that is not the same on both sides.
fn compare(key: &str, here: Option<&Value>, there: Option<&Value>, lines: &mut Vec<String>) {
    if here == there {
        return;
    }
    let mut steps: Vec<String> = [here, there]
        .into_iter()
        .flatten()
        .flat_map(steps_below)
        .collect();
    if steps.is_empty() {
        let [here, there] =
            [here, there].map(|side| side.map_or("nothing".to_owned(), Value::to_string));
        lines.push(format!("{key}: {here} here, {there} there"));
        return;
    }
    let mut done = std::collections::BTreeSet::new();
    steps.retain(|step| done.insert(step.clone()));
    for step in steps {
        let below = if key.is_empty() {
            step.clone()
        } else {
            format!("{key}.{step}")
        };
        let [here, there] = [here, there].map(|side| side.and_then(|side| child(side, &step)));
        compare(&below, here, there, lines);
    }
}

/// The keys of a table, the numbers of a list.
fn steps_below(value: &Value) -> Vec<String> {
    match value {
        Value::Table(table) => table.keys().cloned().collect(),
        Value::Array(rows) => (0..rows.len()).map(|row| row.to_string()).collect(),
        _ => Vec::new(),
    }
}

fn child<'v>(value: &'v Value, step: &str) -> Option<&'v Value> {
    match value {
        Value::Table(table) => table.get(step),
        Value::Array(rows) => rows.get(step.parse::<usize>().ok()?),
        _ => None,
    }
}

/// Writes a clip as a file says it: the largest norm, or `false`.
pub(crate) fn clip<S: Serializer>(norm: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match norm {
        Some(norm) => serializer.serialize_f64(*norm),
        None => serializer.serialize_bool(false),
    }
}
