//! The files: tensors by name, and what the JSON says about them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

/// `<name>.json` and `<name>.safetensors`.
pub(super) struct Numbers {
    /// Metadata.
    pub(super) info: Json,
    tensors: BTreeMap<String, Tensor>,
}

/// A recorded tensor. Floats, integers and flags alike fit into f64.
#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) dims: Vec<usize>,
    pub(super) values: Vec<f64>,
}

impl Numbers {
    /// `None`, and a line that says so, when there are no such numbers.
    ///
    /// # Panics
    ///
    /// When a file is there but is not what it should be.
    #[expect(
        clippy::print_stdout,
        reason = "a test that checked nothing should say so"
    )]
    pub(super) fn open(name: &str) -> Option<Self> {
        let file = |kind: &str| shared("golden").join(format!("{name}.{kind}"));
        let Ok(text) = std::fs::read(file("json")) else {
            println!(
                "golden {name}: no {}, nothing is compared",
                file("json").display()
            );
            return None;
        };
        let bytes = std::fs::read(file("safetensors")).expect("tensors beside the JSON");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        Some(Self {
            info: serde_json::from_slice(&text).expect("a JSON file"),
            tensors: tensors
                .iter()
                .map(|(name, view)| {
                    let (dims, values) = (view.shape().to_vec(), values(view.dtype(), view.data()));
                    (name.to_owned(), Tensor { dims, values })
                })
                .collect(),
        })
    }

    pub(super) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    pub(super) fn get(&self, name: &str) -> &Tensor {
        self.find(name)
            .unwrap_or_else(|| panic!("the golden file has `{name}`"))
    }

    /// Tensors whose name starts with `prefix`, which is taken off.
    pub(super) fn under<'s>(
        &'s self,
        prefix: &'s str,
    ) -> impl Iterator<Item = (&'s str, &'s Tensor)> {
        self.tensors
            .iter()
            .filter_map(move |(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)))
    }
}

impl Tensor {
    #[expect(clippy::cast_possible_truncation, reason = "it was an f32 in the file")]
    pub(super) fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|&value| value as f32).collect()
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it was a token id or a count in the file"
    )]
    pub(super) fn u32(&self) -> Vec<u32> {
        self.values.iter().map(|&value| value as u32).collect()
    }

    /// A matrix, its rows and columns exchanged.
    pub(super) fn transposed(&self) -> Self {
        let (rows, columns) = (self.dims[0], self.dims[1]);
        let column = |column| self.values.iter().skip(column).step_by(columns);
        Self {
            dims: vec![columns, rows],
            values: (0..columns).flat_map(column).copied().collect(),
        }
    }
}

/// Where what is shared lies: `golden`, `targets`.
pub(super) fn shared(folder: &str) -> PathBuf {
    match std::env::var_os("SPD_SHARED") {
        Some(shared) => Path::new(&shared).join(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../shared")
            .join(folder),
    }
}

fn values(dtype: Dtype, data: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => {
            let chunks = data.as_chunks().0.iter();
            chunks
                .map(|&bytes| f32::from_le_bytes(bytes).into())
                .collect()
        }
        #[expect(clippy::cast_precision_loss, reason = "token ids and counts are small")]
        Dtype::I64 => {
            let chunks = data.as_chunks().0.iter();
            chunks
                .map(|&bytes| i64::from_le_bytes(bytes) as f64)
                .collect()
        }
        Dtype::U8 => data.iter().map(|&byte| byte.into()).collect(),
        other => panic!("golden tensors are f32, i64 or u8, found {other:?}"),
    }
}
