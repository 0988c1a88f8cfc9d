//! The description of a run beside its numbers: parameters, tags, files.

use std::collections::VecDeque;
use std::fmt::Write;
use std::io::{BufRead, BufReader};

use serde_json::{Value as Json, json};
use spd_tracker::{Kind, Row};

use super::names::{cut, taken};
use crate::run::RunInfo;

/// Most bytes of a parameter's value.
const LONGEST_PARAMETER: usize = 6000;

/// Most bytes of a tag's value, by the strictest of servers.
const LONGEST_TAG: usize = 5000;

/// Most lines of the log of events; the last ones are kept.
const MOST_EVENTS: usize = 10_000;

/// A tag.
pub(super) fn tag(key: &str, value: &str) -> Json {
    json!({"key": taken(key), "value": cut(value, LONGEST_TAG)})
}

/// The tags that are known from the start.
pub(super) fn tags(run: &RunInfo) -> Vec<Json> {
    let mut tags = vec![
        tag("mlflow.source.name", "spd"),
        tag("mlflow.source.type", "LOCAL"),
        tag("spd.host", &run.host),
        tag("spd.job", run.job),
        tag("spd.version", spd_tracker::version()),
    ];
    if let Some(notes) = &run.tracker.notes {
        tags.push(tag("mlflow.note.content", notes));
    }
    if let Some(group) = &run.tracker.group {
        tags.push(tag("spd.group", group));
    }
    tags.extend(run.tracker.tags.iter().map(|word| tag(word, "true")));
    tags
}

/// The config with dotted names. A list is one value.
pub(super) fn parameters(config: &Json) -> Vec<Json> {
    let mut found = Vec::new();
    flatten("", config, &mut found);
    let parameters = found
        .into_iter()
        .map(|(key, value)| json!({"key": taken(&key), "value": cut(&value, LONGEST_PARAMETER)}));
    parameters.collect()
}

fn flatten(before: &str, config: &Json, found: &mut Vec<(String, String)>) {
    match config {
        Json::Object(table) => {
            for (key, value) in table {
                let key = if before.is_empty() {
                    key.clone()
                } else {
                    format!("{before}.{key}")
                };
                flatten(&key, value, found);
            }
        }
        // Some servers treat an empty value as none.
        Json::String(text) if !text.is_empty() => found.push((before.to_owned(), text.clone())),
        value => found.push((before.to_owned(), value.to_string())),
    }
}

/// The events and alerts of a run, one a line.
pub(super) fn events(run: &RunInfo) -> String {
    let mut lines = VecDeque::new();
    let Ok(file) = spd_files::open(&run.dir.join(spd_tracker::SYSTEM)) else {
        return String::new();
    };
    for line in BufReader::new(file).split(b'\n').map_while(Result::ok) {
        // The last line may be torn.
        let Ok(row) = serde_json::from_slice::<Row>(&line) else {
            continue;
        };
        if matches!(row.kind, Kind::Event | Kind::Alert) {
            if lines.len() == MOST_EVENTS {
                lines.pop_front();
            }
            lines.push_back(event(&row));
        }
    }
    lines.into_iter().collect()
}

fn event(row: &Row) -> String {
    let mut line = String::new();
    let time = row.number("time").and_then(|seconds| {
        let milliseconds = super::batch::milliseconds(seconds);
        jiff::Timestamp::from_millisecond(milliseconds).ok()
    });
    if let Some(time) = time {
        // Writing into a string cannot fail.
        let _ = write!(line, "{time:.3} ");
    }
    if row.kind == Kind::Alert {
        line.push_str("ALERT ");
    }
    let note = row.note.as_deref().unwrap_or_default();
    let words: Vec<&str> = note.split_whitespace().collect();
    let _ = writeln!(line, "step {}: {}", row.step, words.join(" "));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_is_flat() {
        let config = json!({"seed": 0, "name": "", "optimizer": {"lr": {"start": 1e-3}, "kind": "adamw"}, "sites": [1, "a"], "s@": true});
        let found = parameters(&config);
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|found| {
                (
                    found["key"].as_str().unwrap(),
                    found["value"].as_str().unwrap(),
                )
            })
            .collect();
        let changed = taken("s@");
        let expected = [
            ("seed", "0"),
            ("name", "\"\""),
            ("optimizer.lr.start", "0.001"),
            ("optimizer.kind", "adamw"),
            ("sites", "[1,\"a\"]"),
            (changed.as_str(), "true"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn events_are_lines() {
        let dir = tempfile::tempdir().unwrap();
        let run = crate::run::tests::run(dir.path());
        assert_eq!(events(&run), "");
        let rows = [
            Row::new(0, Kind::Event)
                .with_note("started")
                .with("time", 1_795_000_000.25),
            Row::new(1, Kind::System).with("steps_per_s", 3.0),
            Row::new(2, Kind::Alert).with_note("the loss\nis NaN"),
        ];
        let mut text: Vec<u8> = Vec::new();
        for row in rows {
            text.extend(serde_json::to_vec(&row).unwrap());
            text.push(b'\n');
        }
        text.extend(b"{\"step\":3,\"ki");
        spd_files::atomic::write_file(&dir.path().join(spd_tracker::SYSTEM), &[&text]).unwrap();
        assert_eq!(
            events(&run),
            "2026-11-18T11:06:40.250Z step 0: started\nALERT step 2: the loss is NaN\n"
        );
    }
}
