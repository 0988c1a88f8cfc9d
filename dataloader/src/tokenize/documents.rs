//! Files whose format marks documents: JSON lines, and columns of parquet.

use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, BufReader, Read};

use parquet::basic::{Repetition, Type};
use parquet::column::reader::ColumnReader;
use parquet::data_type::AsBytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;
use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::caught::decoded;
use super::inputs::{Form, Input};
use crate::DataError;

/// A document, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// Text to be encoded; of a text file, any bytes.
    Text(Vec<u8>),
    /// Ids of an earlier encoding.
    Ids(Vec<u32>),
}

/// By hand: an untagged enum would first hold 32 bytes for each digit of a list.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.as_bytes().to_vec()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(Content::Ids(ids))
            }
        }

        json.deserialize_any(Any)
    }
}

impl Content {
    /// Size of the text; an id counts as four bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Text(text) => text.len() as u64,
            Self::Ids(ids) => 4 * ids.len() as u64,
        }
    }
}

/// Calls `each` with every document of a file and its line or row, counted from 1, until it returns
/// false.
///
/// - `column`: the key or column of the text or the ids
pub(super) fn each(
    input: &Input,
    column: &str,
    mut each: impl FnMut(u64, Content) -> Result<bool, DataError>,
) -> Result<(), DataError> {
    match input.form {
        Form::Parquet => each_row(input, column, &mut each),
        _ => each_line(input, column, &mut each),
    }
}

/// Longest line. A file without line ends must not fill the memory.
const MOST_LINE_BYTES: u64 = 256 << 20;

type Each<'e> = dyn FnMut(u64, Content) -> Result<bool, DataError> + 'e;

fn each_line(input: &Input, column: &str, each: &mut Each<'_>) -> Result<(), DataError> {
    let mut reader = BufReader::with_capacity(1 << 20, input.open()?);
    let (mut line, mut number) = (Vec::new(), 0);
    loop {
        line.clear();
        number += 1;
        let broken =
            |fault: String| DataError::damaged(&input.path, format!("line {number}: {fault}"));
        let read = (&mut reader)
            .take(MOST_LINE_BYTES + 1)
            .read_until(b'\n', &mut line);
        let read = read.map_err(|error| input.unreadable(error))?;
        if read == 0 {
            return Ok(());
        }
        if read as u64 > MOST_LINE_BYTES {
            return Err(broken(format!(
                "is longer than {} MiB; is it JSON lines, an object a line?",
                MOST_LINE_BYTES >> 20
            )));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut json = serde_json::Deserializer::from_slice(&line);
        let found = Column(column).deserialize(&mut json);
        let found = found.and_then(|found| json.end().map(|()| found));
        let content = match found {
            Ok(Some(content)) => content,
            Ok(None) => {
                return Err(broken(format!(
                    "has no \"{column}\"; name the key that holds the text with --column"
                )));
            }
            Err(fault) => {
                // The error gives a line within the text, which is one line.
                let fault = fault.to_string();
                let fault = fault.split(" at line ").next().unwrap_or_default();
                return Err(broken(format!(
                    "is not a JSON object with a text or a list of ids in \"{column}\": {fault}"
                )));
            }
        };
        if !each(number, content)? {
            return Ok(());
        }
    }
}

/// One key of an object; the others are skipped.
struct Column<'c>(&'c str);

