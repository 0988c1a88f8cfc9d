//! Inputs and numbers of the step, which the host gives each replay.
//!
//! Two buffers alternate. The host copies to one in pinned memory; a separate stream copies it to
//! the device while the replay before it runs; the stream of programs then copies it to where the
//! program reads it:
//!
//! ```text
//! host      writes 0          writes 1          writes 0, once 0 is on the device
//! inputs            copies 0          copies 1          copies 0, once the program has taken 0
//! programs                   takes 0, replay           takes 1, replay
//! ```
//!
//! So the host is at most a few replays ahead and waits only beyond that. An input that was not
//! filled since the last replay is not sent.
#![expect(unsafe_code, reason = "copies between pinned memory and a device")]

use std::sync::Arc;

use super::Result;
use super::device::{Device, Event, Memory, Pinned};
use super::driver::Stream;
use crate::given::Given;

/// The inputs and numbers of a program on a device.
pub(super) struct Inputs {
    device: Arc<Device>,
    /// The memory in which the program reads them.
    pub(super) place: Memory,
    buffers: [Buffer; 2],
    /// Buffer that the host writes.
    next: usize,
    /// Nothing was sent yet.
    is_new: bool,
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
    /// Allocates `bytes` for each.
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let buffer = || {
            Ok(Buffer {
                pinned: device.pin(bytes / 4)?,
                memory: device.allocate(bytes, "inputs")?,
                travelled: device.event()?,
                taken: device.event()?,
                sent: false,
            })
        };
        Ok(Self {
            place: device.allocate(bytes, "inputs")?,
            buffers: [buffer()?, buffer()?],
            device: Arc::clone(device),
            next: 0,
            is_new: true,
        })
    }

    /// Sends the numbers of the step, and the inputs that were filled since the last call.
    pub(super) fn send(&mut self, given: &mut Given) -> Result<()> {
        let driver = self.device.driver();
        let buffer = &mut self.buffers[self.next];
        if buffer.sent {
            // No result depends on it, so `Device::waits` does not count it.
            self.device.wait_uncounted(&buffer.travelled)?;
            buffer.sent = false;
        }
        let mut parts = given.take_filled(std::mem::take(&mut self.is_new));
        let (inputs, numbers) = buffer.pinned.words().split_at_mut(given.words().len());
        for part in &parts {
            inputs[part.clone()].copy_from_slice(&given.words()[part.clone()]);
        }
        parts.push(inputs.len()..inputs.len() + numbers.len());
        let seed = given.parameters.seed;
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the seed")]
        let fixed = [
            seed as u32,
            (seed >> 32) as u32,
            given.parameters.step,
            given.parameters.block,
        ];
        let scalars = given.parameters.scalars.iter();
        let words = fixed
            .into_iter()
            .chain(scalars.map(|scalar| scalar.to_bits()));
        numbers
            .iter_mut()
            .zip(words)
            .for_each(|(to, word)| *to = word);
        let copy = |stream, places: [u64; 2]| {
            parts.iter().try_for_each(|part| {
                let places = places.map(|place| place + 4 * part.start as u64);
                // SAFETY: both are as large; the host waits for `travelled` before it writes again,
                // and the next copy to the buffer for `taken`.
                unsafe { driver.copy(stream, places, 4 * part.len()) }
            })
        };
        let (pinned, memory) = (buffer.pinned.address, buffer.memory.address);
        buffer.taken.make_wait(Stream::Inputs)?;
        copy(Stream::Inputs, [pinned, memory])?;
        buffer.travelled.record(Stream::Inputs)?;
        buffer.sent = true;
        buffer.travelled.make_wait(Stream::Programs)?;
        copy(Stream::Programs, [memory, self.place.address])?;
        buffer.taken.record(Stream::Programs)?;
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
