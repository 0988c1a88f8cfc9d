//! Tensors that stay from step to step: parameters, moments, frozen weights. Programs share them by
//! [`Slot`].
//!
//! Tensors may have a second copy on a [device](Elsewhere), and the copy that changed last is the
//! newest. Newer values are copied to the host on request ([`Store::fetch`]), and never by a read:
//! to read such a tensor before that panics.
//!
//! A frozen tensor may be held in bf16 ([`Store::hold_in_bf16`]). To programs it is an f32 tensor
//! like any other.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::fault::Result;
use crate::large_pages::{LargePages, Part};
use crate::value::{DType, Type};

/// A tensor of a [`Store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// Its number.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A tensor of a [`Store`], to be read or saved.
#[derive(Debug, Clone, Copy)]
pub struct Named<'s> {
    /// Its name.
    pub name: &'s str,
    /// Type that programs read.
    pub ty: &'s Type,
    /// Its values.
    pub values: Values<'s>,
}

/// Values of a tensor in the precision in which they are held.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'s> {
    /// In f32.
    F32(&'s [f32]),
    /// In bf16.
    Bf16(&'s [bf16]),
}

impl<'s> Values<'s> {
    /// Their bytes, in the byte order of the machine.
    pub fn bytes(self) -> &'s [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) => bytemuck::cast_slice(values.reinterpret_cast()),
        }
    }
}

/// Named f32 tensors that stay from step to step.
#[derive(Debug, Default)]
pub struct Store {
    pub(crate) tensors: Vec<Tensor>,
    /// Their memory.
    pages: LargePages,
    by_name: BTreeMap<String, Slot>,
    /// Tensors that no program writes.
    frozen: BTreeSet<Slot>,
    /// Tensors whose values have no meaning between steps.
    transient: BTreeSet<Slot>,
    /// Tensors with the rows of one block of a batch.
    sharded: BTreeMap<Slot, Shards>,
    /// Whether tensors have only names and types.
    only_shapes: bool,
    /// The copies of the tensors on a device, if programs have run there.
    pub(crate) elsewhere: Option<Box<dyn Elsewhere>>,
}

/// The rows of a tensor that is [sharded](Store::sharded) with the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    /// Shape of all rows of the batch together.
    pub dims: Vec<usize>,
    /// The blocks of this rank, in order: the number of each among those of the batch, and the
    /// tensor that holds its rows.
    pub held: Vec<(usize, Slot)>,
}

/// A named tensor.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Type that programs read.
    pub(crate) ty: Type,
    /// Shared with copies that are staged for a device, until it changes.
    pub(crate) held: Held,
}

/// Values of a tensor, in the precision in which they are held.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    F32(Arc<Part<f32>>),
    Bf16(Arc<Part<bf16>>),
}

impl Held {
    /// The values.
    pub(crate) fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::Bf16(values) => Values::Bf16(values),
        }
    }
}

impl Tensor {
    /// The values of a tensor held in f32.
    pub(crate) fn f32(&self) -> &Arc<Part<f32>> {
        match &self.held {
            Held::F32(values) => values,
            Held::Bf16(_) => panic!("`{}` is held in bf16", self.name),
        }
    }

    /// The values for writing, no longer shared with staged copies.
    fn f32_mut(&mut self) -> &mut [f32] {
        match &mut self.held {
            Held::F32(values) => &mut Arc::make_mut(values)[..],
            Held::Bf16(_) => panic!("`{}` is held in bf16", self.name),
        }
    }

    /// The values in f32, however they are held.
    pub(crate) fn read(&self) -> Cow<'_, [f32]> {
        match &self.held {
            Held::F32(values) => Cow::Borrowed(values),
            Held::Bf16(values) => Cow::Owned(values.to_f32_vec()),
        }
    }

    fn bytes(&self) -> usize {
        let dtype = match self.held {
            Held::F32(_) => self.ty.dtype,
            Held::Bf16(_) => DType::Bf16,
        };
        self.ty.len() * dtype.bytes()
    }
}

/// Copies of tensors outside host memory, which programs change.
pub(crate) trait Elsewhere: Any + Debug + Send + Sync {
    /// Whether the host's values of a tensor are the newest.
    fn is_home(&self, slot: Slot) -> bool;

    /// Marks a tensor as changed on the host.
    fn changed_at_home(&mut self, slot: Slot);

    /// Waits for programs there, and copies to the host those of these tensors that they have
    /// changed.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    fn fetch(&mut self, tensors: Vec<(Slot, &mut Arc<Part<f32>>)>) -> Result<()>;

    /// Copies a tensor of so many bytes to another there, after all earlier work of programs;
    /// `false` if the host has its newest values.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    fn copy(&mut self, from: Slot, to: Slot, bytes: usize) -> Result<bool>;
}

