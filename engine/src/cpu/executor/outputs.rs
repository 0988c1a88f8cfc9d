//! Outputs of a replay.
#![expect(unsafe_code, reason = "outputs are pieces of the arena")]

use super::super::arena::Arena;
use super::Executor;
use crate::plan::Place;
use crate::store::Store;

impl Executor {
    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, ..)| name.as_str())
    }

    /// An output of the last replay, from the arena of that replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name, or another program has run in the arena since.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store, arena: &'s Arena) -> &'s [f32] {
        let found = self.outputs.iter().find(|(known, ..)| known == name);
        let (_, place, ty) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        match *place {
            Place::Input(offset) => self.given.f32s(offset, ty.len()),
            Place::Store(slot) => store.get(slot),
            Place::Arena(offset) => {
                self.last.expect_in(arena.of);
                // SAFETY: the program ran in this arena, so the plan's offsets and lengths lie
                // inside; every bit pattern is an f32.
                unsafe {
                    let start = arena.start().add(offset).cast::<f32>();
                    std::slice::from_raw_parts(start, ty.len())
                }
            }
        }
    }
}
