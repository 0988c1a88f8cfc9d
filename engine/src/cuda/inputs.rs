//! Numbers of the step and inputs, which the host writes for each replay.
//!
//! Two buffers alternate. The host writes one in pinned memory; a separate stream copies it to the
//! device while the replay before it runs; the stream of programs then copies it to where the
//! program reads it:
//!
//! ```text
//! host      writes 0          writes 1          writes 0, once 0 is on the device
//! inputs            copies 0          copies 1          copies 0, once the program has taken 0
//! programs                   takes 0, replay           takes 1, replay
//! ```
//!
//! So the host is at most a few replays ahead and waits only beyond that. An input that is not
//! written is not sent and keeps its values from the replay before.
#![expect(unsafe_code, reason = "copies between pinned memory and a device")]

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Fault;
use super::device::{Device, Event, Memory, Pinned};
use super::driver::{Stream, Transfer, Way};
use super::placed::FIXED_PARAMETERS;
use super::program::Program;
use crate::step_parameters::StepParameters;

/// Alignment of inputs in words.
const ALIGN: usize = 64;

/// Both buffers, and where they go.
pub(super) struct Inputs {
    device: Arc<Device>,
    /// Layout of each buffer: numbers of the step, then inputs.
    layout: Layout,
    buffers: [Buffer; 2],
    /// Buffer that the host writes.
    next: usize,
    /// Inputs written for the next replay.
    written: Vec<String>,
    /// Fault of a wait, which the replay returns.
    fault: Option<Fault>,
}

/// Layout of a buffer, in words.
struct Layout {
    /// First word and length of the numbers of the step.
    numbers: (usize, usize),
    /// First word and length of each input.
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

/// Bytes on the device for the inputs of a program.
pub(super) fn bytes(program: &Program) -> usize {
    2 * 4 * Layout::new(program).words
}

struct Buffer {
    pinned: Pinned,
    memory: Memory,
    /// Its copy to the device is done.
    travelled: Event,
    /// The program has taken it.
    taken: Event,
    /// Its copy may still run.
    sent: bool,
}

impl Inputs {
    /// Allocates the buffers of a program.
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

    /// Words of an input, for the next replay.
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

    /// Waits for the copy of the buffer that the host writes. No result depends on it, so
    /// [`Device::waits`] does not count it.
    fn wait(&mut self) -> Result<(), Fault> {
        let buffer = &mut self.buffers[self.next];
        if buffer.sent {
            self.device.wait_uncounted(&buffer.travelled)?;
            buffer.sent = false;
        }
        Ok(())
    }

    /// Sends the numbers of the step to the address `numbers_at`, and each written input to
    /// `place`.
    ///
    /// # Safety
    ///
    /// There is live memory at all these addresses.
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
            numbers.block,
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
            // SAFETY: both buffers have this layout; the host waits for `travelled` before it
            // writes again.
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
            // Pinned memory is freed when no copy reads it any more.
            let _ = self.device.wait_uncounted(&buffer.travelled);
        }
    }
}
