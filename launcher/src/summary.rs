//! `summary.json`: the results written by the rank, printed by the launcher.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::screen::plain;
use crate::table::{Align, Table};

/// The text of a summary file, and its JSON.
///
/// # Errors
///
/// When the file cannot be read, or does not have the form
/// `{"title": text, "tables": [{"title", "columns", "rows"}], "lines": [[label, value]]}`.
pub(crate) fn read(path: &Path) -> Result<(String, Value)> {
    let summary = json(path)?;
    let text = text(&summary).ok_or_else(|| {
        anyhow!(
            "{}: does not have the form of a summary; was it edited?",
            path.display()
        )
    })?;
    Ok((text, summary))
}

/// The JSON of a summary file, of whichever form.
///
/// # Errors
///
/// When the file cannot be read, or is not JSON.
pub(crate) fn json(path: &Path) -> Result<Value> {
    let bytes = spd_files::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| format!("{}: is not JSON", path.display()))
}

fn text(summary: &Value) -> Option<String> {
    let mut text = format!("{}\n", plain(summary.get("title")?.as_str()?));
    for table in list(summary, "tables")? {
        text.push_str(&format!("\n{}\n", plain(table.get("title")?.as_str()?)));
        text.push_str(&columns(table)?);
    }
    let mut lines = Table::default();
    for line in list(summary, "lines")? {
        lines.row(cells(line)?);
    }
    if !lines.is_empty() {
        text.push('\n');
        text.push_str(&lines.text());
    }
    Some(text)
}

fn columns(table: &Value) -> Option<String> {
    let rows: Vec<&Value> = list(table, "rows")?.iter().collect();
    let titles = cells(table.get("columns")?)?;
    // A column of numbers is aligned right, even with a cell for "none".
    let align = |column: usize| {
        let mut values = rows
            .iter()
            .filter_map(|row| row.get(column))
            .filter(|cell| !cell.is_null());
        if values.all(is_number) {
            Align::Right
        } else {
            Align::Left
        }
    };
    let alignments: Vec<Align> = (0..titles.len()).map(align).collect();
    let mut aligned = Table::new(&alignments);
    aligned.row(titles);
    for row in rows {
        aligned.row(cells(row)?);
    }
    Some(aligned.text())
}

fn list<'a>(value: &'a Value, key: &str) -> Option<&'a Vec<Value>> {
    static NONE: Vec<Value> = Vec::new();
    value.get(key).map_or(Some(&NONE), Value::as_array)
}

fn cells(row: &Value) -> Option<Vec<String>> {
    row.as_array()?.iter().map(cell).collect()
}

fn cell(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(plain(text)),
        Value::Null => Some("-".to_owned()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Array(_) | Value::Object(_) => None,
    }
}

/// Whether a cell is a number, which the rank may have formatted already.
fn is_number(value: &Value) -> bool {
    match value {
        Value::Number(_) => true,
        Value::String(text) => text
            .replace(',', "")
            .trim_end_matches('%')
            .parse::<f64>()
            .is_ok(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_printed_in_full() {
        let summary = serde_json::json!({
            "title": "tms_5-2: 10,000 steps in 4 min",
            "tables": [{
                "title": "losses",
                "columns": ["loss", "train", "eval"],
                "rows": [["faithfulness", 0.5, "1.2e-6"], ["importance", 12.25, null]],
            }],
            "lines": [["seed", 0], ["precision", "f32"]],
        });
        assert_eq!(
            text(&summary).unwrap(),
            "\
tms_5-2: 10,000 steps in 4 min

losses
  loss          train    eval
  faithfulness    0.5  1.2e-6
  importance    12.25       -

  seed       0
  precision  f32
"
        );
    }

    #[test]
    fn a_title_is_enough() {
        assert_eq!(
            text(&serde_json::json!({"title": "done"})).unwrap(),
            "done\n"
        );
    }

    #[test]
    fn another_form_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.json");
        let error = |text: &[u8]| {
            spd_checkpoint::atomic::write_file(&path, text).unwrap();
            format!("{:#}", read(&path).unwrap_err()).replace(&path.display().to_string(), "PATH")
        };
        assert_eq!(
            error(b"{\"tables\": 3}"),
            "PATH: does not have the form of a summary; was it edited?"
        );
        assert!(error(b"{").starts_with("PATH: is not JSON: "));
    }
}
