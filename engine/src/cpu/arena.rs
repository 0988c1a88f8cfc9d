//! Memory of the intermediates of a program. Programs that never run at the same time share one
//! arena.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Weak};

use memmap2::MmapRaw;

use super::bf16::{Panel, pack};
use crate::large_pages;
use crate::replay::Replay;
use crate::store::{Held, Slot, Store};

/// Memory for the intermediates of one program at a time.
///
/// The operating system gives it page by page on first touch, and takes back all of it: memory that
/// an allocator kept would count against the next arena.
#[derive(Debug)]
pub struct Arena {
    // Page-aligned, and so aligned for every plan. Raw, as kernels write through its address, which
    // a pointer taken from a shared slice would forbid.
    map: MmapRaw,
    bytes: usize,
    /// The replay whose values it holds.
    pub(super) of: Replay,
    /// Packed matrices that its programs share.
    pub(super) factors: Factors,
}

/// An input of an op that is a frozen matrix and the right factor of its products.
#[derive(Debug, Clone, Copy)]
pub(super) struct RightFactor {
    /// Its index.
    pub(super) input: usize,
    pub(super) slot: Slot,
    /// Whether it is stored transposed, `[n, k]`.
    pub(super) transposed: bool,
}

/// Frozen matrices, packed as right factors of bf16 products by the first replay that multiplies by
/// them.
#[derive(Debug, Default)]
pub(super) struct Factors(BTreeMap<(Slot, bool), PackedOnce>);

#[derive(Debug)]
struct PackedOnce {
    /// The packed values. The reference keeps their address from being reused.
    of: Weak<dyn Any + Send + Sync>,
    panel: Panel,
}

impl Factors {
    /// Packs a matrix of the store, unless its current values are packed already.
    pub(super) fn make(&mut self, store: &Store, factor: &RightFactor) {
        let &RightFactor {
            slot, transposed, ..
        } = factor;
        let values: Arc<dyn Any + Send + Sync> = match store.held(slot) {
            Held::F32(values) => values.clone(),
            Held::Bf16(values) => values.clone(),
        };
        let found = self.0.get(&(slot, transposed));
        if found.is_none_or(|found| !std::ptr::addr_eq(found.of.as_ptr(), Arc::as_ptr(&values))) {
            let ty = store.ty(slot);
            let sides = [ty.rows(), ty.columns()];
            let packed = PackedOnce {
                of: Arc::downgrade(&values),
                panel: pack(&store.read(slot), sides, transposed),
            };
            self.0.insert((slot, transposed), packed);
        }
    }

    /// A packed matrix.
    pub(super) fn get(&self, factor: &RightFactor) -> &Panel {
        &self.0[&(factor.slot, factor.transposed)].panel
    }
}

