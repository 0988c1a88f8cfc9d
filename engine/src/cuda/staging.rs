//! Tensors of a store on their way to the host, beside the programs: what a checkpoint is made of.
//!
//! ```text
//! host       asks for step 8, for what step 8 left, for steps 9, 10         another thread waits, and writes
//! programs   step 8    step 9: forward, backward    its updates, once all has left    step 10
//! staging              what step 8 left travels
//! ```
//!
//! A step reads parameters until its first update, so that is what waits, on the device, and only where the copy takes longer than
//! all before it. The host waits for nothing. Pinned memory is kept from one time to the next. How long a copy takes on a GPU is
//! unmeasured.
#![expect(unsafe_code, reason = "copies between a device and pinned memory")]

use std::sync::{Arc, Mutex, PoisonError};

use super::Fault;
use super::device::{ALIGN, Device, Event, Pinned};
use super::driver::{Stream, Transfer, Way};
use crate::store::{self, Held, Named};
use crate::value::Type;

/// The way out of a device.
#[derive(Debug)]
pub(crate) struct Staging {
    device: Arc<Device>,
    /// All is done that programs were asked for before.
    reached: Event,
    /// What was asked for last has left its place.
    left: Arc<Event>,
    spare: Arc<Mutex<Option<Pinned>>>,
}

impl Staging {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, Fault> {
        let left = device.event()?;
        // Nothing has been asked for yet.
        left.record(Stream::Staging)?;
        Ok(Self {
            reached: device.event()?,
            left: Arc::new(left),
            spare: Arc::default(),
            device: Arc::clone(device),
        })
    }

    /// Happens when what was asked for last has left its place, which may be written from then on.
    pub(super) fn left(&self) -> &Arc<Event> {
        &self.left
    }

    /// Asks for a stretch of memory of each address and length in words, as it is when all that programs were asked for is done.
    ///
    /// # Safety
    ///
    /// There is live memory, which nothing writes before it has [left](Self::left).
    pub(super) unsafe fn load(&self, stretches: &[(u64, usize)]) -> Result<Load, Fault> {
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
        self.reached.hold(Stream::Staging)?;
        let asked = merged(stretches, &places).try_for_each(|(from, first, words)| {
            let transfer = Transfer {
                way: Way::Out,
                from,
                to: to + 4 * first as u64,
                bytes: 4 * words,
            };
            // SAFETY: the caller's promise; the load waits for it, whatever becomes of the others.
            unsafe { self.device.driver().copy(Stream::Staging, transfer) }
        });
        self.left.record(Stream::Staging)?;
        asked.map(|()| load)
    }

    /// Has pinned memory of so many bytes ready.
    pub(super) fn make_room(&self, bytes: usize) -> Result<(), Fault> {
        let pinned = self.pinned(bytes / 4)?;
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        *spare = Some(pinned);
        Ok(())
    }

    /// Pinned memory of so many words, or more.
    fn pinned(&self, words: usize) -> Result<Pinned, Fault> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        match spare.take().filter(|spare| spare.len() >= words) {
            Some(spare) => Ok(spare),
            None => self.device.pin(words),
        }
    }
}

/// Address, first word at home and length of what travels at once: stretches that follow each other here and there.
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

/// What is on its way, in pinned memory that goes back when it is dropped.
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
        // Nothing may travel to memory that is given away.
        let _ = self.left.wait();
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        *spare = self.pinned.take();
    }
}

/// Tensors of a store as they were when they were [staged](crate::Store::stage), whatever becomes of the store since. Any thread may
/// wait for them.
#[derive(Debug)]
pub struct Staged {
    tensors: Vec<(String, Type, Values)>,
    load: Load,
}

/// Where the values of a tensor are.
#[derive(Debug)]
pub(crate) enum Values {
    /// At home, where they were the newest.
    Home(Held),
    /// Among what travels, in the order of the tensors.
    Travels,
}

impl Staged {
    pub(crate) fn new(tensors: Vec<(String, Type, Values)>, load: Load) -> Self {
        Self { tensors, load }
    }

    /// Waits until all have arrived, and gives them in the order in which they were asked for.
    ///
    /// # Errors
    ///
    /// When the device failed.
    pub fn arrived(&self) -> Result<Vec<Named<'_>>, Fault> {
        self.load.left.wait()?;
        let words: &[f32] = bytemuck::cast_slice(self.load.pinned().read());
        let mut first = 0;
        let tensors = self.tensors.iter().map(|(name, ty, values)| {
            let values = match values {
                Values::Home(held) => held.values(),
                Values::Travels => {
                    let start = first;
                    first += ty.len().next_multiple_of(ALIGN / 4);
                    store::Values::F32(&words[start..][..ty.len()])
                }
            };
            Named { name, ty, values }
        });
        Ok(tensors.collect())
    }
}
