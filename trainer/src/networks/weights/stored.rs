//! A tensor in a file: what its numbers are, and where they lie.

use std::fs::File;
use std::os::unix::fs::FileExt;

use safetensors::Dtype;

/// Whether weights are read from numbers of a dtype.
pub(super) fn is_read(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stored {
    pub(super) dtype: Dtype,
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
