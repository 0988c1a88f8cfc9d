//! `manifest.json`: the files and tensors of a checkpoint, with their hashes.
//!
//! The file is one JSON object, `{"manifest":BODY,"xxh3_128":"HEX"}`, and a newline. `HEX` is the
//! hash of the bytes of `BODY`. The envelope is the same in all formats; the body depends on its
//! `format`.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::{CheckpointError, Dtype, FORMAT, Snapshot};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const META: &str = "meta.json";
pub(crate) const TENSORS: &str = "tensors.safetensors";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u64,
    pub(crate) step: u64,
    pub(crate) files: Files,
    /// In the order of the snapshot.
    pub(crate) tensors: Vec<TensorEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Files {
    #[serde(rename = "meta.json")]
    pub(crate) meta: FileEntry,
    #[serde(rename = "tensors.safetensors")]
    pub(crate) tensors: FileEntry,
    /// The shared file of frozen tensors, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) frozen: Option<FileEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub(crate) bytes: u64,
    pub(crate) xxh3_128: String,
}

impl FileEntry {
    /// The name of the file of frozen tensors with this hash.
    pub(crate) fn frozen_name(&self) -> String {
        format!("frozen-{}.safetensors", self.xxh3_128)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: u64,
    pub(crate) xxh3_128: String,
    /// Whether it is in the shared file of frozen tensors.
    #[serde(default, rename = "frozen", skip_serializing_if = "is_false")]
    pub(crate) is_frozen: bool,
}

/// Serde passes a reference.
fn is_false(flag: &bool) -> bool {
    !flag
}

/// The first format with a file of frozen tensors. A checkpoint without any is written in the
/// format before.
pub(crate) const FROZEN_SINCE: u64 = 2;

/// Why a manifest cannot be used.
#[derive(Debug, PartialEq)]
pub(crate) enum Unusable {
    Damaged(String),
    Format(u64),
}

/// Formats a hash as `xxhsum -H2` and Python's `xxhash.xxh3_128_hexdigest` do.
pub(crate) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

/// One entry for each tensor of a snapshot, hashed in memory.
///
/// # Errors
///
/// When the snapshot cannot be stored.
pub(crate) fn entries(snapshot: &Snapshot) -> Result<Vec<TensorEntry>, CheckpointError> {
    snapshot.check()?;
    let entries = snapshot.tensors.iter().map(|tensor| TensorEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        bytes: tensor.bytes.len() as u64,
        xxh3_128: hex(xxh3_128(&tensor.bytes)),
        is_frozen: tensor.is_frozen,
    });
    Ok(entries.collect())
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = serde_json::to_string(self).expect("a manifest is plain JSON");
        let hash = hex(xxh3_128(body.as_bytes()));
        format!("{{\"manifest\":{body},\"xxh3_128\":\"{hash}\"}}\n").into_bytes()
    }

    /// Decodes the output of [`Manifest::encode`], and rejects every other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Unusable> {
        let damaged = |reason: &str| Unusable::Damaged(format!("{MANIFEST} {reason}"));
        let (body, hash) = bytes
            .strip_prefix(b"{\"manifest\":")
            .and_then(|rest| rest.strip_suffix(b"\"}\n"))
            .and_then(|rest| rest.split_last_chunk::<32>())
            .and_then(|(rest, hash)| Some((rest.strip_suffix(b",\"xxh3_128\":\"")?, hash)))
            .ok_or_else(|| damaged("is cut short or is no manifest"))?;
        if hex(xxh3_128(body)).as_bytes() != hash {
            return Err(damaged("does not match its own hash"));
        }

        #[derive(Deserialize)]
        struct Stated {
            format: u64,
        }
        let Stated { format } = serde_json::from_slice(body)
            .map_err(|error| damaged(&format!("states no format: {error}")))?;
        if !(1..=FORMAT).contains(&format) {
            return Err(Unusable::Format(format));
        }
        serde_json::from_slice(body)
            .map_err(|error| damaged(&format!("is not what its format promises: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let file = FileEntry {
            bytes: 2,
            xxh3_128: hex(xxh3_128(b"{}")),
        };
        let tensor = TensorEntry {
            name: "h.0 \"V\"".into(),
            dtype: Dtype::Bf16,
            shape: vec![2, 3],
            bytes: 12,
            xxh3_128: hex(7),
            is_frozen: true,
        };
        Manifest {
            format: FORMAT,
            step: u64::MAX,
            files: Files {
                meta: file.clone(),
                tensors: file.clone(),
                frozen: Some(file),
            },
            tensors: vec![tensor],
        }
    }

    // The hash of the empty input is from the test vectors of the xxHash library.
    #[test]
    fn hashes_match_the_reference_tools() {
        assert_eq!(hex(xxh3_128(b"")), "99aa06d3014798d86001c324468d497f");
    }

    #[test]
    fn decode_inverts_encode() {
        assert_eq!(Manifest::decode(&manifest().encode()), Ok(manifest()));
        serde_json::from_slice::<serde_json::Value>(&manifest().encode()).unwrap();
    }

    #[test]
    fn every_flipped_bit_is_damage() {
        let mut bytes = manifest().encode();
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let decoded = Manifest::decode(&bytes);
            assert!(
                matches!(decoded, Err(Unusable::Damaged(_))),
                "bit {bit}: {decoded:?}"
            );
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_later_format_is_distinguished_from_damage() {
        let body = r#"{"format":3,"anything":"else"}"#;
        let hash = hex(xxh3_128(body.as_bytes()));
        let bytes = format!("{{\"manifest\":{body},\"xxh3_128\":\"{hash}\"}}\n");
        assert_eq!(Manifest::decode(bytes.as_bytes()), Err(Unusable::Format(3)));
    }
}
