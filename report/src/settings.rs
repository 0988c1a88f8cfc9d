//! A run file as a list of settings, for comparison.

use toml::Value;

/// Values of a run file by their full keys, such as `train.lr.start` or `loss[1].coeff`, sorted by
/// key.
pub(crate) type Settings = Vec<(String, String)>;

/// The run file of a run directory.
pub(crate) const CONFIG: &str = "config.toml";

/// Most bytes of it, and of `summary.json`.
pub(crate) const LARGEST: u64 = 8 << 20;

/// Every value of a run file; none if it is not TOML.
pub(crate) fn settings(text: &str) -> Settings {
    let mut found = Vec::new();
    if let Ok(table) = text.parse::<toml::Table>() {
        for (key, value) in &table {
            add(key, value, &mut found);
        }
    }
    found
}

fn add(key: &str, value: &Value, found: &mut Vec<(String, String)>) {
    match value {
        Value::Table(table) => {
            for (inner, value) in table {
                add(&format!("{key}.{inner}"), value, found);
            }
        }
        Value::Array(all) if all.iter().any(Value::is_table) => {
            for (index, value) in all.iter().enumerate() {
                add(&format!("{key}[{index}]"), value, found);
            }
        }
        Value::String(text) => found.push((key.to_owned(), text.clone())),
        value => found.push((key.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_whole() {
        let text = "name = \"x\"\n[train]\nlr = { start = 1e-3 }\n[[loss]]\nkind = \"a\"\n[[loss]]\nhidden = [1, 2]\n";
        let expected = [
            ("name", "x"),
            ("train.lr.start", "0.001"),
            ("loss[0].kind", "a"),
            ("loss[1].hidden", "[1, 2]"),
        ];
        let mut found = settings(text);
        let mut expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert!(settings("no toml").is_empty());
    }
}
