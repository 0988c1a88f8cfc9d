//! Copies of tensors of a store to the host, for checkpoints, while programs run.
//!
//! ```text
//! host      requests step 8, a copy, steps 9, 10            another thread waits and writes
//! programs  step 8    step 9: forward, backward    its updates, once the copy is done    step 10
//! staging             copies the tensors of step 8
//! ```
//!
//! Before its first update, a step only reads parameters. So the updates alone wait, on the device,
//! and only if the copy takes longer than the rest of the step. The host waits for nothing. Pinned
//! memory is reused. The time of a copy on a GPU is unmeasured.
#![expect(unsafe_code, reason = "copies between a device and pinned memory")]

use std::sync::{Arc, Mutex, PoisonError};

use super::Result;
use super::device::{ALIGN, Device, Event, Pinned};
use super::driver::Stream;
use crate::store::{Held, Named, Values};
use crate::value::Type;

/// Copies of tensors from a device to the host.
#[derive(Debug)]
pub(crate) struct Staging {
    device: Arc<Device>,
    /// All earlier work of programs is done.
    reached: Event,
    /// The last copy is done.
    left: Arc<Event>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

impl Staging {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let left = device.event()?;
        // Nothing is being copied yet.
        left.record(Stream::Staging)?;
        Ok(Self {
            reached: device.event()?,
            left: Arc::new(left),
            spare: Arc::default(),
            device: Arc::clone(device),
        })
    }

    /// Event of the last copy: once it happens, the tensors may be written.
    pub(super) fn left(&self) -> &Arc<Event> {
        &self.left
    }

    /// Starts a copy of stretches, given by address and words, as they are after all earlier work
    /// of programs.
    ///
    /// # Safety
    ///
    /// There is live memory, which nothing writes before [`Self::left`] happens.
    pub(super) unsafe fn load(&self, stretches: &[(u64, usize)]) -> Result<Load> {
        let mut words = 0;
        let places = stretches.iter().map(|&(_, len)| {
            let first = words;
            words += len.next_multiple_of(ALIGN / 4);
            first
        });
        let places: Vec<usize> = places.collect();
        let load = Load {
            pinned: Some(self.pinned(words)?),
            left: Arc::clone(&self.left),
            spare: Arc::clone(&self.spare),
        };
        let to = load.pinned().address;
        self.reached.record(Stream::Programs)?;
        self.reached.make_wait(Stream::Staging)?;
        let asked = merged(stretches, &places).try_for_each(|(from, first, words)| {
            let places = [from, to + 4 * first as u64];
            // SAFETY: the caller's promise; the load waits for its copies even if one of them
            // fails.
            unsafe {
                let driver = self.device.driver();
                driver.copy(Stream::Staging, places, 4 * words)
            }
        });
        self.left.record(Stream::Staging)?;
        asked.map(|()| load)
    }

    /// Pins at least `bytes` for the next copy.
    pub(super) fn make_room(&self, bytes: usize) -> Result<()> {
        let pinned = self.pinned(bytes / 4)?;
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        *spare = Some(pinned);
        Ok(())
    }

    /// Pinned memory of at least `words` words.
    fn pinned(&self, words: usize) -> Result<Pinned> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        match spare.take().filter(|spare| spare.len() >= words) {
            Some(spare) => Ok(spare),
            None => self.device.pin(words),
        }
    }
}

/// Address, first word on the host and length of each copy: adjacent stretches are merged.
fn merged(
    stretches: &[(u64, usize)],
    places: &[usize],
) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut merged: Vec<(u64, usize, usize)> = Vec::new();
    for (&(address, words), &first) in stretches.iter().zip(places) {
        match merged.last_mut() {
            Some((from, start, len)) if *from + 4 * (first - *start) as u64 == address => {
                *len = first + words - *start;
            }
            _ => merged.push((address, first, words)),
        }
    }
    merged.into_iter()
}

/// Tensors that are being copied, in pinned memory, which dropping this returns.
#[derive(Debug)]
pub(crate) struct Load {
    pinned: Option<Pinned>,
    left: Arc<Event>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

impl Load {
    fn pinned(&self) -> &Pinned {
        self.pinned.as_ref().expect("given back when it is dropped")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // No copy may write to memory that is reused.
        let _ = self.left.wait();
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        *spare = self.pinned.take();
    }
}

/// Tensors of a store as they were when [staged](crate::Store::stage), whatever is written to the
/// store later. Any thread may wait for them.
#[derive(Debug)]
pub struct Staged {
    /// Names and types, with values that the host had; the others are in the copy, in this order.
    tensors: Vec<(String, Type, Option<Held>)>,
    load: Load,
}

impl Staged {
    pub(crate) fn new(tensors: Vec<(String, Type, Option<Held>)>, load: Load) -> Self {
        Self { tensors, load }
    }

    /// Waits for the copies and returns the tensors in the order of the request.
    ///
    /// # Errors
    ///
    /// If the device failed.
    pub fn arrived(&self) -> Result<Vec<Named<'_>>> {
        self.load.left.wait()?;
        let words: &[f32] = bytemuck::cast_slice(self.load.pinned().read());
        let mut first = 0;
        let tensors = self.tensors.iter().map(|(name, ty, held)| {
            let values = match held {
                Some(held) => held.values(),
                None => {
                    let start = first;
                    first += ty.len().next_multiple_of(ALIGN / 4);
                    Values::F32(&words[start..][..ty.len()])
                }
            };
            Named { name, ty, values }
        });
        Ok(tensors.collect())
    }
}
