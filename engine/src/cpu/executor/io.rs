//! Inputs and outputs of a replay.
#![expect(unsafe_code, reason = "inputs and outputs are pieces of the arena")]

use super::super::frame::View;
use super::Executor;
use crate::plan::Place;
use crate::store::Store;
use crate::value::{DType, StepScalar};

impl Executor {
    /// Sets a step scalar by name; a name that the program does not use is ignored.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        if let Some(index) = self.scalars.iter().position(|known| known == name) {
            self.parameters.scalars[index] = value;
        }
    }

    /// Value of a step scalar at the next replay.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }

    /// Whether the program reads an input of this name.
    pub fn has_input(&self, name: &str) -> bool {
        self.inputs.iter().any(|(known, _)| known == name)
    }

    /// An f32 input, to be filled before a replay.
    ///
    /// # Panics
    ///
    /// When the program has no f32 input of this name, or no arena.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        let view = self.input_view(name);
        assert_eq!(view.dtype, DType::F32, "input `{name}` holds f32");
        // SAFETY: inputs lie in the arena for the whole life of the executor; `&mut self` forbids
        // replays.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<f32>(), view.len) }
    }

    /// An input of token ids, to be filled before a replay.
    ///
    /// # Panics
    ///
    /// When the program has no such input of this name.
    pub fn input_u32(&mut self, name: &str) -> &mut [u32] {
        let view = self.input_view(name);
        assert_eq!(view.dtype, DType::U32, "input `{name}` holds u32");
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<u32>(), view.len) }
    }

    /// An input as words, of either type.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn input_words(&mut self, name: &str) -> &mut [u32] {
        let view = self.input_view(name);
        // SAFETY: as for `input`; both types of inputs have elements of four bytes.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<u32>(), view.len) }
    }

    fn input_view(&self, name: &str) -> View {
        self.arena();
        let found = self.inputs.iter().find(|(known, _)| known == name);
        found
            .unwrap_or_else(|| panic!("the program has an input `{name}`"))
            .1
    }

    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, ..)| name.as_str())
    }

    /// An output of the last replay, valid until another program has the arena.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name, or no arena.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        let found = self.outputs.iter().find(|(known, ..)| known == name);
        let (_, place, ty) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        match *place {
            Place::Store(slot) => store.get(slot),
            Place::Arena(offset) => {
                let start = self.arena().start();
                // SAFETY: the plan's offsets and lengths lie inside the arena; every bit pattern is
                // an f32.
                unsafe { std::slice::from_raw_parts(start.add(offset).cast::<f32>(), ty.len()) }
            }
        }
    }

    /// A scalar output of the last replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub fn scalar_output(&self, name: &str, store: &Store) -> f32 {
        self.output(name, store)[0]
    }
}
