//! Tensors where they lie in files: named, described, and read one at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;

use super::stored::{Stored, dense};
use super::{safetensors, torch};
use crate::fault::Fault;
use crate::rounded::rounded;

/// An open file, and its tensors by name.
struct Opened {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, Stored>,
}

/// The tensors of a file, or of the files of a directory.
pub(super) struct Stock {
    /// The request.
    path: PathBuf,
    files: Vec<Opened>,
    /// The file of each tensor, by name.
    names: BTreeMap<String, usize>,
}

/// The files of a directory that are looked for, in order: of each format a whole one, and what
/// says which parts there are.
const FILES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// Longer indexes of parts are refused: that of a hundred thousand tensors takes some ten million
/// bytes.
const MOST_INDEX_BYTES: u64 = 64 << 20;

/// Which part has which tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Stock {
    /// Opens a file, or the files of a directory in Hugging Face's layout.
    pub(super) fn open(path: &Path) -> Result<Self, Fault> {
        if !path.is_dir() {
            return Self::of_file(path, path);
        }
        let mut files = FILES.map(|name| path.join(name)).into_iter();
        match files.find(|file| file.try_exists().unwrap_or(true)) {
            Some(index) if index.extension().is_some_and(|end| end == "json") => {
                Self::of_parts(path, &index)
            }
            Some(file) => Self::of_file(path, &file),
            None => {
                let [whole, parts, other, others] = FILES;
                Err(Fault::BadInput(format!(
                    "{}: no weights in it; expected {whole}, {parts}, {other} or {others}",
                    path.display()
                )))
            }
        }
    }

    fn of_file(path: &Path, file: &Path) -> Result<Self, Fault> {
        let opened = Opened::open(file)?;
        Ok(Self {
            path: path.to_owned(),
            names: opened
                .tensors
                .keys()
                .map(|name| (name.clone(), 0))
                .collect(),
            files: vec![opened],
        })
    }

    fn of_parts(path: &Path, index_path: &Path) -> Result<Self, Fault> {
        let shown = index_path.display();
        let bad = |reason: String| Fault::BadInput(format!("{shown}: {reason}"));
        let bytes = spd_files::read_at_most(index_path, MOST_INDEX_BYTES)
            .map_err(|err| bad(format!("cannot be read: {err}")))?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|err| {
            bad(format!(
                "expected {{\"weight_map\": {{tensor: file, ...}}}}: {err}"
            ))
        })?;
        let (mut files, mut numbers, mut names) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (tensor, name) in index.weight_map {
            if name.contains(['/', '\\']) || name.starts_with('.') || name.is_empty() {
                return Err(bad(format!(
                    "`{}` is said to be in {name:?}, which is no name of a file beside it",
                    tensor.escape_debug()
                )));
            }
            let number = match numbers.get(&name) {
                Some(number) => *number,
                None => {
                    files.push(Opened::open(&path.join(&name))?);
                    numbers.insert(name.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if !files[number].tensors.contains_key(&tensor) {
                return Err(bad(format!(
                    "`{}` is said to be in {name}, which has no such tensor",
                    tensor.escape_debug()
                )));
            }
            names.insert(tensor, number);
        }
        Ok(Self {
            path: path.to_owned(),
            files,
            names,
        })
    }

    /// The request, as messages name it.
    pub(super) fn shown(&self) -> String {
        self.path.display().to_string()
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// A tensor by name.
    pub(super) fn get(&self, name: &str) -> Option<&Stored> {
        self.files[*self.names.get(name)?].tensors.get(name)
    }

    /// The numbers of a tensor, as f32.
    pub(super) fn read(&self, name: &str) -> Result<Vec<f32>, Fault> {
        let file = &self.files[self.names[name]];
        let stored = &file.tensors[name];
        let count = stored.dims.iter().product::<usize>();
        if count == 0 {
            return Ok(Vec::new());
        }
        // Both formats have made sure that the last element is in the file.
        let reach = stored.dims.iter().zip(&stored.strides);
        let span = 1 + reach.map(|(dim, stride)| (dim - 1) * stride).sum::<usize>();
        let size = stored.dtype.bitsize() / 8;
        let path = file.path.display();
        let mut bytes = Vec::new();
        // A sparse file may be longer than any memory.
        if bytes.try_reserve_exact(span * size).is_err() {
            return Err(Fault::BadInput(format!(
                "{path}: `{name}` is of {} bytes, which do not fit in memory",
                span * size
            )));
        }
        bytes.resize(span * size, 0);
        file.file
            .read_exact_at(&mut bytes, stored.start)
            .map_err(|err| Fault::BadInput(format!("{path}: `{name}` cannot be read: {err}")))?;
        let values = numbers(stored.dtype, &bytes);
        if stored.strides == dense(&stored.dims) {
            return Ok(values);
        }
        Ok(gathered(&values, stored))
    }
}

/// Elements of a view in the order of its indices.
fn gathered(values: &[f32], stored: &Stored) -> Vec<f32> {
    let mut offsets = vec![0];
    for (dim, stride) in stored.dims.iter().zip(&stored.strides) {
        let steps = |offset: &usize| {
            let offset = *offset;
            (0..*dim).map(move |at| offset + at * stride)
        };
        offsets = offsets.iter().flat_map(steps).collect();
    }
    offsets.into_iter().map(|at| values[at]).collect()
}

/// Little-endian numbers as f32.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => each(bytes, f32::from_le_bytes),
        Dtype::BF16 => each(bytes, |b| half::bf16::from_le_bytes(b).to_f32()),
        Dtype::F16 => each(bytes, |b| half::f16::from_le_bytes(b).to_f32()),
        Dtype::F64 => each(bytes, |b| rounded(f64::from_le_bytes(b))),
        _ => Vec::new(),
    }
}

fn each<const BYTES: usize>(bytes: &[u8], number: impl Fn([u8; BYTES]) -> f32) -> Vec<f32> {
    let all = bytes.as_chunks().0.iter();
    all.map(|&bytes| number(bytes)).collect()
}

impl Opened {
    fn open(path: &Path) -> Result<Self, Fault> {
        let shown = path.display();
        let bad = |reason: String| Fault::BadInput(format!("{shown}: {reason}"));
        let cannot =
            |err: std::io::Error| bad(format!("the target's weights cannot be read: {err}"));
        let file = spd_files::open(path).map_err(cannot)?;
        let bytes = file.metadata().map_err(cannot)?.len();
        let mut first = [0; 4];
        let is_short = bytes < 4;
        if !is_short {
            file.read_exact_at(&mut first, 0).map_err(cannot)?;
        }
        let tensors = match first {
            [b'P', b'K', 3, 4] => torch::tensors(&file, bytes).map_err(bad)?,
            [0x80, ..] if path.extension().is_some_and(|end| end != "safetensors") => {
                return Err(bad(
                    "a file of PyTorch before 1.6; load it with PyTorch and save it again"
                        .to_owned(),
                ));
            }
            _ => safetensors::tensors(&file, bytes)
                .map_err(|reason| bad(format!("not a safetensors file: {reason}")))?,
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            tensors,
        })
    }
}
