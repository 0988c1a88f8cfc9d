//! A hook of each thread, called before each operation: tests of any crate stop the disk there.

use std::cell::Cell;
use std::io;

/// How far an operation gets that is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// It does not begin.
    Before,
    /// A part of it happens.
    Halfway,
}

thread_local! {
    /// Says whether the operation of this name is stopped. It fails as on a full disk.
    pub static HOOK: Cell<fn(&'static str) -> Option<Stopped>> = const { Cell::new(|_| None) };
}

/// Called before each operation; `half` does a part of it.
pub(crate) fn before(operation: &'static str, half: impl FnOnce()) -> io::Result<()> {
    match HOOK.get()(operation) {
        None => return Ok(()),
        Some(Stopped::Before) => {}
        Some(Stopped::Halfway) => half(),
    }
    Err(io::ErrorKind::StorageFull.into())
}
