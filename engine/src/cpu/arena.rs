//! The memory of a program's intermediates. Programs that never run at the same time share one: it is lent to whichever runs.

use std::io;

use memmap2::{MmapMut, MmapRaw};

/// Memory for the intermediates of one program at a time.
///
/// It comes from the operating system page by page as it is first touched, and goes back whole: what an allocator keeps
/// for later would count against the next arena.
#[derive(Debug)]
pub struct Arena {
    // Page-aligned, and so aligned to whatever the plan asks for. Raw: kernels write through its address, which one that was
    // taken from a slice would forbid.
    map: MmapRaw,
    bytes: usize,
}

impl Arena {
    /// An arena of zeros.
    ///
    /// # Errors
    ///
    /// When the operating system has no such stretch of memory to give.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(bytes.max(1))?;
        let map = MmapRaw::from(map);
        Ok(Self { map, bytes })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte. It stays where it is while the arena moves from program to program.
    pub(super) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}
