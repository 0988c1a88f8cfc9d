//! The tensors of a store, on a device, and which of the two places has their newest values.
#![expect(unsafe_code, reason = "tensors are copied to their addresses")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;

use super::Fault;
use super::device::{ALIGN, Device, Memory};
use super::driver::Stream;
use super::staging::{Load, Staging};
use crate::store::Slot;

/// Who has the newest values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newest {
    Host,
    Both,
    Device,
}

/// Tensors on a device, by the number of their slot.
#[derive(Debug)]
pub(crate) struct Mirror {
    device: Arc<Device>,
    memory: Memory,
    /// First byte of each.
    starts: Vec<usize>,
    newest: Vec<Newest>,
    /// Frozen tensors that programs read in bf16, and whether they are as the host's.
    rounded: BTreeMap<Slot, (Memory, bool)>,
    staging: Staging,
    id: u64,
}

/// First byte of each tensor of these sizes in bytes, and the bytes of all.
fn layout(sizes: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut bytes = 0;
    let starts = sizes.map(|size| {
        let start = bytes;
        bytes += size.next_multiple_of(ALIGN);
        start
    });
    (starts.collect(), bytes)
}

/// Bytes that tensors of these sizes take on a device.
pub(crate) fn bytes(sizes: impl Iterator<Item = usize>) -> usize {
    layout(sizes).1
}

impl Mirror {
    /// Room for tensors of these sizes in bytes; the host has their newest values.
    pub(crate) fn new(
        device: &Arc<Device>,
        sizes: impl Iterator<Item = usize>,
    ) -> Result<Self, Fault> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (starts, bytes) = layout(sizes);
        Ok(Self {
            memory: device.allocate(bytes, "parameters and moments")?,
            device: Arc::clone(device),
            newest: vec![Newest::Host; starts.len()],
            starts,
            rounded: BTreeMap::new(),
            staging: Staging::new(device)?,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Whether it is of this device and as many tensors.
    pub(crate) fn is_of(&self, device: &Arc<Device>, tensors: usize) -> bool {
        Arc::ptr_eq(&self.device, device) && self.starts.len() == tensors
    }

    /// No other mirror ever has this number; addresses come back.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Where a tensor lies.
    pub(crate) fn address(&self, slot: Slot) -> u64 {
        self.memory.address + self.starts[slot.index()] as u64
    }

    /// Whether the host's values of a tensor are the newest; those of one that was added since are.
    pub(crate) fn is_home(&self, slot: Slot) -> bool {
        self.newest.get(slot.index()) != Some(&Newest::Device)
    }

    /// The host changes a tensor.
    pub(crate) fn changed_at_home(&mut self, slot: Slot) {
        if let Some(newest) = self.newest.get_mut(slot.index()) {
            *newest = Newest::Host;
        }
        if let Some((_, is_newest)) = self.rounded.get_mut(&slot) {
            *is_newest = false;
        }
    }

    /// A program on the device changes tensors.
    pub(crate) fn changed_on_device(&mut self, slots: &[Slot]) {
        for slot in slots {
            self.newest[slot.index()] = Newest::Device;
        }
    }

    /// Copies to the device whatever of `slots` the host has changed.
    pub(crate) fn send<'v>(
        &mut self,
        slots: &[Slot],
        values: impl Fn(Slot) -> &'v [f32],
    ) -> Result<(), Fault> {
        let new = |slot: &&Slot| self.newest[slot.index()] == Newest::Host;
        if !slots.iter().any(|slot| new(&slot)) {
            return Ok(());
        }
        let sent: Vec<(u64, &[f32])> = slots
            .iter()
            .filter(new)
            .map(|&slot| (self.address(slot), values(slot)))
            .collect();
        self.staging.left().hold(Stream::Programs)?;
        // SAFETY: each tensor has room for its values at its address.
        unsafe { self.device.upload(&sent) }?;
        for slot in slots {
            if self.newest[slot.index()] == Newest::Host {
                self.newest[slot.index()] = Newest::Both;
            }
        }
        Ok(())
    }

    /// Copies to the device, rounded to bf16, whatever of `slots`, which no program changes, the host has changed.
    pub(crate) fn send_rounded<'v>(
        &mut self,
        slots: &[Slot],
        values: impl Fn(Slot) -> &'v [f32],
    ) -> Result<(), Fault> {
        for &slot in slots {
            if self.rounded.get(&slot).is_some_and(|(_, newest)| *newest) {
                continue;
            }
            let bits = |x: &f32| u32::from(bf16::from_f32(*x).to_bits());
            let pairs = values(slot).chunks(2);
            let words = pairs.map(|pair| bits(&pair[0]) | pair.get(1).map_or(0, bits) << 16);
            let words: Vec<u32> = words.collect();
            if !self.rounded.contains_key(&slot) {
                let memory = self.device.allocate(4 * words.len(), "frozen parameters")?;
                self.rounded.insert(slot, (memory, false));
            }
            let (memory, is_newest) = self.rounded.get_mut(&slot).expect("made above");
            // SAFETY: as many bytes were allocated when the tensor was first sent.
            unsafe {
                let words = bytemuck::cast_slice(&words);
                self.device.upload(&[(memory.address, words)])?;
            }
            *is_newest = true;
        }
        Ok(())
    }

    /// Where a tensor lies in bf16.
    pub(crate) fn rounded(&self, slot: Slot) -> u64 {
        self.rounded[&slot].0.address
    }

    /// The way out of the device, by which what it writes has to wait.
    pub(crate) fn staging(&self) -> &Staging {
        &self.staging
    }

    /// Has so many bytes of pinned memory ready for [`Self::stage`].
    pub(crate) fn make_room(&self, bytes: usize) -> Result<(), Fault> {
        self.staging.make_room(bytes)
    }

    /// Asks for tensors of these lengths as they are when all that programs were asked for is done.
    pub(crate) fn stage(
        &self,
        tensors: impl Iterator<Item = (Slot, usize)>,
    ) -> Result<Load, Fault> {
        let stretches = tensors.map(|(slot, len)| (self.address(slot), len));
        // SAFETY: each tensor lies at its address; programs and `send` write to it when it has left, and `Driver::free` waits.
        unsafe { self.staging.load(&stretches.collect::<Vec<_>>()) }
    }

    /// Copies to the host whatever of these tensors the device has changed.
    pub(crate) fn fetch<'v>(
        &mut self,
        tensors: impl Iterator<Item = (Slot, &'v mut Arc<Vec<f32>>)>,
    ) -> Result<(), Fault> {
        let changed = tensors.filter(|(slot, _)| !self.is_home(*slot));
        let (slots, mut wanted): (Vec<Slot>, Vec<(u64, &mut [f32])>) = changed
            .map(|(slot, values)| (slot, (self.address(slot), &mut **Arc::make_mut(values))))
            .unzip();
        if slots.is_empty() {
            return Ok(());
        }
        // SAFETY: each tensor lies at its address.
        unsafe { self.device.download(&mut wanted) }?;
        for slot in slots {
            self.newest[slot.index()] = Newest::Both;
        }
        Ok(())
    }
}
