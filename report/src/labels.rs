//! `labels.json`: a name that somebody gave to a component, by `SITE:INDEX`.

use std::collections::BTreeMap;
use std::path::Path;

use crate::figures::text;

/// The file in the run directory.
pub(crate) const FILE: &str = "labels.json";

/// Most bytes of it.
const LARGEST: u64 = 16 << 20;

/// Labels by `SITE:INDEX`.
pub(crate) type Labels = BTreeMap<String, String>;

/// The labels of a file, or a line with the reason why there are none.
pub(crate) fn read(path: &Path) -> Result<Labels, String> {
    let refused = |found: String| {
        format!(
            "{}: expected texts by component, like {{\"h.0.mlp.c_fc:17\": \"plural nouns\"}}, found {found}; it is left out",
            path.display()
        )
    };
    let Some(text) = text(path, LARGEST) else {
        return Err(refused(format!("no text of {LARGEST} bytes at most")));
    };
    let labels: Labels = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    let names_one = |key: &&String| {
        let parts = key.rsplit_once(':');
        parts.is_some_and(|(site, index)| !site.is_empty() && index.parse::<u64>().is_ok())
    };
    match labels.keys().find(|key| !names_one(key)) {
        Some(other) => Err(refused(format!("{other:?}"))),
        None => Ok(labels),
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "nobody reads it meanwhile")]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let found = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path)
        };
        let labels = found(r#"{"h.0.q:3": "dogs", "a:b:12": ""}"#).unwrap();
        assert_eq!(labels["h.0.q:3"], "dogs");
        for (text, why) in [
            ("{", "EOF while parsing an object at line 1 column 1"),
            (
                "{\"h.0.q:3\": 7}",
                "invalid type: integer `7`, expected a string at line 1 column 13",
            ),
            ("{\"h.0.q\": \"dogs\"}", "\"h.0.q\""),
            ("{\"h.0.q:x\\n\": \"dogs\"}", "\"h.0.q:x\\n\""),
        ] {
            let line = format!(
                "{}: expected texts by component, like {{\"h.0.mlp.c_fc:17\": \"plural nouns\"}}, found {why}; it is left out",
                path.display()
            );
            assert_eq!(found(text).unwrap_err(), line);
        }
    }
}