impl<'de> DeserializeSeed<'de> for Column<'_> {
    type Value = Option<Content>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Column<'_> {
    type Value = Option<Content>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if key == self.0 {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Rows read at once.
const ROWS: usize = 256;

fn each_row(input: &Input, column: &str, each: &mut Each<'_>) -> Result<(), DataError> {
    let path = &input.path;
    let unreadable = |fault: ParquetError| {
        DataError::damaged(path, format!("is not a complete parquet file: {fault}"))
    };
    let file = spd_files::open(path).map_err(DataError::io("open", path))?;
    let reader = decoded(|| SerializedFileReader::new(file)).map_err(unreadable)?;
    let schema = reader.metadata().file_metadata().schema_descr_ptr();
    // A list of ids is one leaf below its name.
    let leaf = (0..schema.num_columns()).find(|&leaf| {
        let parts = schema.column(leaf).path().parts().to_vec();
        parts.first().is_some_and(|first| first == column)
    });
    let Some(leaf) = leaf else {
        let names = schema.root_schema().get_fields().iter();
        let names: Vec<_> = names.map(|field| field.name().to_owned()).collect();
        return Err(DataError::damaged(
            path,
            format!(
                "has no column \"{column}\"; name one with --column: {}",
                names.join(", ")
            ),
        ));
    };
    let about = schema.column(leaf);
    let kind = about.physical_type();
    let is_list = about.max_rep_level() == 1;
    let fits = match kind {
        Type::BYTE_ARRAY => about.max_rep_level() == 0 && about.path().parts().len() == 1,
        Type::INT32 | Type::INT64 => is_list,
        _ => false,
    };
    if !fits {
        return Err(DataError::damaged(
            path,
            format!("column \"{column}\" holds neither texts nor lists of whole numbers"),
        ));
    }
    let mut row = 0;
    for group in 0..reader.num_row_groups() {
        let column = || reader.get_row_group(group)?.get_column_reader(leaf);
        let mut column = decoded(column).map_err(unreadable)?;
        loop {
            let contents = decoded(|| rows(&mut column, &about)).map_err(unreadable)?;
            if contents.is_empty() {
                break;
            }
            for content in contents {
                row += 1;
                let content = content
                    .map_err(|fault| DataError::damaged(path, format!("row {row}: {fault}")))?;
                if !each(row, content)? {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// The next rows of a column; none at its end.
fn rows(
    column: &mut ColumnReader,
    about: &ColumnDescriptor,
) -> parquet::errors::Result<Vec<Result<Content, String>>> {
    // The definition level of a value that is there.
    let whole = about.max_def_level();
    let (mut defined, mut repeated) = (Vec::new(), Vec::new());
    Ok(match column {
        ColumnReader::ByteArrayColumnReader(texts) => {
            let mut found = Vec::new();
            let is_required =
                about.self_type().get_basic_info().repetition() == Repetition::REQUIRED;
            let levels = (!is_required).then_some(&mut defined);
            let (rows, ..) = texts.read_records(ROWS, levels, None, &mut found)?;
            let mut found = found.into_iter();
            let texts = (0..rows).map(|row| {
                // A null is an empty document.
                let there = defined.get(row).is_none_or(|&level| level == whole);
                let bytes = there.then(|| found.next()).flatten();
                let bytes = bytes.as_ref().map_or(&[][..], |bytes| bytes.as_bytes());
                String::from_utf8(bytes.to_vec())
                    .map(|text| Content::Text(text.into_bytes()))
                    .map_err(|fault| format!("is not UTF-8: {fault}"))
            });
            texts.collect()
        }
        ColumnReader::Int32ColumnReader(ids) => {
            let mut found = Vec::new();
            ids.read_records(ROWS, Some(&mut defined), Some(&mut repeated), &mut found)?;
            let found = found.into_iter().map(|id: i32| u32::try_from(id).ok());
            lists(found, &defined, &repeated, whole)
        }
        ColumnReader::Int64ColumnReader(ids) => {
            let mut found = Vec::new();
            ids.read_records(ROWS, Some(&mut defined), Some(&mut repeated), &mut found)?;
            let found = found.into_iter().map(|id: i64| u32::try_from(id).ok());
            lists(found, &defined, &repeated, whole)
        }
        _ => Vec::new(),
    })
}

/// Groups values into lists. A list begins at repetition level 0.
fn lists(
    mut found: impl Iterator<Item = Option<u32>>,
    defined: &[i16],
    repeated: &[i16],
    whole: i16,
) -> Vec<Result<Content, String>> {
    let mut lists: Vec<Result<Content, String>> = Vec::new();
    for (&defined, &repeated) in defined.iter().zip(repeated) {
        if repeated == 0 {
            lists.push(Ok(Content::Ids(Vec::new())));
        }
        if defined == whole
            && let Some(list) = lists.last_mut()
        {
            match (found.next().flatten(), &mut *list) {
                (Some(id), Ok(Content::Ids(ids))) => ids.push(id),
                (None, Ok(_)) => {
                    *list = Err("has an id that is not a whole number from 0 on".to_owned())
                }
                _ => {}
            }
        }
    }
    lists
}
