//! The state of a run between two steps, as a checkpoint holds it: every tensor of the store under
//! its own name, which is the reference's (`_components.<site>.V`, `_ci_fns.<site>.layers.0.W`,
//! where the site's path has dashes for dots, and `target_model.<tensor>`), and AdamW's moments as
//! `adamw.first.<tensor>` and `adamw.second.<tensor>`. A tied site has no tensors; if it has
//! updates of its own, its moments are there, in the shape of the tensors that it shares. The state
//! of a loss is `losses.<kind>.<tensor>`: the same on all ranks, or the rows of all ranks in the
//! order of the batch.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context;
use half::bf16;
use serde_json::Value;
use spd_checkpoint::{CheckpointError, Dtype, Snapshot, Tensor, newest_step, write_frozen};
use spd_engine::{Named, Store, Values};
use spd_tracker::Mark;

use crate::fault::Fault;
use crate::resume::{self, Ingredient};
use crate::run_file::Run;

/// The names of tensors that no step changes: those of the target.
pub(crate) fn frozen(store: &Store) -> BTreeSet<String> {
    let slots = store.slots().filter(|&slot| store.is_frozen(slot));
    slots.map(|slot| store.name(slot).to_owned()).collect()
}

/// Has the checkpoints of a root find the frozen tensors that they share, where that file is
/// damaged or gone.
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn mend_frozen(root: &Path, store: &Store) -> Result<(), CheckpointError> {
    let names = frozen(store);
    if names.is_empty() || newest_step(root).is_none() {
        return Ok(());
    }
    let slots = store.lasting().filter(|&slot| store.is_frozen(slot));
    let tensors: Vec<Named<'_>> = slots.map(|slot| store.named(slot)).collect();
    let mut snapshot = Snapshot::default();
    fill(&mut snapshot, &tensors, &names, 0);
    write_frozen(root, &snapshot)
}

/// Copies tensors into a snapshot, into its old buffers where it has them.
///
/// - `frozen`: those that no step changes, which a snapshot that has them keeps
pub(crate) fn fill(
    snapshot: &mut Snapshot,
    tensors: &[Named<'_>],
    frozen: &BTreeSet<String>,
    step: u64,
) {
    snapshot.step = step;
    snapshot.tensors.resize_with(tensors.len(), || Tensor {
        name: String::new(),
        dtype: Dtype::F32,
        shape: Vec::new(),
        bytes: Vec::new(),
        is_frozen: false,
    });
    for (tensor, from) in snapshot.tensors.iter_mut().zip(tensors) {
        if tensor.is_frozen && tensor.name == from.name {
            continue;
        }
        tensor.is_frozen = frozen.contains(from.name);
        tensor.name.clear();
        tensor.name.push_str(from.name);
        tensor.dtype = dtype(from.values);
        tensor.shape.clone_from(&from.ty.dims);
        tensor.bytes.clear();
        tensor.bytes.extend(from.values.bytes());
    }
}

// Bytes go from memory to files, and back, as they are.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "checkpoints are little-endian"
);

fn dtype(values: Values<'_>) -> Dtype {
    match values {
        Values::F32(_) => Dtype::F32,
        Values::Bf16(_) => Dtype::Bf16,
    }
}

/// The first value in which the run of a checkpoint is another. The values of a run file count, not
/// its bytes.
fn differs(snapshot: &Snapshot, config: &str) -> Option<String> {
    let there = snapshot.meta.get("config").and_then(Value::as_str);
    if there == Some(config) {
        return None;
    }
    let runs = there.and_then(|there| {
        Some((
            Run::from_resolved(config).ok()?,
            Run::from_resolved(there).ok()?,
        ))
    });
    match runs {
        Some((here, there)) => here.differences(&there).into_iter().next(),
        None => Some("it holds another run".to_owned()),
    }
}

/// Copies a snapshot into the store, of sharded tensors the rows that the store holds; returns its
/// step and where its metrics ended.
///
/// # Errors
///
/// Bad input, when it belongs to another run: another config, other data, another target.
pub(crate) fn restore(
    snapshot: &Snapshot,
    store: &mut Store,
    config: &str,
    made_of: &[Ingredient],
) -> Result<(u64, Mark), Fault> {
    if let Some(differs) = differs(snapshot, config) {
        return Err(Fault::BadInput(format!(
            "config.toml: not that of the checkpoint of step {}: {differs}; put it back as it was, or run its run file with --fresh",
            snapshot.step
        )));
    }
    resume::check(made_of, &snapshot.meta, snapshot.step)?;
    let slots: Vec<_> = store.lasting().chain(store.split()).collect();
    for slot in slots {
        let name = store.name(slot).to_owned();
        let shards = store.shards(slot);
        let tensor = snapshot
            .tensors
            .iter()
            .find(|tensor| {
                tensor.name == name
                    && tensor.shape == shards.dims
                    && tensor.dtype == dtype(store.named(slot).values)
            })
            .with_context(|| {
                format!(
                    "the checkpoint of step {} has no tensor `{name}` of the run's shape",
                    snapshot.step
                )
            })?;
        if store.is_in_bf16(slot) {
            let values = tensor.bytes.as_chunks::<2>().0.iter();
            let values = values.map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
            store.change(slot, |to| {
                to.iter_mut().zip(values).for_each(|(to, from)| *to = from);
            });
            continue;
        }
        let values = tensor.bytes.as_chunks::<4>().0;
        for (block, slot) in shards.held {
            let to = store.get_mut(slot);
            let own = values.iter().skip(block * to.len());
            for (to, from) in to.iter_mut().zip(own) {
                *to = f32::from_le_bytes(*from);
            }
        }
    }
    Ok((snapshot.step, resume::mark(&snapshot.meta)?))
}
