//! The state of losses: tensors that they keep from step to step, in the store and in checkpoints
//! as `losses.<kind>.<name>`, those of the non-target stream as `losses.nontarget/<kind>.<name>`.

use spd_draws::{Purpose, Stream};
use spd_engine::Store;

use super::Loss;
use crate::component_model::BatchShape;
use crate::networks::Start;
use crate::parameters;
use crate::sites::Site;

/// A tensor that a loss keeps from step to step.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Its name among those of the loss.
    pub name: String,
    /// The part of it that a rank holds.
    pub sharing: Sharing,
    /// Its shape; if it is sharded, that of each row of the batch.
    pub dims: Vec<usize>,
    /// Its starting values.
    pub start: Start,
}

/// The part of a tensor that a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// All of it, the same on all ranks: what changes it is the same for all blocks of a batch.
    Replicated,
    /// The rows of its blocks of the batch: programs read and write those of a block,
    /// `[batch / shards, dims..]`. An evaluation has other rows, so a loss that reads these is not
    /// [measurable](super::LossTerm::is_measurable) as it is; see
    /// `Adversary::held_out`.
    Sharded,
}

/// Sizes that the state of a loss may follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Shape of a block of a batch.
    pub shape: BatchShape,
    /// Rows of each site in a block; there are none if no loss has an adversary that lives on.
    pub rows: Vec<usize>,
    /// Whether weight deltas take part.
    pub delta: bool,
}

/// The losses of a stream of data, and the sizes that their state follows.
#[derive(Debug, Clone)]
pub(crate) struct StreamLosses {
    /// In order.
    pub(crate) losses: Vec<Loss>,
    /// Its shape has the stream.
    pub(crate) extent: Extent,
}

/// The state of all losses, by its names in the store, each with the rows of a block of its stream.
fn all(streams: &[StreamLosses], sites: &[Site]) -> Vec<(String, usize, StateTensor)> {
    let mut all = Vec::new();
    for StreamLosses { losses, extent } in streams {
        let BatchShape { stream, rows, .. } = extent.shape;
        for loss in losses {
            let name = stream.name(loss.term.name());
            for tensor in loss.term.term().state(sites, extent) {
                all.push((state_name(&name, &tensor.name), rows, tensor));
            }
        }
    }
    all
}

pub(super) fn state_name(loss: &str, tensor: &str) -> String {
    format!("losses.{loss}.{tensor}")
}

/// Makes room for the state of all losses.
pub(crate) fn add_state(store: &mut Store, streams: &[StreamLosses], sites: &[Site]) {
    for (name, rows, StateTensor { sharing, dims, .. }) in all(streams, sites) {
        match sharing {
            Sharing::Replicated => store.zeros(name, &dims),
            Sharing::Sharded => store.sharded(name, &[&[rows], &dims[..]].concat()),
        };
    }
}

/// Gives the state of all losses its starting values. A row of the batch has the same ones,
/// whichever rank holds it.
pub(crate) fn start_state(store: &mut Store, streams: &[StreamLosses], sites: &[Site], seed: u64) {
    for (number, (name, _, tensor)) in (0..).zip(all(streams, sites)) {
        let slot = store.slot(&name).expect("made by `add_state`");
        let stream = Stream::new(Purpose::State, 0, number);
        for (block, slot) in store.shards(slot).held {
            let first_row = block * store.ty(slot).rows();
            let first_row = u32::try_from(first_row).expect("a batch has fewer than 2^32 rows");
            parameters::start_rows(store, slot, stream, (seed, first_row), tensor.start);
        }
    }
}
