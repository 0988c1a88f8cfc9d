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

/// A tensor to be written.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
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
    let tensors = tensors(counts);
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
    let refused = |error: String| StateError::io(path, io::Error::other(error));
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

fn tensors(counts: &Counts) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    let parts = counts.parts.iter();
    let parts: Vec<u64> = parts
        .flat_map(|&(source, part)| [source.into(), part])
        .collect();
    put(&mut all, "parts".into(), (Dtype::U64, 2), &parts);
    put(&mut all, "input".into(), (Dtype::U64, 1), &counts.all_input);
    put(&mut all, "next".into(), (Dtype::U64, 1), &counts.all_next);
    let mut first = 0;
    for (site, of) in counts.setup.sites.iter().zip(&counts.sites) {
        let name = |what: &str| format!("{what}/{}", site.name);
        put(&mut all, name("active"), (Dtype::U64, 1), &of.active);
        put(
            &mut all,
            name("importance"),
            (Dtype::I64, 1),
            &of.importance,
        );
        let [importances, activations] = &of.histograms;
        put(
            &mut all,
            name("importance_histogram"),
            (Dtype::U64, IMPORTANCE_BINS),
            importances,
        );
        if site.activations {
            put(
                &mut all,
                name("activation_histogram"),
                (Dtype::U64, ACTIVATION_BINS),
                activations,
            );
            for (what, sums) in ["activation", "activation_active"]
                .iter()
                .zip(&of.activation)
            {
                let halves: Vec<u64> = sums.iter().copied().flat_map(halves).collect();
                put(&mut all, name(what), (Dtype::U64, 2), &halves);
            }
        }
        let components = first..first + site.components;
        for (what, rows) in [
            ("input", &counts.input),
            ("next", &counts.next),
            ("pairs", &counts.pairs),
        ] {
            put_rows(&mut all, &name(what), &rows[components.clone()]);
        }
        for (what, examples) in [("sample", &of.sample), ("strongest", &of.strongest)] {
            put_examples(&mut all, &name(what), (examples, site.components));
        }
        first = components.end;
    }
    all
}

/// The halves of a number, the lower one first.
fn halves(number: u128) -> [u64; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a number")]
    let halves = [number as u64, (number >> 64) as u64];
    halves
}

fn put<T: Pod>(
    all: &mut BTreeMap<String, Tensor>,
    name: String,
    (dtype, columns): (Dtype, usize),
    values: &[T],
) {
    let rows = values.len() / columns;
    let tensor = Tensor {
        dtype,
        shape: if columns == 1 {
            vec![rows]
        } else {
            vec![rows, columns]
        },
        bytes: bytemuck::cast_slice(values).to_vec(),
    };
    all.insert(name, tensor);
}

fn ends(lengths: impl Iterator<Item = usize>) -> Vec<u64> {
    let mut end = 0;
    let ends = lengths.map(|length| {
        end += length as u64;
        end
    });
    ends.collect()
}

fn put_rows(all: &mut BTreeMap<String, Tensor>, name: &str, rows: &[Row]) {
    let keys: Vec<u32> = rows.iter().flat_map(|row| &row.keys).copied().collect();
    let counts: Vec<u64> = rows.iter().flat_map(|row| &row.counts).copied().collect();
    let ends = ends(rows.iter().map(|row| row.keys.len()));
    put(all, format!("{name}/ends"), (Dtype::U64, 1), &ends);
    put(all, format!("{name}/keys"), (Dtype::U32, 1), &keys);
    put(all, format!("{name}/counts"), (Dtype::U64, 1), &counts);
}

