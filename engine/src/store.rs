//! What outlives a step: parameters, moments, frozen weights. Programs share it by [`Slot`].
//!
//! Where programs run [elsewhere](Elsewhere), tensors have a place there too, and each is newest where it was changed last. What is
//! newer elsewhere is brought home when somebody asks ([`Store::fetch`]), and never unasked: to read such a tensor is a mistake.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;

use crate::fault::Result;
use crate::value::Type;

/// A tensor of a [`Store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// Its number.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Name, type and values of a tensor.
pub type Named<'s> = (&'s str, &'s Type, &'s [f32]);

/// Named f32 tensors that stay from step to step.
#[derive(Debug, Default)]
pub struct Store {
    /// Whoever has staged values that are at home shares them until they change.
    pub(crate) tensors: Vec<(String, Type, Arc<Vec<f32>>)>,
    by_name: BTreeMap<String, Slot>,
    /// Tensors that no program writes.
    frozen: BTreeSet<Slot>,
    /// Tensors have no values.
    only_shapes: bool,
    /// The other place of the tensors, if programs have run in one.
    pub(crate) elsewhere: Option<Box<dyn Elsewhere>>,
}

/// A place beside the host's memory that tensors are copied to, and changed in.
pub(crate) trait Elsewhere: Any + Debug + Send + Sync {
    /// Whether the host's values of a tensor are the newest.
    fn is_home(&self, slot: Slot) -> bool;

    /// The host changes a tensor.
    fn changed_at_home(&mut self, slot: Slot);

    /// Waits for programs there, and copies to the host whatever of these tensors they have changed.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    fn fetch(&mut self, tensors: Vec<(Slot, &mut Arc<Vec<f32>>)>) -> Result<()>;
}

impl Store {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store whose tensors of zeros will have names and types and no memory: to plan programs with, not to run
    /// them.
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
        self.put(name, ty, values)
    }

    fn put(&mut self, name: String, ty: Type, values: Vec<f32>) -> Slot {
        let slot = Slot(u32::try_from(self.tensors.len()).expect("a store has few tensors"));
        assert!(
            self.by_name.insert(name.clone(), slot).is_none(),
            "`{name}` is in the store once"
        );
        self.tensors.push((name, ty, Arc::new(values)));
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
        self.put(name.into(), ty, vec![0.0; len])
    }

    /// Says that no program writes a tensor: one that does is refused, and what computes in bf16 keeps a rounded
    /// copy of it, made once.
    pub fn freeze(&mut self, slot: Slot) {
        self.frozen.insert(slot);
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
        &self.tensors[slot.index()].0
    }

    /// Type of a tensor.
    pub fn ty(&self, slot: Slot) -> &Type {
        &self.tensors[slot.index()].1
    }

    /// Values of a tensor.
    ///
    /// # Panics
    ///
    /// When they are newer on a device, and were not [fetched](Self::fetch) since.
    pub fn get(&self, slot: Slot) -> &[f32] {
        self.expect_home(slot);
        &self.tensors[slot.index()].2
    }

    /// The same, shared. A change of the tensor moves it: values at the same address are the same values.
    pub(crate) fn shared(&self, slot: Slot) -> &Arc<Vec<f32>> {
        self.expect_home(slot);
        &self.tensors[slot.index()].2
    }

    /// Values of a tensor, to be changed.
    ///
    /// # Panics
    ///
    /// As [`Self::get`] does.
    pub fn get_mut(&mut self, slot: Slot) -> &mut [f32] {
        self.expect_home(slot);
        if let Some(elsewhere) = &mut self.elsewhere {
            elsewhere.changed_at_home(slot);
        }
        Arc::make_mut(&mut self.tensors[slot.index()].2).as_mut_slice()
    }

    /// Makes a tensor zeros, wherever its newest values are.
    pub fn clear(&mut self, slot: Slot) {
        if let Some(elsewhere) = &mut self.elsewhere {
            elsewhere.changed_at_home(slot);
        }
        Arc::make_mut(&mut self.tensors[slot.index()].2).fill(0.0);
    }

    fn expect_home(&self, slot: Slot) {
        let home = self
            .elsewhere
            .as_ref()
            .is_none_or(|there| there.is_home(slot));
        assert!(home, "`{}` is newer on the device", self.name(slot));
    }

    /// Brings home whatever is newer elsewhere, once programs there are done; nothing where nothing is.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn fetch(&mut self) -> Result<()> {
        let Some(elsewhere) = &mut self.elsewhere else {
            return Ok(());
        };
        let tensors = self.tensors.iter_mut();
        let tensors = (0..).map(Slot).zip(tensors.map(|(_, _, values)| values));
        elsewhere.fetch(tensors.collect())
    }

    /// The same for one tensor.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn fetch_one(&mut self, slot: Slot) -> Result<()> {
        let Some(elsewhere) = &mut self.elsewhere else {
            return Ok(());
        };
        let values = &mut self.tensors[slot.index()].2;
        elsewhere.fetch(vec![(slot, values)])
    }

    /// The same tensors, once more, on the host alone.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn copy(&self) -> Self {
        Self {
            tensors: self.tensors.clone(),
            by_name: self.by_name.clone(),
            frozen: self.frozen.clone(),
            only_shapes: self.only_shapes,
            elsewhere: None,
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|(_, ty, _)| ty.bytes()).sum()
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
    #[should_panic(expected = "`w` is in the store once")]
    fn a_name_is_taken_once() {
        let mut store = Store::new();
        store.zeros("w", &[1]);
        store.zeros("w", &[1]);
    }

    #[test]
    #[should_panic(expected = "`w` has as many values as its shape [2, 3] says")]
    fn values_fill_the_shape() {
        Store::new().add("w", &[2, 3], vec![0.0; 5]);
    }
}
