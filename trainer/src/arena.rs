//! The memory that programs run in, of which a task has one for all of its own.

use spd_engine::{Executor, Fault};

/// Something that runs in an arena.
pub(crate) trait InArena {
    /// The program that has the arena.
    fn executor(&mut self) -> &mut Executor;
}

impl InArena for Executor {
    fn executor(&mut self) -> &mut Executor {
        self
    }
}

/// Runs `work` on a program in the arena of another, which has it back afterwards.
///
/// # Errors
///
/// When a GPU refuses the program, or `work` fails.
pub(crate) fn in_arena_of<P: InArena, R, E: From<Fault>>(
    owner: &mut Executor,
    program: &mut P,
    work: impl FnOnce(&mut P) -> Result<R, E>,
) -> Result<R, E> {
    if let Some(arena) = owner.detach() {
        program.executor().attach(arena)?;
    }
    let result = work(program);
    if let Some(arena) = program.executor().detach() {
        owner.attach(arena)?;
    }
    result
}

/// Bytes of an arena in which any one of the programs can run.
pub(crate) fn arena_bytes<'a>(programs: impl IntoIterator<Item = &'a Executor>) -> usize {
    let sizes = programs
        .into_iter()
        .map(|program| program.plan().arena_bytes());
    sizes.max().unwrap_or(0)
}