fn put_examples(
    all: &mut BTreeMap<String, Tensor>,
    name: &str,
    (examples, components): (&Examples, usize),
) {
    let ends = ends((0..components).map(|component| examples.of(component).len()));
    put(all, format!("{name}/ends"), (Dtype::U64, 1), &ends);
    let each: Vec<&Example> = (0..components).flat_map(|c| examples.of(c)).collect();
    let of = |field: fn(&Example) -> f32| each.iter().map(|e| field(e)).collect::<Vec<f32>>();
    let sources: Vec<u16> = each.iter().map(|example| example.source).collect();
    let rows: Vec<u64> = each.iter().map(|example| example.row).collect();
    let positions: Vec<u32> = each.iter().map(|example| example.position).collect();
    let windows: Vec<u8> = each.iter().flat_map(|example| example.window).collect();
    put(all, format!("{name}/source"), (Dtype::U16, 1), &sources);
    put(all, format!("{name}/row"), (Dtype::U64, 1), &rows);
    put(all, format!("{name}/position"), (Dtype::U32, 1), &positions);
    put(all, format!("{name}/lot"), (Dtype::F32, 1), &of(|e| e.lot));
    put(
        all,
        format!("{name}/logit"),
        (Dtype::F32, 1),
        &of(|e| e.logit),
    );
    put(
        all,
        format!("{name}/importance"),
        (Dtype::F32, 1),
        &of(|e| e.importance),
    );
    put(all, format!("{name}/window"), (Dtype::U8, WINDOW), &windows);
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
    let mut by_name: BTreeMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
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
    let mut from = Reader { of: &mut by_name };
    let parts: Vec<u64> = from.values("parts", Dtype::U64, None)?;
    let parts = parts.as_chunks::<2>().0.iter();
    let parts = parts.map(|&[source, part]| Ok((u16::try_from(source)?, part)));
    let parts: Result<BTreeSet<_>, std::num::TryFromIntError> = parts.collect();
    counts.parts = parts.map_err(|_| "parts of a dataset that is not there".to_owned())?;
    let vocab = meta.setup.vocab;
    counts.all_input = from.values("input", Dtype::U64, Some(vocab))?;
    counts.all_next = from.values("next", Dtype::U64, Some(vocab))?;
    let mut first = 0;
    for (index, site) in meta.setup.sites.iter().enumerate() {
        let (name, c) = (
            |what: &str| format!("{what}/{}", site.name),
            site.components,
        );
        let of = &mut counts.sites[index];
        of.active = from.values(&name("active"), Dtype::U64, Some(c))?;
        of.importance = from.values(&name("importance"), Dtype::I64, Some(c))?;
        let bins = c * IMPORTANCE_BINS;
        of.histograms[0] = from.values(&name("importance_histogram"), Dtype::U64, Some(bins))?;
        if site.activations {
            let bins = c * ACTIVATION_BINS;
            of.histograms[1] =
                from.values(&name("activation_histogram"), Dtype::U64, Some(bins))?;
            for (what, sums) in ["activation", "activation_active"]
                .iter()
                .zip(&mut of.activation)
            {
                let halves: Vec<u64> = from.values(&name(what), Dtype::U64, Some(2 * c))?;
                let halves = halves.as_chunks::<2>().0.iter();
                *sums = halves
                    .map(|&[low, high]| u128::from(low) | u128::from(high) << 64)
                    .collect();
            }
        }
        for (what, examples) in [("sample", &mut of.sample), ("strongest", &mut of.strongest)] {
            let all = from.examples(&name(what), c, meta.setup.positions)?;
            for (component, all) in all.into_iter().enumerate() {
                examples.set(component, all);
            }
        }
        for (what, rows, width) in [
            ("input", &mut counts.input, vocab),
            ("next", &mut counts.next, vocab),
            ("pairs", &mut counts.pairs, components),
        ] {
            let read = from.rows(&name(what), c, width)?;
            rows[first..first + c].clone_from_slice(&read);
        }
        first += c;
    }
    Ok((counts, meta.about))
}

/// Takes tensors out of a file.
struct Reader<'r, 'b> {
    of: &'r mut BTreeMap<String, TensorView<'b>>,
}

impl Reader<'_, '_> {
    fn values<T: Pod>(
        &mut self,
        name: &str,
        dtype: Dtype,
        len: Option<usize>,
    ) -> Result<Vec<T>, String> {
        let tensor = self.of.remove(name).ok_or_else(|| format!("no `{name}`"))?;
        let values = tensor.data().chunks_exact(size_of::<T>());
        let values: Vec<T> = values.map(bytemuck::pod_read_unaligned).collect();
        if tensor.dtype() != dtype || len.is_some_and(|len| len != values.len()) {
            return Err(format!(
                "`{name}` of {:?} {:?}",
                tensor.dtype(),
                tensor.shape()
            ));
        }
        Ok(values)
    }

    /// The ends of the values of each component, and all of them cut there.
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

    fn rows(&mut self, name: &str, components: usize, width: usize) -> Result<Vec<Row>, String> {
        let ends: Vec<u64> = self.values(&format!("{name}/ends"), Dtype::U64, Some(components))?;
        let keys: Vec<u32> = self.values(&format!("{name}/keys"), Dtype::U32, None)?;
        let len = Some(keys.len());
        let counts: Vec<u64> = self.values(&format!("{name}/counts"), Dtype::U64, len)?;
        let keys = Self::cut(&ends, &keys, name)?;
        let counts = Self::cut(&ends, &counts, name)?;
        let rows = keys.into_iter().zip(counts).map(|(keys, counts)| {
            let is_sorted = keys.is_sorted_by(|a, b| a < b);
            let fits = keys.last().is_none_or(|&last| (last as usize) < width);
            if !is_sorted || !fits {
                return Err(format!("`{name}` with other keys"));
            }
            Ok(Row { keys, counts })
        });
        rows.collect()
    }

    fn examples(
        &mut self,
        name: &str,
        components: usize,
        positions: usize,
    ) -> Result<Vec<Vec<Example>>, String> {
        let ends: Vec<u64> = self.values(&format!("{name}/ends"), Dtype::U64, Some(components))?;
        let rows: Vec<u64> = self.values(&format!("{name}/row"), Dtype::U64, None)?;
        let len = Some(rows.len());
        let sources: Vec<u16> = self.values(&format!("{name}/source"), Dtype::U16, len)?;
        let places: Vec<u32> = self.values(&format!("{name}/position"), Dtype::U32, len)?;
        let [lots, logits, importances] = ["lot", "logit", "importance"]
            .map(|what| self.values::<f32>(&format!("{name}/{what}"), Dtype::F32, len));
        let (lots, logits, importances) = (lots?, logits?, importances?);
        let windows = Some(rows.len() * WINDOW);
        let windows: Vec<u8> = self.values(&format!("{name}/window"), Dtype::U8, windows)?;
        let windows = windows.as_chunks::<WINDOW>().0;
        if places.iter().any(|&place| place as usize >= positions) {
            return Err(format!("`{name}` with other positions"));
        }
        let examples: Vec<Example> = (0..rows.len())
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
        Self::cut(&ends, &examples, name)
    }
}
