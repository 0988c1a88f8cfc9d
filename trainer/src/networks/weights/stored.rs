//! A tensor in a file: what its numbers are, and where they lie.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// The dtype of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum StoredDtype {
    F64,
    F32,
    F16,
    Bf16,
    /// None that weights are read from, by name.
    Other(&'static str),
}

impl StoredDtype {
    /// As safetensors calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Other(name) => name,
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Other(_) => 1,
        }
    }
}

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stored {
    pub(super) dtype: StoredDtype,
    pub(super) dims: Vec<usize>,
    /// Elements from one index of each dimension to the next.
    pub(super) strides: Vec<usize>,
    /// Byte of the file where its first element begins.
    pub(super) start: u64,
}

/// So many bytes of a file, from one on.
///
/// # Errors
///
/// When the disk refuses, or the file ends before.
pub(super) fn bytes_at(file: &File, start: u64, count: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; usize::try_from(count).map_err(|err| err.to_string())?];
    file.read_exact_at(&mut bytes, start)
        .map_err(|err| format!("it cannot be read: {err}"))?;
    Ok(bytes)
}

/// Strides of a tensor whose elements lie one after the other.
pub(super) fn dense(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1_usize; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = strides[at].saturating_mul(dims[at]);
    }
    strides
}