impl Store {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store whose tensors of zeros have names and types and no memory: to plan programs
    /// with, not to run them.
    pub fn of_shapes() -> Self {
        Self {
            only_shapes: true,
            ..Self::default()
        }
    }

    /// Adds a tensor of the given values, f32 `dims`.
    ///
    /// # Panics
    ///
    /// When the name is taken, or the number of values is not the product of `dims`.
    pub fn add(&mut self, name: impl Into<String>, dims: &[usize], values: Vec<f32>) -> Slot {
        let (name, ty) = (name.into(), Type::f32(dims));
        assert_eq!(
            ty.len(),
            values.len(),
            "`{name}` has as many values as its shape {dims:?} says"
        );
        let values = self.pages.of(&values);
        self.put(name, ty, values)
    }

    fn put(&mut self, name: String, ty: Type, values: Part<f32>) -> Slot {
        let slot = Slot(u32::try_from(self.tensors.len()).expect("a store has few tensors"));
        assert!(
            self.by_name.insert(name.clone(), slot).is_none(),
            "`{name}` is in the store once"
        );
        let held = Held::F32(Arc::new(values));
        self.tensors.push(Tensor { name, ty, held });
        slot
    }

    /// Adds a tensor of zeros.
    ///
    /// # Panics
    ///
    /// When the name is taken.
    pub fn zeros(&mut self, name: impl Into<String>, dims: &[usize]) -> Slot {
        let ty = Type::f32(dims);
        let len = if self.only_shapes { 0 } else { ty.len() };
        let zeros = self.pages.zeros(len);
        self.put(name.into(), ty, zeros)
    }

    /// Adds a tensor of zeros whose values have no meaning between steps, and are not part of a
    /// saved state.
    ///
    /// # Panics
    ///
    /// When the name is taken.
    pub fn transient(&mut self, name: impl Into<String>, dims: &[usize]) -> Slot {
        let slot = self.zeros(name, dims);
        self.transient.insert(slot);
        slot
    }

    /// The tensors whose values make up a state, but for those that are [split](Self::split).
    pub fn lasting(&self) -> impl Iterator<Item = Slot> {
        self.slots()
            .filter(|&slot| !self.transient.contains(&slot) && !self.is_split(slot))
    }

    /// The tensors that are sharded with the batch and have more rows than one tensor here: those
    /// of several ranks or blocks.
    pub fn split(&self) -> impl Iterator<Item = Slot> {
        self.slots().filter(|&slot| self.is_split(slot))
    }

    fn is_split(&self, slot: Slot) -> bool {
        let shards = self.sharded.get(&slot);
        shards.is_some_and(|shards| shards.dims != self.ty(slot).dims)
    }

    /// Adds a tensor of zeros that is sharded with the batch: programs read and write the rows of
    /// one block, `dims`. A rank [holds](Self::hold_blocks) those of each of its blocks.
    ///
    /// # Panics
    ///
    /// When the name is taken.
    pub fn sharded(&mut self, name: impl Into<String>, dims: &[usize]) -> Slot {
        let slot = self.zeros(name, dims);
        self.sharded.insert(slot, self.shards(slot));
        slot
    }

    /// Makes room for the rows of these blocks, out of `all` of the batch, in each tensor that is
    /// sharded with it. They are zeros.
    ///
    /// # Panics
    ///
    /// When it is called twice.
    pub fn hold_blocks(&mut self, blocks: Range<usize>, all: usize) {
        let mut sharded = std::mem::take(&mut self.sharded);
        for (&slot, shards) in &mut sharded {
            let (name, dims) = (self.name(slot).to_owned(), self.ty(slot).dims.clone());
            let mut tensor = |block| match blocks.len() {
                1 => slot,
                _ => self.transient(format!("blocks.{name}.{block}"), &dims),
            };
            let held = blocks.clone().map(|block| (block, tensor(block)));
            shards.held = held.collect();
            shards.dims = dims;
            shards.dims[0] *= all;
        }
        self.sharded = sharded;
    }

    /// The rows of a tensor, and where they lie; one that is not sharded has all of them.
    pub fn shards(&self, slot: Slot) -> Shards {
        let whole = || Shards {
            dims: self.ty(slot).dims.clone(),
            held: vec![(0, slot)],
        };
        self.sharded.get(&slot).cloned().unwrap_or_else(whole)
    }

    /// Whether a tensor is [sharded with the batch](Self::sharded).
    pub fn is_sharded(&self, slot: Slot) -> bool {
        self.sharded.contains_key(&slot)
    }

    /// The tensor that holds the rows of one of this rank's blocks, counted from 0, of a sharded
    /// tensor.
    pub(crate) fn of_block(&self, sharded: Slot, block: usize) -> Slot {
        self.sharded[&sharded].held[block].1
    }

