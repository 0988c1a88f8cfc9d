//! JSON's values as a text of YAML that PyYAML reads as they are.

use std::fmt::Write;

use serde_json::{Map, Value};

/// The text of a file of the keys of these tables, no two of which share one.
pub(super) fn text(tables: &[Value]) -> String {
    let mut out = String::new();
    for table in tables.iter().filter_map(Value::as_object) {
        map(table, 0, &mut out);
    }
    out
}

fn map(table: &Map<String, Value>, depth: usize, out: &mut String) {
    for (name, value) in table {
        let _ = write!(out, "{}{}:", "  ".repeat(depth), key(name));
        below(value, depth, out);
    }
}

/// Writes the value behind a key or the dash of a row.
fn below(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::Object(table) if !table.is_empty() => {
            out.push('\n');
            map(table, depth + 1, out);
        }
        Value::Array(rows) if !rows.is_empty() => {
            out.push('\n');
            for row in rows {
                let _ = write!(out, "{}-", "  ".repeat(depth + 1));
                below(row, depth + 1, out);
            }
        }
        Value::Number(number) => {
            let _ = writeln!(out, " {}", with_point(&number.to_string()));
        }
        // As JSON writes them: YAML reads that too.
        other => {
            let _ = writeln!(out, " {other}");
        }
    }
}

/// A key, in quotation marks where YAML may take it for something else than its letters.
fn key(name: &str) -> String {
    let is_word = name.chars().all(|c| c.is_ascii_alphabetic() || c == '_');
    let flags = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    if is_word && !flags.contains(&name.to_ascii_lowercase().as_str()) {
        name.to_owned()
    } else {
        Value::from(name).to_string()
    }
}

/// A number as YAML 1.1 knows it: `1e-12` is a text there, `1.0e-12` is none.
fn with_point(number: &str) -> String {
    let Some((digits, exponent)) = number.split_once('e') else {
        return number.to_owned();
    };
    let point = if digits.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) {
        ""
    } else {
        "+"
    };
    format!("{digits}{point}e{sign}{exponent}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_and_keys_survive_the_round_trip() {
        let table = json!({
            "steps": 5, "lr": 1e-12, "big": 1e30, "none": null, "empty": [],
            "groups": { "no": ["h.*", "a \"b\"\n"], "layer_0": [[1, 2.5]] },
        });
        let expected = "steps: 5\nlr: 1.0e-12\nbig: 1.0e+30\nnone: null\nempty: []\ngroups:\n  \"no\":\n    - \"h.*\"\n    \
                        - \"a \\\"b\\\"\\n\"\n  \"layer_0\":\n    -\n      - 1\n      - 2.5\n";
        assert_eq!(text(&[table]), expected);
    }
}
