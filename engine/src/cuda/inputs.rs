//! What the host gives to each replay: the numbers of the step, and the inputs it writes.
//!
//! There are two buffers, taken in turn. The host writes one in pinned memory; it travels on a stream of its own while the replay
//! before it runs; the stream of programs takes it from there to where the program reads it:
//!
//! ```text
//! host      writes 0          writes 1          writes 0, once 0 has travelled
//! inputs            0 travels         1 travels         0 travels, once the program has taken 0
//! programs                   takes 0, replay           takes 1, replay
//! ```
//!
//! So the host is at most a few replays ahead, and waits only where it would be more. What is not written for a replay is not
//! sent: the program finds it as the replay before left it.
#![expect(unsafe_code, reason = "copies between pinned memory and a device")]

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Fault;
use super::device::{Device, Event, Memory, Pinned};
use super::driver::{Stream, Transfer, Way};
use super::placed::FIXED_PARAMETERS;
use super::program::Program;
use crate::step_parameters::StepParameters;

/// Inputs start at multiples of this many words.
const ALIGN: usize = 64;

/// Both buffers.
pub(super) struct Inputs {
    device: Arc<Device>,
    /// Of both buffers: where the numbers of the step and each input lie.
    layout: Layout,
    buffers: [Buffer; 2],
    /// The one that the host writes.
    next: usize,
    /// Inputs that it has written.
    written: Vec<String>,
    /// Why it could not be waited for, to be told by the replay.
    fault: Option<Fault>,
}

/// Words of a buffer.
struct Layout {
    /// First and length of the numbers of the step.
    numbers: (usize, usize),
    /// First and length of each input.
    inputs: BTreeMap<String, (usize, usize)>,
    words: usize,
}

impl Layout {
    fn new(program: &Program) -> Self {
        let numbers = FIXED_PARAMETERS + program.scalars.len();
        let mut words = numbers.next_multiple_of(ALIGN);
        let inputs = program.inputs.iter().map(|(name, placed)| {
            let first = words;
            words += placed.len.next_multiple_of(ALIGN);
            (name.clone(), (first, placed.len))
        });
        Self {
            numbers: (0, numbers),
            inputs: inputs.collect(),
            words,
        }
    }
}

/// Bytes on the device that the inputs of a program take.
pub(super) fn bytes(program: &Program) -> usize {
    2 * 4 * Layout::new(program).words
}

struct Buffer {
    pinned: Pinned,
    memory: Memory,
    /// It has travelled.
    travelled: Event,
    /// The program has taken it.
    taken: Event,
    /// It may still travel.
    sent: bool,
}

impl Inputs {
    /// Buffers for a program.
    pub(super) fn new(device: &Arc<Device>, program: &Program) -> Result<Self, Fault> {
        let layout = Layout::new(program);
        let buffer = || {
            Ok(Buffer {
                pinned: device.pin(layout.words)?,
                memory: device.allocate(4 * layout.words, "inputs")?,
                travelled: device.event()?,
                taken: device.event()?,
                sent: false,
            })
        };
        Ok(Self {
            buffers: [buffer()?, buffer()?],
            device: Arc::clone(device),
            written: Vec::with_capacity(layout.inputs.len()),
            layout,
            next: 0,
            fault: None,
        })
    }

    /// The words of an input, for the next replay.
    pub(super) fn words(&mut self, name: &str) -> &mut [u32] {
        if let Err(fault) = self.wait() {
            self.fault = Some(fault);
        }
        if !self.written.iter().any(|known| known == name) {
            self.written.push(name.to_owned());
        }
        let (first, len) = self.layout.inputs[name];
        &mut self.buffers[self.next].pinned.words()[first..][..len]
    }

    /// Waits until the buffer that the host writes has travelled: no result is waited for, and [`Device::waits`] does not count it.
    fn wait(&mut self) -> Result<(), Fault> {
        let buffer = &mut self.buffers[self.next];
        if buffer.sent {
            self.device.wait_uncounted(&buffer.travelled)?;
            buffer.sent = false;
        }
        Ok(())
    }

    /// Sends the numbers of the step to the address `numbers_at`, and what was written to where `place` says.
    ///
    /// # Safety
    ///
    /// There is live memory for all of it.
    pub(super) unsafe fn send(
        &mut self,
        numbers: &StepParameters,
        numbers_at: u64,
        place: impl Fn(&str) -> u64,
    ) -> Result<(), Fault> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        self.wait()?;
        let driver = self.device.driver();
        let buffer = &mut self.buffers[self.next];
        let (first, len) = self.layout.numbers;
        let seed = numbers.seed;
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the seed")]
        let fixed = [
            seed as u32,
            (seed >> 32) as u32,
            numbers.step,
            numbers.first_row,
        ];
        let scalars = numbers.scalars.iter().map(|scalar| scalar.to_bits());
        let words = fixed.into_iter().chain(scalars);
        let to = &mut buffer.pinned.words()[first..][..len];
        to.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        let written = self.written.iter();
        let inputs = written.map(|name| (self.layout.inputs[name], place(name)));
        let parts = std::iter::once((self.layout.numbers, numbers_at)).chain(inputs);
        buffer.taken.hold(Stream::Inputs)?;
        for ((first, len), _) in parts.clone() {
            let transfer = Transfer {
                way: Way::In,
                from: buffer.pinned.address + 4 * first as u64,
                to: buffer.memory.address + 4 * first as u64,
                bytes: 4 * len,
            };
            // SAFETY: both buffers have this layout; the host waits for `travelled` before it writes again.
            unsafe { driver.copy(Stream::Inputs, transfer) }?;
        }
        buffer.travelled.record(Stream::Inputs)?;
        buffer.sent = true;
        buffer.travelled.hold(Stream::Programs)?;
        for ((first, len), to) in parts {
            let transfer = Transfer {
                way: Way::Within,
                from: buffer.memory.address + 4 * first as u64,
                to,
                bytes: 4 * len,
            };
            // SAFETY: the caller's promise.
            unsafe { driver.copy(Stream::Programs, transfer) }?;
        }
        buffer.taken.record(Stream::Programs)?;
        self.written.clear();
        self.next = 1 - self.next;
        Ok(())
    }
}

impl Drop for Inputs {
    fn drop(&mut self) {
        for buffer in &self.buffers {
            // Pinned memory is given back when nothing reads it any more.
            let _ = self.device.wait_uncounted(&buffer.travelled);
        }
    }
}
