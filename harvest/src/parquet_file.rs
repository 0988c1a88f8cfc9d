//! A parquet file of few types of columns, a row group at a time.

use std::io;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{
    ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int32Type, Int64Type,
};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

/// The values of a column in a row group.
pub(crate) enum Column {
    Text(Vec<ByteArray>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    /// Null where there is none.
    MaybeF64(Vec<Option<f64>>),
    /// Lists, none of them empty.
    I32s(Vec<Vec<i32>>),
    F32s(Vec<Vec<f32>>),
}

impl Column {
    /// The declaration of a column of this type in the words of a parquet schema.
    fn declared(&self, name: &str) -> String {
        let list = |element: &str| {
            format!(
                "required group {name} (LIST) {{ repeated group list {{ required {element} element; }} }}"
            )
        };
        match self {
            Self::Text(_) => format!("required binary {name} (UTF8);"),
            Self::I32(_) => format!("required int32 {name};"),
            Self::I64(_) => format!("required int64 {name};"),
            Self::F32(_) => format!("required float {name};"),
            Self::F64(_) => format!("required double {name};"),
            Self::MaybeF64(_) => format!("optional double {name};"),
            Self::I32s(_) => list("int32"),
            Self::F32s(_) => list("float"),
        }
    }

    fn write(&self, to: &mut SerializedRowGroupWriter<'_, Vec<u8>>) -> Result<()> {
        match self {
            Self::Text(values) => write::<ByteArrayType>(to, values, None),
            Self::I32(values) => write::<Int32Type>(to, values, None),
            Self::I64(values) => write::<Int64Type>(to, values, None),
            Self::F32(values) => write::<FloatType>(to, values, None),
            Self::F64(values) => write::<DoubleType>(to, values, None),
            Self::MaybeF64(values) => {
                let levels: Vec<i16> = values.iter().map(|value| value.is_some().into()).collect();
                let values: Vec<f64> = values.iter().flatten().copied().collect();
                write::<DoubleType>(to, &values, Some((&levels, None)))
            }
            Self::I32s(lists) => write_lists::<Int32Type>(to, lists),
            Self::F32s(lists) => write_lists::<FloatType>(to, lists),
        }
    }
}

/// Levels of definition, and of repetition.
type Levels<'a> = (&'a [i16], Option<&'a [i16]>);

fn write<T: DataType>(
    to: &mut SerializedRowGroupWriter<'_, Vec<u8>>,
    values: &[T::T],
    levels: Option<Levels<'_>>,
) -> Result<()> {
    let mut column = to.next_column()?.expect("a column of the schema");
    let (defined, repeated) = levels.map_or((None, None), |(defined, repeated)| {
        (Some(defined), repeated)
    });
    column.typed::<T>().write_batch(values, defined, repeated)?;
    column.close()
}

fn write_lists<T: DataType>(
    to: &mut SerializedRowGroupWriter<'_, Vec<u8>>,
    lists: &[Vec<T::T>],
) -> Result<()>
where
    T::T: Clone,
{
    let values: Vec<T::T> = lists.iter().flatten().cloned().collect();
    let defined = vec![1; values.len()];
    let of_list = |list: &Vec<T::T>| (0..list.len()).map(|place| i16::from(place > 0));
    let repeated: Vec<i16> = lists.iter().flat_map(of_list).collect();
    write::<T>(to, &values, Some((&defined, Some(&repeated))))
}

/// Writes a file, whole or not at all, whose row groups come one at a time, all with the same
/// columns.
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn write_table(
    path: &Path,
    groups: impl Iterator<Item = io::Result<Vec<(&'static str, Column)>>>,
) -> io::Result<()> {
    let mut writer = None;
    for group in groups {
        let group = group?;
        let writer = match &mut writer {
            Some(writer) => writer,
            none => none.insert(started(&group).map_err(io::Error::other)?),
        };
        let ended = (|| {
            let mut rows = writer.next_row_group()?;
            for (_, column) in &group {
                column.write(&mut rows)?;
            }
            rows.close().map(|_| ())
        })();
        ended.map_err(io::Error::other)?;
    }
    if let Some(writer) = writer {
        let bytes = writer.into_inner().map_err(io::Error::other)?;
        spd_files::atomic::write_file(path, &[&bytes])?;
    }
    Ok(())
}

fn started(group: &[(&str, Column)]) -> Result<SerializedFileWriter<Vec<u8>>> {
    let columns: Vec<String> = group
        .iter()
        .map(|(name, column)| column.declared(name))
        .collect();
    let schema = parse_message_type(&format!("message rows {{ {} }}", columns.join(" ")))?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
        // The version of the program that writes would make other bytes of the same harvest.
        .set_created_by("spd".to_owned())
        .build();
    SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties))
}
