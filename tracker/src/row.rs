//! One row: the values of one step, and its line of JSON.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::value::Value;

/// The values of one step.
///
/// Equality is that of the line: every NaN equals every other.
#[derive(Debug, Clone)]
pub struct Row {
    /// Optimizer steps done.
    pub step: u64,
    /// The subject of the row, which decides its file.
    pub kind: Kind,
    /// A sentence about an event.
    pub note: Option<String>,
    /// Names and values in the writer's order. Names are unique, and none is `step`, `kind` or
    /// `note`.
    pub values: Vec<(String, Value)>,
}

/// The subject of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Losses and rates of a training step.
    Train,
    /// Metrics of an evaluation.
    Eval,
    /// Time, memory and throughput, which differ between two runs of one config.
    System,
    /// Something that happened: a start, a resume, a checkpoint.
    Event,
    /// An event that needs a person.
    Alert,
}

impl Row {
    /// A row without values.
    pub fn new(step: u64, kind: Kind) -> Self {
        Self {
            step,
            kind,
            note: None,
            values: Vec::new(),
        }
    }

    /// The row with one more value.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.values.push((name.into(), value.into()));
        self
    }

    /// The value of a name, if it is a number.
    pub fn number(&self, name: &str) -> Option<f64> {
        let (_, value) = self.values.iter().find(|(key, _)| key == name)?;
        value.number()
    }

    /// The names whose values are numbers.
    pub fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        let values = self.values.iter();
        values.filter_map(|(name, value)| Some((name.as_str(), value.number()?)))
    }

    /// The row with a note.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// The row as a line, with its end.
    pub(crate) fn line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("names and numbers are JSON");
        line.push(b'\n');
        line
    }

    /// Reads a line without its end.
    pub(crate) fn parse(line: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(line).map_err(|error| error.to_string())
    }
}

impl PartialEq for Row {
    fn eq(&self, other: &Self) -> bool {
        self.line() == other.line()
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &self.step)?;
        map.serialize_entry("kind", &self.kind)?;
        if let Some(note) = &self.note {
            map.serialize_entry("note", note)?;
        }
        for (name, value) in &self.values {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Row {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = Row;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object with `step` and `kind`")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Row, M::Error> {
                let (mut step, mut kind, mut note, mut values) = (None, None, None, Vec::new());
                while let Some(key) = map.next_key::<String>()? {
                    let first = match key.as_str() {
                        "step" => step.replace(map.next_value()?).is_none(),
                        "kind" => kind.replace(map.next_value()?).is_none(),
                        "note" => note.replace(map.next_value()?).is_none(),
                        _ => {
                            values.push((key.clone(), map.next_value()?));
                            true
                        }
                    };
                    if !first {
                        return Err(de::Error::custom(format!("`{key}` is there twice")));
                    }
                }
                check_names(&values).map_err(de::Error::custom)?;
                let missing = de::Error::missing_field;
                Ok(Row {
                    step: step.ok_or_else(|| missing("step"))?,
                    kind: kind.ok_or_else(|| missing("kind"))?,
                    note,
                    values,
                })
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

fn check_names(values: &[(String, Value)]) -> Result<(), String> {
    let mut names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("`{}` is there twice", pair[0])),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(row: &Row) -> String {
        String::from_utf8(row.line()).unwrap()
    }

    #[test]
    fn a_row_is_a_line() {
        let row = Row::new(1200, Kind::Train)
            .with("loss/total", 0.1)
            .with("loss/faithfulness", 1.5e-8)
            .with("rows", 32.0)
            .with("up", f64::INFINITY)
            .with("down", f64::NEG_INFINITY)
            .with("lost", f64::NAN);
        assert_eq!(
            text(&row),
            "{\"step\":1200,\"kind\":\"train\",\"loss/total\":0.1,\"loss/faithfulness\":1.5e-8,\
             \"rows\":32.0,\"up\":\"Infinity\",\"down\":\"-Infinity\",\"lost\":\"NaN\"}\n"
        );
        let event = Row::new(0, Kind::Event).with_note("two\nlines");
        assert_eq!(
            text(&event),
            "{\"step\":0,\"kind\":\"event\",\"note\":\"two\\nlines\"}\n"
        );
    }

    #[test]
    fn bad_rows_are_refused_with_a_reason() {
        for (line, reason) in [
            (r#"{"kind":"eval"}"#, "missing field `step`"),
            (r#"{"step":1,"kind":"evil"}"#, "unknown variant `evil`"),
            (
                r#"{"step":-1,"kind":"eval"}"#,
                "invalid value: integer `-1`",
            ),
            (
                r#"{"step":1,"kind":"eval","a":1,"a":1}"#,
                "`a` is there twice",
            ),
            (
                r#"{"step":1,"step":1,"kind":"eval"}"#,
                "`step` is there twice",
            ),
            (
                r#"{"step":1,"kind":"eval","a":"nan"}"#,
                "expected a number, \"NaN\"",
            ),
            (r#"{"step":1,"kind":"eval"} {}"#, "trailing characters"),
            ("[1]", "expected an object with `step` and `kind`"),
            ("", "EOF"),
        ] {
            let found = Row::parse(line.as_bytes()).unwrap_err();
            assert!(found.contains(reason), "{line}: {found}");
        }
    }

    #[test]
    fn integers_of_other_writers_are_values() {
        let row = Row::parse(br#"{"kind":"eval","a":3,"step":1,"b":-3}"#).unwrap();
        assert_eq!(row, Row::new(1, Kind::Eval).with("a", 3.0).with("b", -3.0));
    }

    proptest! {
        #[test]
        fn a_line_holds_every_bit(
            step in any::<u64>(),
            note in any::<Option<String>>(),
            values in prop::collection::btree_map("[^snk].*", any::<u64>(), 0..5),
        ) {
            let values: Vec<(String, Value)> =
                values.into_iter().map(|(name, bits)| (name, f64::from_bits(bits).into())).collect();
            let row = Row { step, kind: Kind::Eval, note, values };
            let line = row.line();
            let read = Row::parse(line.strip_suffix(b"\n").unwrap()).unwrap();
            prop_assert_eq!(&read, &row);
            for ((_, read), (_, written)) in read.numbers().zip(row.numbers()) {
                prop_assert!(read.to_bits() == written.to_bits() || written.is_nan());
            }
        }
    }
}
