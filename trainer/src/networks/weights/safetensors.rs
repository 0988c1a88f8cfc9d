//! The header of a safetensors file.

use std::collections::BTreeMap;
use std::fs::File;

use safetensors::tensor::Metadata;

use super::stored::{Stored, bytes_at, dense};

/// Longer headers are refused, as the library does.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// The tensors of a file of so many bytes, by name.
///
/// # Errors
///
/// The fault of its header, or of the file's length.
pub(super) fn tensors(file: &File, bytes: u64) -> Result<BTreeMap<String, Stored>, String> {
    if bytes < 8 {
        return Err(format!("{bytes} bytes are no header"));
    }
    let length = u64::from_le_bytes(bytes_at(file, 0, 8)?.as_chunks().0[0]);
    if length > MOST_HEADER_BYTES || length > bytes - 8 {
        return Err(format!(
            "a header of {length} bytes is said to be in its {bytes}"
        ));
    }
    let header = bytes_at(file, 8, length)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|err| err.to_string())?;
    let expected = (header.data_len() as u64).saturating_add(8 + length);
    if expected != bytes {
        return Err(format!("its header says {expected} bytes, it has {bytes}"));
    }
    let stored = |name: String| {
        let info = header.info(&name)?;
        let stored = Stored {
            dtype: info.dtype,
            strides: dense(&info.shape),
            dims: info.shape.clone(),
            start: 8 + length + info.data_offsets.0 as u64,
        };
        Some((name, stored))
    };
    Ok(header
        .offset_keys()
        .into_iter()
        .filter_map(stored)
        .collect())
}
