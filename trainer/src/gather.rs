//! Tensors that ranks or blocks split with the batch, whole on the rank that writes: in checkpoints
//! their rows are in the order of the batch, whichever rank held them.
//!
//! All ranks gather before each save, those that write nothing too. Rows travel as sums over ranks,
//! in pieces, so that the ranks need little memory for them. A rank that resumes takes its own rows
//! (see [`state::restore`](crate::state::restore)).

use spd_engine::{Named, Slot, Store, Type, Values};

use crate::fault::Fault;
use crate::world::World;

/// Part of the memory of the first rank, and of no other.
pub(crate) const GATHERED: &str = "gathered rows";

/// Most elements of a piece: 4 MiB.
const PIECE: usize = 1 << 20;

/// A whole tensor.
#[derive(Debug)]
pub(crate) struct Whole {
    name: String,
    ty: Type,
    values: Vec<f32>,
}

impl Whole {
    /// The tensor, to be saved.
    pub(crate) fn named(&self) -> Named<'_> {
        Named {
            name: &self.name,
            ty: &self.ty,
            values: Values::F32(&self.values),
        }
    }
}

/// Elements of the longest piece, which ranks are to have room for.
pub(crate) fn piece_elements(store: &Store) -> usize {
    let elements = store.split().map(|slot| store.ty(slot).len().min(PIECE));
    elements.max().unwrap_or(0)
}

/// Bytes of all whole tensors.
pub(crate) fn whole_bytes(store: &Store) -> usize {
    let bytes = |slot| Type::f32(&store.shards(slot).dims).bytes();
    store.split().map(bytes).sum()
}

/// Gathers the tensors that are split on the first rank; the others receive none.
///
/// # Errors
///
/// When a replay failed.
pub(crate) fn gather(store: &mut Store, world: &World) -> Result<Vec<Whole>, Fault> {
    let mut gathered = Vec::new();
    for slot in store.split().collect::<Vec<_>>() {
        for (_, slot) in store.shards(slot).held {
            store.fetch_one(slot)?;
        }
        let values = rows(store, slot, world);
        if world.is_first() {
            gathered.push(Whole {
                name: store.name(slot).to_owned(),
                ty: Type::f32(&store.shards(slot).dims),
                values,
            });
        }
    }
    Ok(gathered)
}

/// The rows of a tensor in the order of the batch, on the first rank.
fn rows(store: &Store, slot: Slot, world: &World) -> Vec<f32> {
    let (of_block, shards) = (store.ty(slot), store.shards(slot));
    let blocks = shards.dims[0] / of_block.dims[0];
    let (mut values, mut piece) = (Vec::new(), Vec::new());
    for block in 0..blocks {
        let own = shards.held.iter().find(|(number, _)| *number == block);
        for start in (0..of_block.len()).step_by(PIECE) {
            let range = start..of_block.len().min(start + PIECE);
            piece.clear();
            match own {
                Some((_, slot)) => piece.extend(&store.get(*slot)[range]),
                // x + -0 is x, bit for bit, even if x is 0.
                None => piece.resize(range.len(), -0.0),
            }
            world.sum(&mut piece);
            if world.is_first() {
                values.extend(&piece);
            }
        }
    }
    values
}
