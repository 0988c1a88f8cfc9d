//! `harvest.safetensors`: the counts of a harvest, to go on from, to merge, and to read as arrays.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::counts::{ACTIVATION_BINS, Counts, IMPORTANCE_BINS};
use crate::examples::{Example, Examples, WINDOW};
use crate::setup::Setup;
use crate::sparse::Row;

/// The version of the files of a harvest.
pub const FORMAT: u32 = 1;

/// The entry of the file's metadata.
const KEY: &str = "harvest";

/// An error of reading or writing the counts of a harvest.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file that cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// A file that is no harvest, or not a whole one.
    #[error(
        "{path}: expected the counts of a harvest, found {found}; remove it, and harvest again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In words.
        found: String,
    },
}

impl StateError {
    pub(crate) fn io(path: &Path, error: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            error,
        }
    }
}

/// The metadata of the file.
#[derive(Serialize, Deserialize)]
struct Meta {
    version: u32,
    setup: Setup,
    about: Value,
    positions: u64,
    /// Of the bytes of all tensors, in the order of their names.
    xxh3: String,
}

/// The part of the metadata that all formats have.
#[derive(Deserialize)]
struct Stated {
    version: u32,
}

/// A number of a tensor.
trait Element: Pod {
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($of:ty: $DTYPE:ident,)*) => {
        $(impl Element for $of {
            const DTYPE: Dtype = Dtype::$DTYPE;
        })*
    };
}

elements! { u8: U8, u16: U16, u32: U32, u64: U64, i64: I64, f32: F32, }

/// A tensor to be written.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The tensors of a file, by name: of one that is written, those so far; of one that is read, those
/// that are not taken yet.
enum Tensors<'b> {
    To(&'b mut BTreeMap<String, Tensor>),
    From(BTreeMap<String, TensorView<'b>>),
}

/// Writes the counts, whole or not at all.
///
/// - `about`: the run, its checkpoint and its datasets, as [`load`] returns them
///
/// # Errors
///
/// When the disk refuses.
pub fn save(path: &Path, counts: &mut Counts, about: &Value) -> Result<(), StateError> {
    counts.settle();
    let refused = |error: String| StateError::io(path, io::Error::other(error));
    let mut tensors = BTreeMap::new();
    Tensors::To(&mut tensors).counts(counts).map_err(refused)?;
    let mut hash = Xxh3::new();
    for (name, tensor) in &tensors {
        hash.update(name.as_bytes());
        hash.update(&tensor.bytes);
    }
    let meta = Meta {
        version: FORMAT,
        setup: counts.setup.clone(),
        about: about.clone(),
        positions: counts.positions,
        xxh3: format!("{:016x}", hash.digest()),
    };
    let meta = serde_json::to_string(&meta).map_err(|error| refused(error.to_string()))?;
    let views = tensors.iter().map(|(name, tensor)| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
        view.map(|view| (name.as_str(), view))
    });
    let views: Result<Vec<_>, _> = views.collect();
    let views = views.map_err(|error| refused(error.to_string()))?;
    let meta = [(KEY.to_owned(), meta)];
    let bytes = safetensors::serialize(views, Some(meta.into()));
    let bytes = bytes.map_err(|error| refused(error.to_string()))?;
    spd_files::atomic::write_file(path, &[&bytes]).map_err(|error| StateError::io(path, error))
}

/// Reads counts, and what they are of.
///
/// # Errors
///
/// When the file cannot be read, is no harvest or is not whole.
pub fn load(path: &Path) -> Result<(Counts, Value), StateError> {
    let bytes = spd_files::read(path).map_err(|error| StateError::io(path, error))?;
    parsed(&bytes).map_err(|found| StateError::Damaged {
        path: path.to_owned(),
        found,
    })
}

fn parsed(bytes: &[u8]) -> Result<(Counts, Value), String> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    let meta = header.metadata().as_ref().and_then(|meta| meta.get(KEY));
    let meta = meta.ok_or("other tensors")?;
    let unknown = |error| format!("its settings ({error})");
    // A later format may hold other settings.
    let Stated { version } = serde_json::from_str(meta).map_err(unknown)?;
    if version != FORMAT {
        return Err(format!(
            "version {version}, and this program reads {FORMAT}"
        ));
    }
    let meta: Meta = serde_json::from_str(meta).map_err(unknown)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let by_name: BTreeMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
    let mut hash = Xxh3::new();
    for (name, tensor) in &by_name {
        hash.update(name.as_bytes());
        hash.update(tensor.data());
    }
    if format!("{:016x}", hash.digest()) != meta.xxh3 {
        return Err("other bytes than were written".to_owned());
    }
    let sizes = meta.setup.sites.iter().map(|site| site.components);
    let components = sizes.fold(0_usize, usize::saturating_add);
    // A harvest of so many would not fit into the file.
    if components > bytes.len() || meta.setup.vocab > bytes.len() || meta.setup.positions == 0 {
        return Err("settings that do not fit its tensors".to_owned());
    }
    let mut counts = Counts::new(meta.setup.clone());
    counts.positions = meta.positions;
    Tensors::From(by_name).counts(&mut counts)?;
    Ok((counts, meta.about))
}