impl Arena {
    /// An arena of zeros.
    ///
    /// # Errors
    ///
    /// When the operating system cannot map so much memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Ok(Self {
            map: large_pages::map(bytes)?,
            bytes,
            of: Replay::default(),
            factors: Factors::default(),
        })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte. The address is stable while the arena moves.
    pub(super) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Alone, Executor, Pool};
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::precision::Precision;
    use crate::value::Type;

    const ROWS: usize = 130;
    /// Sizes are no multiples of a block, and sums are longer than one packed piece.
    const SIDES: [[usize; 2]; 3] = [[700, 530], [610, 700], [1100, 610]];

    /// Products forward and backward and a divergence through a head, in bf16.
    fn program(store: &Store) -> Builder {
        let mut b = Builder::with_precision(Precision::Bf16);
        let weights: Vec<Slot> = store.slots().collect();
        let [first, second, head] = [0, 1, 2].map(|index| b.persistent(store, weights[index]));
        let target = b.input("target", &Type::f32(&[ROWS, 1100])).unwrap();
        let x = b.input("x", &Type::f32(&[ROWS, 530])).unwrap();
        let x = b.relu(x).unwrap();
        let y = b.linear_oi(x, first, None).unwrap();
        let h = b.linear_oi(y, second, None).unwrap();
        let logits = b.linear_oi(h, head, None).unwrap();
        let lse = b.log_sum_exp(target).unwrap();
        let loss = b.kl_divergence(target, lse, logits).unwrap();
        let gradient = b.gradients(loss, &[x]).unwrap()[0].unwrap();
        b.output("loss", loss);
        b.output("gradient", gradient);
        b
    }

    fn store(freezes: bool) -> Store {
        let mut store = Store::new();
        for (seed, sides) in (1..).zip(SIDES) {
            let slot = store.add(format!("w{seed}"), &sides, random(&sides, seed).values);
            if freezes {
                store.freeze(slot);
            }
        }
        store
    }

    // A matrix changes between two replays: its packed form is not used again, whether it is frozen
    // or not.
    #[test]
    fn factors_packed_once_give_the_bits_of_factors_packed_for_each_product() {
        let run = |freezes: bool, holds: bool, threads| {
            let mut store = store(freezes);
            for slot in store.slots().filter(|_| holds) {
                store.hold_in_bf16(slot);
            }
            let changed = store.slots().next().unwrap();
            let pool = Arc::new(Pool::new(threads).unwrap());
            let mut executor = Alone::new(&program(&store), pool);
            let mut found = Vec::new();
            for (round, changes) in [(1, false), (2, true), (3, false)] {
                if changes {
                    store.change(changed, |values| values[7] = 3.0);
                }
                for (name, columns) in [("target", 1100), ("x", 530)] {
                    let values = random(&[ROWS, columns], round).values;
                    executor.input(name).copy_from_slice(&values);
                }
                executor.run(&mut store);
                let outputs = ["loss", "gradient"].map(|name| executor.output(name, &store));
                found.extend(outputs.concat().into_iter().map(f32::to_bits));
            }
            let factors = executor.own.packed_factors.iter();
            let mut bytes: Vec<usize> = factors.map(|&(_, bytes)| bytes).collect();
            bytes.sort_unstable();
            (found, bytes, executor.arena.factors.0.len())
        };
        // Each matrix by columns and by rows, in blocks of 32 by 32 numbers of two bytes.
        let blocks =
            |[rows, columns]: [usize; 2]| 2 * 32 * 32 * rows.div_ceil(32) * columns.div_ceil(32);
        let mut bytes: Vec<usize> = SIDES.iter().flat_map(|&sides| [blocks(sides); 2]).collect();
        bytes.sort_unstable();
        let (expected, none, held) = run(false, false, 1);
        assert_eq!((none, held), (Vec::new(), 0));
        // Values held in bf16 equal those that a product rounds to bf16.
        for (holds, threads) in [(false, 1), (false, 3), (true, 1), (true, 3)] {
            let (found, packed, held) = run(true, holds, threads);
            assert!(found == expected, "the bits differ with {threads} threads");
            assert_eq!((packed, held), (bytes.clone(), bytes.len()));
        }
    }

    // Another store has other values for the same slots; the next program in the arena finds the
    // packed matrices.
    #[test]
    fn programs_share_packed_factors_of_their_arena_and_stores_do_not() {
        let pool = Arc::new(Pool::single());
        let mut stores = [store(true), store(true)];
        let first = stores[1].slots().next().unwrap();
        stores[1].get_mut(first)[7] = 3.0;
        let mut run = |arena: Option<Arena>, of: usize| {
            let store = &mut stores[of];
            let mut executor = Executor::planned(&program(store), Arc::clone(&pool));
            let bytes = executor.plan().arena_bytes();
            let mut arena = arena.unwrap_or_else(|| Arena::new(bytes).unwrap());
            for (name, columns) in [("target", 1100), ("x", 530)] {
                let values = random(&[ROWS, columns], 1).values;
                executor.input(name).copy_from_slice(&values);
            }
            executor.run(store, &mut arena);
            let found = executor.output("gradient", store, &arena).to_vec();
            (arena, found)
        };
        let [(_, one), (arena, other)] = [0, 1].map(|of| run(None, of));
        assert!(one != other);
        let (arena, again) = run(Some(arena), 1);
        assert!(again == other);
        let (arena, found) = run(Some(arena), 0);
        assert!(found == one);
        assert_eq!(arena.factors.0.len(), 2 * SIDES.len());
    }
}
