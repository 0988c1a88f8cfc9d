//! The files: tensors by name, and what the JSON says about them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

use crate::harness::Skipped;

/// `<name>.json` and `<name>.safetensors`.
pub(super) struct Numbers {
    name: String,
    /// Metadata.
    pub(super) info: Json,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// A recorded tensor. Floats, integers and flags alike fit into f64.
#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) dims: Vec<usize>,
    pub(super) values: Vec<f64>,
}

impl Numbers {
    /// The numbers of a case, from the first of the [`folders`] that has them.
    ///
    /// # Errors
    ///
    /// When none has.
    ///
    /// # Panics
    ///
    /// When a file is there but is not what it should be.
    pub(super) fn open(name: &str) -> Result<Self, Skipped> {
        let folders = folders();
        let has = |folder: &&PathBuf| folder.join(format!("{name}.json")).is_file();
        let folder = folders.iter().find(has);
        let folder = folder.ok_or_else(|| absent(name, name))?;
        let read = |kind: &str| {
            let file = folder.join(format!("{name}.{kind}"));
            std::fs::read(&file).unwrap_or_else(|err| panic!("{}: {err}", file.display()))
        };
        let bytes = read("safetensors");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        Ok(Self {
            name: name.to_owned(),
            info: serde_json::from_slice(&read("json")).expect("a JSON file"),
            tensors: tensors
                .iter()
                .map(|(name, view)| {
                    let (dims, values) = (view.shape().to_vec(), values(view.dtype(), view.data()));
                    (name.to_owned(), Tensor { dims, values })
                })
                .collect(),
        })
    }

    /// What these numbers leave out of the recorded ones, by name.
    fn left_out(&self) -> impl Iterator<Item = &str> {
        let names = self.info["left_out"].as_array();
        names.into_iter().flatten().filter_map(Json::as_str)
    }

    /// Whether these numbers are a part of the recorded ones.
    pub(super) fn is_part(&self) -> bool {
        self.left_out().next().is_some()
    }

    /// Whether a part of the case is here.
    ///
    /// # Errors
    ///
    /// When it is left out.
    pub(super) fn need(&self, part: &str) -> Result<(), Skipped> {
        match self.left_out().any(|name| name == part) {
            true => Err(absent(&format!("{} {part}", self.name), &self.name)),
            false => Ok(()),
        }
    }

    /// What these numbers leave out of single steps.
    pub(super) fn terms_left_out(&self) -> Vec<Skipped> {
        let names = self.left_out().filter(|part| !WHOLE_TESTS.contains(part));
        names
            .map(|part| absent(&format!("{} {part}", self.name), &self.name))
            .collect()
    }

    pub(super) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// A tensor that a part of the recorded numbers may be without.
    pub(super) fn kept(&self, name: &str) -> Option<&Tensor> {
        match self.is_part() {
            true => self.find(name),
            false => Some(self.get(name)),
        }
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

/// Parts of a case that have a test of their own.
const WHOLE_TESTS: [&str; 3] = ["ce_kl", "checkpoint", "single steps"];

fn absent(what: &str, case: &str) -> Skipped {
    Skipped {
        what: what.to_owned(),
        absent: format!("shared/golden/{case}.json"),
    }
}

/// Where recorded numbers lie: all of them, and the repository's.
pub(super) fn folders() -> [PathBuf; 2] {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    [shared("golden"), kept]
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