impl Tensors<'_> {
    /// Writes all numbers of counts, or reads them.
    fn counts(&mut self, counts: &mut Counts) -> Result<(), String> {
        let setup = counts.setup.clone();
        let (components, vocab) = (setup.components(), setup.vocab);
        let parts = counts.parts.iter();
        let mut parts: Vec<u64> = parts
            .flat_map(|&(source, part)| [source.into(), part])
            .collect();
        self.values("parts", 2, None, &mut parts)?;
        let parts = parts.as_chunks::<2>().0.iter();
        let parts = parts.map(|&[source, part]| Ok((u16::try_from(source)?, part)));
        let parts: Result<BTreeSet<_>, std::num::TryFromIntError> = parts.collect();
        counts.parts = parts.map_err(|_| "parts of a dataset that is not there".to_owned())?;
        self.values("input", 1, Some(vocab), &mut counts.all_input)?;
        self.values("next", 1, Some(vocab), &mut counts.all_next)?;
        let mut first = 0;
        for (site, of) in setup.sites.iter().zip(&mut counts.sites) {
            let (name, c) = (
                |what: &str| format!("{what}/{}", site.name),
                site.components,
            );
            self.values(&name("active"), 1, Some(c), &mut of.active)?;
            self.values(&name("importance"), 1, Some(c), &mut of.importance)?;
            let [importances, activations] = &mut of.histograms;
            let bins = IMPORTANCE_BINS;
            self.values(&name("importance_histogram"), bins, Some(c), importances)?;
            if site.activations {
                let bins = ACTIVATION_BINS;
                self.values(&name("activation_histogram"), bins, Some(c), activations)?;
                for (what, sums) in ["activation", "activation_active"]
                    .iter()
                    .zip(&mut of.activation)
                {
                    let mut halves: Vec<u64> = sums.iter().copied().flat_map(halves).collect();
                    self.values(&name(what), 2, Some(c), &mut halves)?;
                    let halves = halves.as_chunks::<2>().0.iter();
                    *sums = halves
                        .map(|&[low, high]| u128::from(low) | u128::from(high) << 64)
                        .collect();
                }
            }
            for (what, examples) in [("sample", &mut of.sample), ("strongest", &mut of.strongest)] {
                self.examples(&name(what), examples, (c, setup.positions))?;
            }
            for (what, rows, width) in [
                ("input", &mut counts.input, vocab),
                ("next", &mut counts.next, vocab),
                ("pairs", &mut counts.pairs, components),
            ] {
                self.rows(&name(what), &mut rows[first..first + c], width)?;
            }
            first += c;
        }
        Ok(())
    }

    /// Writes the values of a tensor, or reads them.
    ///
    /// - `len`: rows of so many columns, where that is known
    fn values<T: Element>(
        &mut self,
        name: &str,
        columns: usize,
        len: Option<usize>,
        values: &mut Vec<T>,
    ) -> Result<(), String> {
        let all = match self {
            Self::To(all) => {
                let rows = values.len() / columns;
                let tensor = Tensor {
                    dtype: T::DTYPE,
                    shape: if columns == 1 {
                        vec![rows]
                    } else {
                        vec![rows, columns]
                    },
                    bytes: bytemuck::cast_slice(values).to_vec(),
                };
                all.insert(name.to_owned(), tensor);
                return Ok(());
            }
            Self::From(all) => all,
        };
        let tensor = all.remove(name).ok_or_else(|| format!("no `{name}`"))?;
        let found = tensor.data().chunks_exact(size_of::<T>());
        *values = found.map(bytemuck::pod_read_unaligned).collect();
        if tensor.dtype() != T::DTYPE || len.is_some_and(|len| len * columns != values.len()) {
            return Err(format!(
                "`{name}` of {:?} {:?}",
                tensor.dtype(),
                tensor.shape()
            ));
        }
        Ok(())
    }

    /// Writes rows of counts by key, or reads them.
    ///
    /// - `width`: above every key
    fn rows(&mut self, name: &str, rows: &mut [Row], width: usize) -> Result<(), String> {
        let mut ends = ends(rows.iter().map(|row| row.keys.len()));
        let mut keys: Vec<u32> = rows.iter().flat_map(|row| &row.keys).copied().collect();
        let mut counts: Vec<u64> = rows.iter().flat_map(|row| &row.counts).copied().collect();
        self.values(&format!("{name}/ends"), 1, Some(rows.len()), &mut ends)?;
        self.values(&format!("{name}/keys"), 1, None, &mut keys)?;
        self.values(&format!("{name}/counts"), 1, Some(keys.len()), &mut counts)?;
        if matches!(self, Self::To(_)) {
            return Ok(());
        }
        let keys = cut(&ends, &keys, name)?;
        let counts = cut(&ends, &counts, name)?;
        for ((row, keys), counts) in rows.iter_mut().zip(keys).zip(counts) {
            let is_sorted = keys.is_sorted_by(|a, b| a < b);
            let fits = keys.last().is_none_or(|&last| (last as usize) < width);
            if !is_sorted || !fits {
                return Err(format!("`{name}` with other keys"));
            }
            *row = Row { keys, counts };
        }
        Ok(())
    }

    /// Writes the examples of each component, or reads them.
    ///
    /// - `positions`: of a row
    fn examples(
        &mut self,
        name: &str,
        examples: &mut Examples,
        (components, positions): (usize, usize),
    ) -> Result<(), String> {
        let mut ends = ends((0..components).map(|component| examples.of(component).len()));
        let each: Vec<&Example> = (0..components).flat_map(|c| examples.of(c)).collect();
        let of = |field: fn(&Example) -> f32| each.iter().map(|&e| field(e)).collect::<Vec<f32>>();
        let mut sources: Vec<u16> = each.iter().map(|example| example.source).collect();
        let mut rows: Vec<u64> = each.iter().map(|example| example.row).collect();
        let mut places: Vec<u32> = each.iter().map(|example| example.position).collect();
        let mut windows: Vec<u8> = each.iter().flat_map(|example| example.window).collect();
        let mut lots = of(|example| example.lot);
        let mut logits = of(|example| example.logit);
        let mut importances = of(|example| example.importance);
        let name_of = |what: &str| format!("{name}/{what}");
        self.values(&name_of("ends"), 1, Some(components), &mut ends)?;
        self.values(&name_of("row"), 1, None, &mut rows)?;
        let len = Some(rows.len());
        self.values(&name_of("source"), 1, len, &mut sources)?;
        self.values(&name_of("position"), 1, len, &mut places)?;
        self.values(&name_of("lot"), 1, len, &mut lots)?;
        self.values(&name_of("logit"), 1, len, &mut logits)?;
        self.values(&name_of("importance"), 1, len, &mut importances)?;
        self.values(&name_of("window"), WINDOW, len, &mut windows)?;
        if matches!(self, Self::To(_)) {
            return Ok(());
        }
        let windows = windows.as_chunks::<WINDOW>().0;
        if places.iter().any(|&place| place as usize >= positions) {
            return Err(format!("`{name}` with other positions"));
        }
        let all: Vec<Example> = (0..rows.len())
            .map(|at| Example {
                source: sources[at],
                row: rows[at],
                position: places[at],
                lot: lots[at],
                logit: logits[at],
                importance: importances[at],
                window: windows[at],
            })
            .collect();
        for (component, all) in cut(&ends, &all, name)?.into_iter().enumerate() {
            examples.set(component, all);
        }
        Ok(())
    }
}

/// The halves of a number, the lower one first.
fn halves(number: u128) -> [u64; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a number")]
    let halves = [number as u64, (number >> 64) as u64];
    halves
}

fn ends(lengths: impl Iterator<Item = usize>) -> Vec<u64> {
    let mut end = 0;
    let ends = lengths.map(|length| {
        end += length as u64;
        end
    });
    ends.collect()
}

/// The values of each component, of all of them and the ends of each.
fn cut<T: Clone>(ends: &[u64], all: &[T], name: &str) -> Result<Vec<Vec<T>>, String> {
    let mut start = 0;
    let cut = ends.iter().map(|&end| {
        let end = usize::try_from(end).ok();
        let of = end.and_then(|end| Some((end, all.get(start..end)?)));
        let (end, of) = of.ok_or_else(|| format!("`{name}` with other ends"))?;
        start = end;
        Ok(of.to_vec())
    });
    cut.collect()
}
