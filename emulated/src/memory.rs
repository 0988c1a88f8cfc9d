//! Emulated device memory: host memory with allocations, pinned memory, and bounds checks.

use std::collections::BTreeMap;
use std::ops::Range;

use spd_engine::Fault;

/// Allocations by address, of device memory and pinned host memory.
pub(super) struct Memory {
    blocks: BTreeMap<u64, Block>,
    /// Bytes of the device, and those allocated.
    size: usize,
    used: usize,
    /// Bytes of host memory that may be pinned.
    pinnable: usize,
}

struct Block {
    lines: Vec<Line>,
    bytes: usize,
    pinned: bool,
}

/// 256 bytes with the alignment of device memory.
#[repr(align(256))]
#[derive(Clone, Copy)]
struct Line(#[expect(dead_code, reason = "read by address")] [u32; 64]);

impl Memory {
    /// `size` bytes of device memory, and unlimited pinned memory.
    pub(super) fn new(size: usize) -> Self {
        Self {
            blocks: BTreeMap::new(),
            size,
            used: 0,
            pinnable: usize::MAX,
        }
    }

    /// Limits pinned memory to `bytes`.
    pub(super) fn pin_at_most(&mut self, bytes: usize) {
        self.pinnable = bytes;
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Bytes of device memory: free, and in all.
    pub(super) fn free_and_all(&self) -> (usize, usize) {
        (self.size - self.used, self.size)
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> Result<u64, Fault> {
        if bytes > self.size - self.used {
            return Err(Fault::new(format!(
                "the GPU cannot allocate {bytes} bytes of memory"
            )));
        }
        self.used += bytes;
        Ok(self.add(bytes, false))
    }

    pub(super) fn free(&mut self, address: u64) {
        self.used -= self.remove(address, false);
    }

    pub(super) fn pin(&mut self, bytes: usize) -> Result<u64, Fault> {
        let pinned = self.blocks.values().filter(|block| block.pinned);
        let pinned: usize = pinned.map(|block| block.bytes).sum();
        if pinned.saturating_add(bytes) > self.pinnable {
            return Err(Fault::new(format!(
                "the GPU cannot pin {bytes} bytes of the host's memory"
            )));
        }
        Ok(self.add(bytes, true))
    }

    /// Returns the range that was unpinned.
    pub(super) fn unpin(&mut self, address: u64) -> Range<u64> {
        address..address + self.remove(address, true) as u64
    }

    fn add(&mut self, bytes: usize, pinned: bool) -> u64 {
        // Reads before the first write give NaN.
        let mut lines = vec![Line([u32::MAX; 64]); bytes.div_ceil(256).max(1)];
        let address = lines.as_mut_ptr().expose_provenance() as u64;
        self.blocks.insert(
            address,
            Block {
                lines,
                bytes,
                pinned,
            },
        );
        address
    }

    fn remove(&mut self, address: u64, pinned: bool) -> usize {
        let block = self.blocks.remove(&address).expect("memory that is there");
        assert_eq!(block.pinned, pinned);
        block.bytes
    }

    /// Whether an address lies in pinned memory.
    pub(super) fn is_pinned(&self, address: u64) -> bool {
        let found = self.blocks.range(..=address).next_back();
        found.is_some_and(|(_, block)| block.pinned)
    }

    /// Start of a stretch.
    ///
    /// # Panics
    ///
    /// Unless the stretch is inside one allocation of its kind.
    pub(super) fn stretch(&mut self, address: u64, bytes: usize, pinned: bool) -> *mut u32 {
        let found = self.blocks.range_mut(..=address).next_back();
        let (start, block) = found.expect("an address of memory that is there");
        let first = usize::try_from(address - start).expect("inside of memory");
        assert!(
            first + bytes <= block.bytes && block.pinned == pinned,
            "{bytes} bytes from {first} on, of {} {}",
            block.bytes,
            if block.pinned {
                "pinned"
            } else {
                "on the device"
            },
        );
        let words = block.lines.as_mut_ptr().cast::<u32>();
        words.wrapping_add(first / 4)
    }
}
