//! The state that a resume needs, as names, bytes and JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::CheckpointError;

/// A run after one step, in host memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Optimizer steps done.
    pub step: u64,
    /// Everything but the tensors: phase, data position, seeds, resolved config, mark of the
    /// metrics spool.
    pub meta: BTreeMap<String, Value>,
    /// Parameters, moments and adversary state, in the caller's order.
    pub tensors: Vec<Tensor>,
}

/// An array with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Unique in its snapshot; neither empty nor `__metadata__`, which safetensors reserves.
    pub name: String,
    /// Type of an element.
    pub dtype: Dtype,
    /// Lengths of the dimensions, outermost first; none for a scalar. A length may be 0.
    pub shape: Vec<usize>,
    /// The elements in row-major order, little-endian: `dtype.bytes()` times the product of `shape`
    /// bytes.
    pub bytes: Vec<u8>,
    /// Whether it is the same in every snapshot of a run, and stored once for all.
    pub is_frozen: bool,
}

/// Type of an element, under its safetensors name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    U64,
    U32,
    U16,
    U8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::U16 => 2,
            Self::U8 => 1,
        }
    }

    /// Bytes of an array of this type, or `None` if no machine could address it.
    pub(crate) fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        shape
            .iter()
            .try_fold(self.bytes(), |bytes, &extent| bytes.checked_mul(extent))
    }
}

impl Snapshot {
    /// Checks that the snapshot can be stored.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Tensor`] names the first tensor whose bytes do not fill its shape, or
    /// whose name is invalid or repeated.
    pub(crate) fn check(&self) -> Result<(), CheckpointError> {
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            let fault = if tensor.name.is_empty() || tensor.name == "__metadata__" {
                "has a name that safetensors does not allow; choose another".to_owned()
            } else if !names.insert(&tensor.name) {
                "is there twice; give each its own name".to_owned()
            } else if tensor.dtype.bytes_of(&tensor.shape) != Some(tensor.bytes.len()) {
                format!(
                    "has {} bytes, which do not fill {:?} of shape {:?}",
                    tensor.bytes.len(),
                    tensor.dtype,
                    tensor.shape
                )
            } else {
                continue;
            };
            return Err(CheckpointError::Tensor {
                step: self.step,
                name: tensor.name.clone(),
                fault,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(tensors: &[(&str, &[usize], usize)]) -> Option<String> {
        let tensors = tensors
            .iter()
            .map(|&(name, shape, bytes)| Tensor {
                name: name.into(),
                dtype: Dtype::F32,
                shape: shape.into(),
                bytes: vec![0; bytes],
                is_frozen: false,
            })
            .collect();
        let snapshot = Snapshot {
            step: 9,
            tensors,
            ..Snapshot::default()
        };
        snapshot.check().err().map(|error| error.to_string())
    }

    #[test]
    fn bytes_must_fill_the_shape() {
        assert_eq!(
            fault(&[("a", &[2, 3], 24), ("scalar", &[], 4), ("none", &[0, 7], 0)]),
            None
        );
        assert_eq!(
            fault(&[("a", &[2, 3], 24), ("b", &[2, 3], 20)]).unwrap(),
            "step 9: tensor `b` has 20 bytes, which do not fill F32 of shape [2, 3]"
        );
        assert!(fault(&[("huge", &[usize::MAX, 2], 8)]).is_some());
    }

    #[test]
    fn names_must_be_unique() {
        assert_eq!(
            fault(&[("a", &[], 4), ("a", &[], 4)]).unwrap(),
            "step 9: tensor `a` is there twice; give each its own name"
        );
        assert_eq!(
            fault(&[("__metadata__", &[], 4)]).unwrap(),
            "step 9: tensor `__metadata__` has a name that safetensors does not allow; choose another"
        );
        assert!(fault(&[("", &[], 4)]).is_some());
    }
}
