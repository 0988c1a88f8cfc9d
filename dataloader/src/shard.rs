//! A safetensors shard: the tensor `tokens`, U16 or U32, and `document_ends`, U64.

use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype as StoredDtype, Metadata, TensorInfo};

use crate::Dtype;
use crate::opened::Opened;
use crate::tokens::{Ends, TokenFile};
use crate::{DataError, publish};

/// Name of the tensor that holds the ids.
const TOKENS: &str = "tokens";
/// Name of the tensor that holds the exclusive end of each document, in tokens of this shard.
const DOCUMENT_ENDS: &str = "document_ends";

/// The name of the shard with this number.
pub(crate) fn file_name(number: usize) -> String {
    format!("tokens-{number:05}.safetensors")
}

/// Opens a shard and reads its header, but no tokens.
pub(crate) fn open(path: &Path) -> Result<TokenFile, DataError> {
    let opened = Opened::open(path)?;
    let (data, metadata) = read_header(&opened)?;
    let tensor = |name, dtypes: &[StoredDtype]| {
        find(&metadata, name, dtypes)
            .map(|info| data + info.data_offsets.0 as u64..data + info.data_offsets.1 as u64)
            .map_err(|fault| DataError::damaged(path, fault))
    };
    let token_bytes = tensor(TOKENS, &[StoredDtype::U16, StoredDtype::U32])?;
    let end_bytes = tensor(DOCUMENT_ENDS, &[StoredDtype::U64])?;
    let dtype = match metadata.info(TOKENS).map(|info| info.dtype) {
        Some(StoredDtype::U16) => Dtype::U16,
        _ => Dtype::U32,
    };
    Ok(TokenFile {
        opened,
        dtype,
        token_bytes,
        ends: Ends::Stored(end_bytes),
    })
}

/// Writes a shard into a directory that is not published yet.
///
/// - `tokens`: ids as they are stored, a multiple of the dtype's bytes
/// - `document_ends`: u64 little-endian each
pub(crate) fn write(
    path: &Path,
    dtype: Dtype,
    tokens: &[u8],
    document_ends: &[u8],
) -> Result<(), DataError> {
    let stored = match dtype {
        Dtype::U16 => StoredDtype::U16,
        Dtype::U32 => StoredDtype::U32,
    };
    let info = |dtype, bytes: Range<usize>, size| TensorInfo {
        dtype,
        shape: vec![bytes.len() / size],
        data_offsets: (bytes.start, bytes.end),
    };
    // The wider type first, so that both tensors are aligned.
    let ends = document_ends.len();
    let tensors = vec![
        (DOCUMENT_ENDS.to_owned(), info(StoredDtype::U64, 0..ends, 8)),
        (
            TOKENS.to_owned(),
            info(stored, ends..ends + tokens.len(), dtype.bytes()),
        ),
    ];
    let mut header = Metadata::new(None, tensors)
        .map_err(|fault| fault.to_string())
        .and_then(|metadata| serde_json::to_vec(&metadata).map_err(|fault| fault.to_string()))
        .map_err(|fault| DataError::damaged(path, format!("cannot be described: {fault}")))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let header_bytes = (header.len() as u64).to_le_bytes();
    publish::write_new(path, &[&header_bytes, &header, document_ends, tokens])
}

/// The offset of the data, and their description.
fn read_header(opened: &Opened) -> Result<(u64, Metadata), DataError> {
    let damaged = |fault| DataError::damaged(&opened.path, fault);
    let mut prefix = [0; 8];
    if opened.bytes < 8 {
        return Err(damaged(format!(
            "has {} bytes, too few for a safetensors file",
            opened.bytes
        )));
    }
    opened.read(0, &mut prefix)?;
    let header_bytes = u64::from_le_bytes(prefix);
    let rest = opened.bytes - 8;
    let Some(header) = usize::try_from(header_bytes)
        .ok()
        .filter(|_| header_bytes <= rest)
    else {
        return Err(damaged(format!(
            "a safetensors header of {header_bytes} bytes is promised, the file has {} bytes; was it \
             copied whole?",
            opened.bytes
        )));
    };
    if header > MOST_HEADER_BYTES {
        return Err(damaged(format!(
            "a safetensors header of {header_bytes} bytes is promised, {MOST_HEADER_BYTES} is the most; is \
             it a safetensors file?"
        )));
    }
    let mut header = vec![0; header];
    opened.read(8, &mut header)?;
    let metadata = described(&header, rest - header_bytes).map_err(damaged)?;
    Ok((8 + header_bytes, metadata))
}

/// The limit of the format.
const MOST_HEADER_BYTES: usize = 100_000_000;

/// The description of `found` bytes of data. The checks cannot overflow, so every offset lies
/// inside the file.
fn described(header: &[u8], found: u64) -> Result<Metadata, String> {
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|fault| format!("the safetensors header cannot be read: {fault}"))?;
    let promised = metadata.data_len() as u64;
    if promised != found {
        return Err(format!(
            "{promised} bytes of tensors are promised, {found} are there; was it copied whole?"
        ));
    }
    Ok(metadata)
}

fn find<'a>(
    metadata: &'a Metadata,
    name: &str,
    dtypes: &[StoredDtype],
) -> Result<&'a TensorInfo, String> {
    let info = metadata.info(name).ok_or_else(|| {
        format!("has no tensor `{name}`; shards hold `{TOKENS}` and `{DOCUMENT_ENDS}`")
    })?;
    if !dtypes.contains(&info.dtype) || info.shape.len() != 1 {
        return Err(format!(
            "tensor `{name}` is {:?} of {} dimensions, expected {dtypes:?} of one",
            info.dtype,
            info.shape.len()
        ));
    }
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Eight tensors of 2^61 - 1 bytes end at 2^64 - 8: adding the header's own length would
    // overflow.
    #[test]
    fn sizes_near_the_end_of_the_number_range_are_refused() {
        let size = (1_u64 << 61) - 1;
        let tensors: Vec<String> = (0..8)
            .map(|n| {
                let (start, end) = (n * size, (n + 1) * size);
                format!(
                    r#""t{n}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#
                )
            })
            .collect();
        let header = format!("{{{}}}", tensors.join(","));
        let fault = described(header.as_bytes(), 0).unwrap_err();
        assert_eq!(
            fault,
            "18446744073709551608 bytes of tensors are promised, 0 are there; was it copied whole?"
        );
    }

    #[test]
    fn a_tensor_of_another_dtype_is_refused() {
        let header = br#"{"tokens":{"dtype":"I64","shape":[0,3],"data_offsets":[0,0]}}"#;
        let metadata = described(header, 0).unwrap();
        assert_eq!(
            find(&metadata, "tokens", &[StoredDtype::U16, StoredDtype::U32]).unwrap_err(),
            "tensor `tokens` is I64 of 2 dimensions, expected [U16, U32] of one"
        );
        assert_eq!(
            find(&metadata, "document_ends", &[StoredDtype::U64]).unwrap_err(),
            "has no tensor `document_ends`; shards hold `tokens` and `document_ends`"
        );
    }
}
