//! Rows as TensorBoard's events, and events as records: the needed part of `event.proto` and
//! `summary.proto`.

use prost::Message;
use spd_tracker::{Histogram, Value};

use crate::messages::messages;
use crate::picture;
use crate::run::RunInfo;

/// The first record of every file.
pub(super) const VERSION: &str = "brain.Event:2";

/// `SessionLog.START`: everything logged for its step and later ones is void.
const START: i32 = 1;

/// `DT_STRING`.
const STRINGS: i32 = 7;

messages! {
    Event {
        wall_time: f64 = [double, tag = "1"],
        step: i64 = [int64, tag = "2"],
        file_version: Option<String> = [string, optional, tag = "3"],
        summary: Option<Summary> = [message, optional, tag = "5"],
        session_log: Option<SessionLog> = [message, optional, tag = "7"],
    }

    SessionLog {
        status: i32 = [int32, tag = "1"],
    }

    Summary {
        values: Vec<Tagged> = [message, repeated, tag = "1"],
    }

    Tagged {
        tag: String = [string, tag = "1"],
        metadata: Option<Metadata> = [message, optional, tag = "9"],
        held: Option<Held> = [oneof = "Held", tags = "2, 4, 5, 8"],
    }

    Metadata {
        plugin: Option<Plugin> = [message, optional, tag = "1"],
    }

    Plugin {
        name: String = [string, tag = "1"],
    }

    Image {
        height: u32 = [uint32, tag = "1"],
        width: u32 = [uint32, tag = "2"],
        /// Channels: 4, RGBA.
        colorspace: i32 = [int32, tag = "3"],
        encoded: Vec<u8> = [bytes = "vec", tag = "4"],
    }

    Bins {
        min: f64 = [double, tag = "1"],
        max: f64 = [double, tag = "2"],
        num: f64 = [double, tag = "3"],
        sum: f64 = [double, tag = "4"],
        sum_squares: f64 = [double, tag = "5"],
        /// The upper edge of each bin.
        limits: Vec<f64> = [double, repeated, tag = "6"],
        counts: Vec<f64> = [double, repeated, tag = "7"],
    }

    Strings {
        dtype: i32 = [int32, tag = "1"],
        shape: Option<Shape> = [message, optional, tag = "2"],
        strings: Vec<String> = [string, repeated, tag = "8"],
    }

    /// The shape of a single string, which has no axes; a list of one is shown as a table.
    Shape {}
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Held {
    #[prost(float, tag = "2")]
    Scalar(f32),
    #[prost(message, tag = "4")]
    Image(Image),
    #[prost(message, tag = "5")]
    Histogram(Bins),
    #[prost(message, tag = "8")]
    Tensor(Strings),
}

/// The first records of a file. They void everything in older files, which is of step 0 and later
/// ones.
pub(super) fn head(time: f64) -> Vec<u8> {
    let version = Event {
        wall_time: time,
        file_version: Some(VERSION.to_owned()),
        ..Event::default()
    };
    let start = Event {
        wall_time: time,
        session_log: Some(SessionLog { status: START }),
        ..Event::default()
    };
    let mut bytes = record(&version);
    bytes.extend(record(&start));
    bytes
}

/// The values of a step as one record; empty without values.
pub(super) fn values(time: f64, step: u64, values: Vec<Tagged>) -> Vec<u8> {
    if values.is_empty() {
        return Vec::new();
    }
    record(&Event {
        wall_time: time,
        step: signed(step),
        summary: Some(Summary { values }),
        ..Event::default()
    })
}

/// A value with its name. TensorBoard's scalars are f32, and its pictures PNG; other files are
/// shown by name.
pub(super) fn tagged(run: &RunInfo, name: &str, value: &Value) -> Option<Tagged> {
    match value {
        Value::Number(value) => Some(scalar(name, *value)),
        Value::Histogram(histogram) => bins(histogram).map(|bins| Tagged {
            tag: name.to_owned(),
            metadata: None,
            held: Some(Held::Histogram(bins)),
        }),
        Value::Text(words) => Some(text(name, words)),
        Value::File(path) => Some(match image(run, path) {
            Ok(Some(image)) => Tagged {
                tag: name.to_owned(),
                metadata: None,
                held: Some(Held::Image(image)),
            },
            Ok(None) => text(name, path),
            Err(why) => text(name, &format!("{path}: {why}")),
        }),
    }
}

/// A number with its name.
pub(super) fn scalar(name: &str, value: f64) -> Tagged {
    #[expect(clippy::cast_possible_truncation, reason = "a rounded value is shown")]
    let value = value as f32;
    Tagged {
        tag: name.to_owned(),
        metadata: None,
        held: Some(Held::Scalar(value)),
    }
}

/// Text with its name, which TensorBoard reads as Markdown.
pub(super) fn text(name: &str, words: &str) -> Tagged {
    let plugin = Plugin {
        name: "text".to_owned(),
    };
    Tagged {
        tag: name.to_owned(),
        metadata: Some(Metadata {
            plugin: Some(plugin),
        }),
        held: Some(Held::Tensor(Strings {
            dtype: STRINGS,
            shape: Some(Shape {}),
            strings: vec![words.to_owned()],
        })),
    }
}

/// A figure as a picture; `None` for a file that is no figure.
fn image(run: &RunInfo, path: &str) -> Result<Option<Image>, String> {
    let bytes = run.file(path)?;
    if !path.ends_with(".svg") {
        return Ok(None);
    }
    let png = picture::png(&bytes)?;
    Ok(Some(Image {
        height: png.height,
        width: png.width,
        colorspace: 4,
        encoded: png.bytes,
    }))
}

/// The sums assume values in the middle of their bins. `None` without bins.
fn bins(histogram: &Histogram) -> Option<Bins> {
    let (edges, counts) = (&histogram.edges, &histogram.counts);
    let (min, max) = (*edges.first()?, *edges.last()?);
    if counts.is_empty() {
        return None;
    }
    let middles = edges.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
    let weighted = || middles.clone().zip(counts);
    Some(Bins {
        min,
        max,
        num: counts.iter().sum(),
        sum: weighted().map(|(middle, count)| middle * count).sum(),
        sum_squares: weighted()
            .map(|(middle, count)| middle * middle * count)
            .sum(),
        limits: edges[1..].to_vec(),
        counts: counts.clone(),
    })
}

/// An event with its length and two checksums.
fn record(event: &Event) -> Vec<u8> {
    let payload = event.encode_to_vec();
    let length = (payload.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(payload.len() + 16);
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(&masked(&length));
    bytes.extend_from_slice(&payload);
    bytes.extend_from_slice(&masked(&payload));
    bytes
}

/// CRC-32C as in TFRecord files, which keeps checksums of bytes with checksums in them apart.
fn masked(bytes: &[u8]) -> [u8; 4] {
    let sum = crc32c::crc32c(bytes);
    sum.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn signed(step: u64) -> i64 {
    i64::try_from(step).unwrap_or(i64::MAX)
}

/// The whole records of a file.
#[cfg(test)]
pub(super) fn read(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while bytes.len() >= 12 {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(bytes[8..12], masked(&bytes[..8]));
        let end = 12 + usize::try_from(length).unwrap();
        let Some(sum) = bytes.get(end..end + 4) else {
            break;
        };
        assert_eq!(sum, masked(&bytes[12..end]));
        events.push(Event::decode(&bytes[12..end]).unwrap());
        bytes = &bytes[end + 4..];
    }
    events
}
