//! The value of a name in a row: a number, or another kind that trackers show.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// A value of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A scalar. Numbers that JSON lacks are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
    Number(f64),
    /// A vector as a histogram: `{"edges":[0,0.5,1],"counts":[3,4]}`.
    Histogram(Histogram),
    /// Text: `{"text":"..."}`.
    Text(String),
    /// A file of the run directory, such as a figure, by its relative path:
    /// `{"file":"figures/step-00000100/uv_matrices.svg"}`.
    File(String),
}

/// Counts of values between edges.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// Ascending, one more than counts.
    pub edges: Vec<f64>,
    /// Number of values in each bin.
    pub counts: Vec<f64>,
}

impl Value {
    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(value) => Some(*value),
            _ => None,
        }
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Number(value)
    }
}

/// The values that are objects in JSON.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
enum Object {
    Histogram(Histogram),
    Text(Text),
    File(File),
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    text: String,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    file: String,
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(value) if value.is_nan() => serializer.serialize_str("NaN"),
            Self::Number(f64::INFINITY) => serializer.serialize_str("Infinity"),
            Self::Number(f64::NEG_INFINITY) => serializer.serialize_str("-Infinity"),
            Self::Number(value) => serializer.serialize_f64(*value),
            Self::Histogram(histogram) => histogram.serialize(serializer),
            Self::Text(text) => Text { text: text.clone() }.serialize(serializer),
            Self::File(file) => File { file: file.clone() }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;

        impl<'de> Visitor<'de> for Values {
            type Value = Value;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(
                    "a number, \"NaN\", \"Infinity\" or \"-Infinity\", or an object with `text`, `file`, or `edges` and `counts`",
                )
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Number(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Number(value as f64))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Number(value as f64))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Value, E> {
                match text {
                    "NaN" => Ok(Value::Number(f64::NAN)),
                    "Infinity" => Ok(Value::Number(f64::INFINITY)),
                    "-Infinity" => Ok(Value::Number(f64::NEG_INFINITY)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Value, M::Error> {
                let object =
                    Object::deserialize(MapAccessDeserializer::new(map)).map_err(|_| {
                        de::Error::custom(
                            "an object is no value without `text`, `file`, or `edges` and `counts`",
                        )
                    })?;
                match object {
                    Object::Text(Text { text }) => Ok(Value::Text(text)),
                    Object::File(File { file }) => Ok(Value::File(file)),
                    Object::Histogram(histogram)
                        if histogram.edges.len() == histogram.counts.len() + 1 =>
                    {
                        Ok(Value::Histogram(histogram))
                    }
                    Object::Histogram(_) => Err(de::Error::custom(
                        "a histogram has one edge more than it has counts",
                    )),
                }
            }
        }

        deserializer.deserialize_any(Values)
    }
}
