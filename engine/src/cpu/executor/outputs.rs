//! Outputs of a replay.
#![expect(unsafe_code, reason = "outputs are pieces of the arena")]

use super::super::arena::Arena;
use super::Executor;
use crate::plan::Place;
use crate::store::Store;

impl Executor {
    /// An output of the last replay, from the arena of that replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name, or another program has run in the arena since.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store, arena: &'s Arena) -> &'s [f32] {
        let (place, len) = self.outputs[self.output_index(name)];
        match place {
            Place::Input(offset) => self.given.f32s(offset, len),
            Place::Store(slot) => store.get(slot),
            Place::Arena(offset) => {
                self.last.expect_in(arena.of);
                // SAFETY: the program ran in this arena, so the plan's offsets and lengths lie
                // inside; every bit pattern is an f32.
                unsafe {
                    let start = arena.start().add(offset).cast::<f32>();
                    std::slice::from_raw_parts(start, len)
                }
            }
        }
    }
}