    /// Moves the values of a tensor to another of the same shape; its own then have no meaning.
    ///
    /// # Errors
    ///
    /// When a device refuses.
    pub(crate) fn give(&mut self, from: Slot, to: Slot) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let bytes = self.ty(from).bytes();
        if let Some(elsewhere) = &mut self.elsewhere
            && elsewhere.copy(from, to, bytes)?
        {
            return Ok(());
        }
        self.changes(from);
        self.changes(to);
        let [from, to] = [from.index(), to.index()];
        let [from, to] = self
            .tensors
            .get_disjoint_mut([from, to])
            .expect("two tensors");
        std::mem::swap(&mut from.held, &mut to.held);
        Ok(())
    }

    /// Marks a tensor that no program writes: a program that does is refused, and bf16 products
    /// keep a rounded copy of it, made once.
    pub fn freeze(&mut self, slot: Slot) {
        self.frozen.insert(slot);
    }

    /// Freezes a tensor and holds it in bf16 from now on, rounded to nearest, in half the memory.
    /// On the CPU, each op that reads it widens it first.
    ///
    /// # Panics
    ///
    /// When its values are newer on a device, and were not [fetched](Self::fetch) since.
    pub fn hold_in_bf16(&mut self, slot: Slot) {
        self.expect_home(slot);
        self.freeze(slot);
        let tensor = &mut self.tensors[slot.index()];
        let values = tensor.read();
        let mut rounded = self.pages.zeros::<bf16>(values.len());
        rounded.convert_from_f32_slice(&values);
        tensor.held = Held::Bf16(Arc::new(rounded));
    }

    /// Whether a tensor is held in bf16.
    pub fn is_in_bf16(&self, slot: Slot) -> bool {
        matches!(self.tensors[slot.index()].held, Held::Bf16(_))
    }

    /// Whether no program writes a tensor.
    pub fn is_frozen(&self, slot: Slot) -> bool {
        self.frozen.contains(&slot)
    }

    /// The tensor of a name.
    pub fn slot(&self, name: &str) -> Option<Slot> {
        self.by_name.get(name).copied()
    }

    /// All tensors, in the order in which they were added.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + use<> {
        (0..u32::try_from(self.tensors.len()).expect("a store has few tensors")).map(Slot)
    }

    /// Name of a tensor.
    pub fn name(&self, slot: Slot) -> &str {
        &self.tensors[slot.index()].name
    }

    /// Type of a tensor.
    pub fn ty(&self, slot: Slot) -> &Type {
        &self.tensors[slot.index()].ty
    }

    /// Values of a tensor that is held in f32.
    ///
    /// # Panics
    ///
    /// When they are held in bf16, or newer on a device and not [fetched](Self::fetch) since.
    pub fn get(&self, slot: Slot) -> &[f32] {
        self.expect_home(slot);
        self.tensors[slot.index()].f32()
    }

    /// Values of a tensor, however they are held.
    ///
    /// # Panics
    ///
    /// When they are newer on a device, and were not [fetched](Self::fetch) since.
    pub fn read(&self, slot: Slot) -> Cow<'_, [f32]> {
        self.expect_home(slot);
        self.tensors[slot.index()].read()
    }

    /// A tensor with its name, in the precision in which it is held.
    ///
    /// # Panics
    ///
    /// As [`Self::read`] does.
    pub fn named(&self, slot: Slot) -> Named<'_> {
        Named {
            name: self.name(slot),
            ty: self.ty(slot),
            values: self.held(slot).values(),
        }
    }

    /// The values of a tensor, shared. A change moves them, so values at the same address are
    /// unchanged.
    pub(crate) fn held(&self, slot: Slot) -> &Held {
        self.expect_home(slot);
        &self.tensors[slot.index()].held
    }

    /// Values of a tensor that is held in f32, to be changed.
    ///
    /// # Panics
    ///
    /// As [`Self::get`] does.
    pub fn get_mut(&mut self, slot: Slot) -> &mut [f32] {
        self.expect_home(slot);
        self.changes(slot).f32_mut()
    }

    /// Changes the values of a tensor through `change`, and rounds them to the precision in which
    /// they are held.
    ///
    /// # Panics
    ///
    /// As [`Self::read`] does.
    pub fn change(&mut self, slot: Slot, change: impl FnOnce(&mut [f32])) {
        self.expect_home(slot);
        let tensor = self.changes(slot);
        match &mut tensor.held {
            Held::F32(held) => change(&mut Arc::make_mut(held)[..]),
            Held::Bf16(held) => {
                let mut values = held.to_f32_vec();
                change(&mut values);
                Arc::make_mut(held).convert_from_f32_slice(&values);
            }
        }
    }

    /// Sets a tensor that is held in f32 to zeros, whichever copy is the newest.
    pub fn clear(&mut self, slot: Slot) {
        self.changes(slot).f32_mut().fill(0.0);
    }

    /// A tensor whose newest values will be the host's.
    fn changes(&mut self, slot: Slot) -> &mut Tensor {
        if let Some(elsewhere) = &mut self.elsewhere {
            elsewhere.changed_at_home(slot);
        }
        &mut self.tensors[slot.index()]
    }

    fn expect_home(&self, slot: Slot) {
        let home = self
            .elsewhere
            .as_ref()
            .is_none_or(|there| there.is_home(slot));
        assert!(home, "`{}` is newer on the device", self.name(slot));
    }

    /// Copies to the host all tensors that are newer on a device, once programs there are done.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn fetch(&mut self) -> Result<()> {
        let Some(elsewhere) = &mut self.elsewhere else {
            return Ok(());
        };
        let tensors = (0..).map(Slot).zip(&mut self.tensors);
        let in_f32 = tensors.filter_map(|(slot, tensor)| match &mut tensor.held {
            Held::F32(values) => Some((slot, values)),
            // Frozen: no program has changed it.
            Held::Bf16(_) => None,
        });
        elsewhere.fetch(in_f32.collect())
    }

    /// [`Self::fetch`] for one tensor.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn fetch_one(&mut self, slot: Slot) -> Result<()> {
        let Some(elsewhere) = &mut self.elsewhere else {
            return Ok(());
        };
        match &mut self.tensors[slot.index()].held {
            Held::F32(values) => elsewhere.fetch(vec![(slot, values)]),
            Held::Bf16(_) => Ok(()),
        }
    }

    /// A copy of the tensors on the host alone.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn copy(&self) -> Self {
        Self {
            tensors: self.tensors.clone(),
            pages: LargePages::default(),
            by_name: self.by_name.clone(),
            frozen: self.frozen.clone(),
            transient: self.transient.clone(),
            sharded: self.sharded.clone(),
            only_shapes: self.only_shapes,
            elsewhere: None,
        }
    }

    /// Bytes of all tensors, as they are held.
    pub fn bytes(&self) -> usize {
        self.bytes_of(self.slots())
    }

    /// Bytes of some tensors, as they are held.
    pub fn bytes_of(&self, slots: impl Iterator<Item = Slot>) -> usize {
        slots.map(|slot| self.tensors[slot.index()].bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_found_by_name_and_kept_in_order() {
        let mut store = Store::new();
        let w = store.add("w", &[2, 3], vec![1.0; 6]);
        let scalar = store.zeros("a", &[]);
        assert_eq!(store.slots().collect::<Vec<_>>(), [w, scalar]);
        assert_eq!((store.slot("w"), store.slot("b")), (Some(w), None));
        assert_eq!((store.name(w), store.ty(w)), ("w", &Type::f32(&[2, 3])));
        assert_eq!(store.bytes(), 28);
        store.get_mut(scalar)[0] = 5.0;
        assert_eq!(
            (store.get(scalar), store.get(w)),
            (&[5.0][..], &[1.0; 6][..])
        );
    }

    #[test]
    fn shapes_alone_take_no_memory() {
        let mut store = Store::of_shapes();
        let slot = store.zeros("w", &[1 << 20, 1 << 20]);
        assert_eq!((store.bytes(), store.get(slot).len()), (1 << 42, 0));
    }

    #[test]
    fn a_tensor_that_is_held_in_bf16_takes_half_the_memory() {
        let mut store = Store::new();
        // Nine bits after the leading one: the last is a tie, which goes to the even neighbour.
        let slot = store.add("w", &[3], vec![1.0, -2.5, 1.0 + 3.0 / 256.0]);
        store.hold_in_bf16(slot);
        assert!(store.is_frozen(slot) && store.is_in_bf16(slot));
        assert_eq!((store.bytes(), store.ty(slot)), (6, &Type::f32(&[3])));
        assert_eq!(*store.read(slot), [1.0, -2.5, 1.0 + 4.0 / 256.0]);
        store.change(slot, |values| values[2] = 1.0 + 1.0 / 256.0);
        assert_eq!(*store.read(slot), [1.0, -2.5, 1.0]);
    }

    #[test]
    #[should_panic(expected = "`w` is held in bf16")]
    fn a_tensor_held_in_bf16_has_no_f32_slice() {
        let mut store = Store::new();
        let slot = store.zeros("w", &[1]);
        store.hold_in_bf16(slot);
        store.get(slot);
    }

    #[test]
    #[should_panic(expected = "`w` is in the store once")]
    fn a_second_tensor_of_a_name_panics() {
        let mut store = Store::new();
        store.zeros("w", &[1]);
        store.zeros("w", &[1]);
    }

    #[test]
    #[should_panic(expected = "`w` has as many values as its shape [2, 3] says")]
    fn too_few_values_for_a_shape_panic() {
        Store::new().add("w", &[2, 3], vec![0.0; 5]);
    }
}
