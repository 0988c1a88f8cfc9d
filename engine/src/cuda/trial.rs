//! Timings of alternatives: the same work repeated on operands so far apart that no cache holds
//! them.
#![expect(unsafe_code, reason = "addresses of a device")]

use std::sync::Arc;

use super::Result;
use super::device::{ALIGN, Device, Event, Kernels, Memory};
use super::driver::{Argument, Stream};
use super::enqueue::enqueue;
use super::kernel::Kernel;
use super::placed::{self, Placed, PlacedProduct, Step};

/// Timed replays, of which the fastest counts.
const REPLAYS: usize = 5;

/// Milliseconds after which no further replay is timed: few replays measure long work well.
const ENOUGH: f32 = 50.0;

/// The product with its operands one after the other from the start of an arena, each with its
/// offset from a multiple of 16 bytes kept, and the bytes of all.
pub(super) fn alone_in_arena(placed: &PlacedProduct) -> (PlacedProduct, usize) {
    let mut bytes = 0;
    let mut here = |of: &Placed| {
        let first = bytes + of.skipped() % 16;
        bytes = (first + of.len * of.dtype.bytes()).next_multiple_of(ALIGN);
        Placed {
            at: placed::Memory::Arena(first),
            first: 0,
            ..*of
        }
    };
    let alone = PlacedProduct {
        a: here(&placed.a),
        b: here(&placed.b),
        out: here(&placed.out),
        bias: placed.bias.as_ref().map(here),
        ..placed.clone()
    };
    (alone, bytes)
}

/// Numbers near one half, in f32 and in bf16: products of zeros take less power, and less time.
pub(super) fn words() -> Vec<u32> {
    let mut state = 1u32;
    let word = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8).wrapping_mul(0x101) & 0x807f_807f | 0x3f00_3f00
    };
    (0..1 << 20).map(word).collect()
}

/// Fills device memory with repeated [`words`].
fn fill(device: &Arc<Device>, memory: &Memory) -> Result<()> {
    let words = words();
    let words: &[f32] = bytemuck::cast_slice(&words[..words.len().min(memory.bytes / 4)]);
    // SAFETY: no longer than the memory.
    unsafe { device.upload(&[(memory.address, words)]) }?;
    let mut filled = 4 * words.len();
    while 0 < filled && filled < memory.bytes {
        let bytes = filled.min(memory.bytes - filled);
        let places = [memory.address, memory.address + filled as u64];
        // SAFETY: both stretches are disjoint parts of the memory.
        unsafe { device.driver().copy(Stream::Programs, places, bytes) }?;
        filled += bytes;
    }
    Ok(())
}

/// Bytes that the operands of one replay span, so that a replay finds none of its own in a cache:
/// more than twice the 50 MB of an H100.
const APART: usize = 128 << 20;

/// Maximum of copies that one measurement averages over.
const MOST_COPIES: usize = 16;

/// Memory to time alternatives in: enough copies of what they read and write to exceed the caches
/// of the device.
pub(super) struct Trial<'d> {
    device: &'d Arc<Device>,
    memory: Memory,
    /// Bytes of a copy, and number of copies.
    bytes: usize,
    copies: usize,
}

impl<'d> Trial<'d> {
    /// Copies of an arena of so many bytes, filled with arbitrary numbers; `None` if memory is
    /// lacking.
    pub(super) fn new(device: &'d Arc<Device>, bytes: usize) -> Result<Option<Self>> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let room = |bytes| device.allocate(bytes, "a trial").ok();
        let copies = (APART / bytes.max(1)).clamp(1, MOST_COPIES);
        let several = room(copies * bytes).map(|memory| (memory, copies));
        let Some((memory, copies)) = several.or_else(|| Some((room(bytes)?, 1))) else {
            return Ok(None);
        };
        fill(device, &memory)?;
        Ok(Some(Self {
            device,
            memory,
            bytes,
            copies,
        }))
    }

    /// Runs steps once in the first copy, after filling it again.
    pub(super) fn run(&self, kernels: &[Kernel], steps: &[Step]) -> Result<()> {
        let kernels = self.device.load(kernels)?;
        let done = self.device.event()?;
        self.enqueue(0, &kernels, steps)?;
        done.record(Stream::Programs)?;
        self.device.wait(&done)
    }

    /// Words of the first copy.
    pub(super) fn words_at(&self, at: impl Iterator<Item = usize>) -> Result<Vec<u32>> {
        let at: Vec<u64> = at.map(|at| self.memory.address + 4 * at as u64).collect();
        let mut words = vec![0f32; at.len()];
        let mut wanted: Vec<(u64, &mut [f32])> = at.into_iter().zip(words.chunks_mut(1)).collect();
        // SAFETY: words in the arena.
        unsafe { self.device.download(&mut wanted) }?;
        Ok(words.into_iter().map(f32::to_bits).collect())
    }

    /// Milliseconds of one run of steps.
    pub(super) fn time(&self, kernels: &[Kernel], steps: &[Step]) -> Result<f32> {
        let kernels = self.device.load(kernels)?;
        let ends = [self.device.event()?, self.device.event()?];
        let replay = || self.replay(&kernels, steps, &ends);
        // Libraries load lazily.
        replay()?;
        let (mut best, mut spent) = (f32::INFINITY, 0.0);
        for _ in 0..REPLAYS {
            let time = replay()?;
            best = best.min(time);
            spent += time * self.copies as f32;
            if spent > ENOUGH {
                break;
            }
        }
        Ok(best)
    }

    /// Milliseconds of one replay. Results that are added to accumulate over replays, because a
    /// reset would cost both alternatives a copy.
    fn replay(&self, kernels: &Kernels, steps: &[Step], [start, end]: &[Event; 2]) -> Result<f32> {
        let driver = self.device.driver();
        start.record(Stream::Programs)?;
        for copy in 0..self.copies {
            self.enqueue(copy, kernels, steps)?;
        }
        end.record(Stream::Programs)?;
        self.device.wait(end)?;
        let ms = driver.elapsed(start.handle, end.handle)?;
        Ok(ms / self.copies as f32)
    }

    fn enqueue(&self, copy: usize, kernels: &Kernels, steps: &[Step]) -> Result<()> {
        let argument = |placed: &Placed| self.argument(copy, placed);
        let steps = steps.iter();
        for step in steps.filter(|step| !matches!(step, Step::Copy { .. })) {
            // SAFETY: every operand lies in its place in the copy, with that length.
            unsafe { enqueue(self.device.driver(), kernels, step, &argument) }?;
        }
        Ok(())
    }

    fn argument(&self, copy: usize, placed: &Placed) -> Argument {
        let offset = match placed.at {
            placed::Memory::Arena(offset) => offset,
            _ => unreachable!("the operands of a trial lie in its arena"),
        };
        let start = self.memory.address + (copy * self.bytes + offset) as u64;
        Argument::of(placed, start)
    }
}
