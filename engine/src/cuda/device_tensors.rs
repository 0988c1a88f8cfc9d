//! Tensors of a store on a device, and whether the host or the device has their newest values.
//!
//! The next replay that reads a tensor sends the changes of the host first. A reader that needs the
//! values of a step later, as a checkpoint does, [stages](Store::stage) them while programs
//! continue.
#![expect(unsafe_code, reason = "tensors are copied to their addresses")]

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;

use super::Result;
use super::device::{ALIGN, Device, Memory};
use super::driver::Stream;
use super::placed::Rounded;
use super::staging::{Staged, Staging};
use crate::large_pages::Part;
use crate::store::{Elsewhere, Slot, Store, Tensor};

/// Holder of a tensor's newest values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newest {
    Host,
    Both,
    Device,
}

/// Tensors of a store on a device, indexed by slot.
#[derive(Debug)]
pub(crate) struct DeviceTensors {
    device: Arc<Device>,
    memory: Memory,
    /// First byte of each tensor.
    starts: Vec<usize>,
    newest: Vec<Newest>,
    /// Frozen tensors in bf16, and whether they match the host's values.
    rounded: BTreeMap<Rounded, (Memory, bool)>,
    staging: Staging,
    id: u64,
}

/// First byte of each tensor, and the bytes of all; `sizes` are in bytes.
fn layout(sizes: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut bytes = 0;
    let starts = sizes.map(|size| {
        let start = bytes;
        bytes += size.next_multiple_of(ALIGN);
        start
    });
    (starts.collect(), bytes)
}

/// Bytes on a device of tensors of these sizes.
fn bytes(sizes: impl Iterator<Item = usize>) -> usize {
    layout(sizes).1
}

/// Rounds to bf16, two in each word.
fn two_by_two(values: &[f32]) -> Vec<u32> {
    let bits = |x: &f32| u32::from(bf16::from_f32(*x).to_bits());
    let words = values
        .chunks(2)
        .map(|pair| bits(&pair[0]) | pair.get(1).map_or(0, bits) << 16);
    words.collect()
}

/// Values of a tensor with zeros behind its rows and columns.
fn padded(tensor: &Tensor, [rows, columns]: [usize; 2]) -> Cow<'_, [f32]> {
    let (values, ty) = (tensor.read(), &tensor.ty);
    if [rows, columns] == [ty.rows(), ty.columns()] {
        return values;
    }
    let mut padded = vec![0.0; rows * columns];
    let lines = padded.chunks_mut(columns);
    for (line, values) in lines.zip(values.chunks(ty.columns())) {
        line[..values.len()].copy_from_slice(values);
    }
    padded.into()
}

impl DeviceTensors {
    /// Allocates tensors of `sizes` bytes; the host has their newest values.
    pub(crate) fn new(device: &Arc<Device>, sizes: impl Iterator<Item = usize>) -> Result<Self> {
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

    /// A number that no other store on a device ever has; addresses are reused.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Address of a tensor.
    pub(crate) fn address(&self, slot: Slot) -> u64 {
        self.memory.address + self.starts[slot.index()] as u64
    }

    /// Address of a tensor in bf16.
    pub(crate) fn rounded(&self, tensor: Rounded) -> u64 {
        self.rounded[&tensor].0.address
    }

    /// Copies to the host, which writes on the device wait for.
    pub(crate) fn staging(&self) -> &Staging {
        &self.staging
    }
}

impl Elsewhere for DeviceTensors {
    // A tensor that was added later has no copy on the device.
    fn is_home(&self, slot: Slot) -> bool {
        self.newest.get(slot.index()) != Some(&Newest::Device)
    }

    fn changed_at_home(&mut self, slot: Slot) {
        if let Some(newest) = self.newest.get_mut(slot.index()) {
            *newest = Newest::Host;
        }
        for (tensor, (_, is_newest)) in &mut self.rounded {
            *is_newest &= tensor.slot != slot;
        }
    }

    fn fetch(&mut self, tensors: Vec<(Slot, &mut Arc<Part<f32>>)>) -> Result<()> {
        let tensors = tensors.into_iter();
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

    fn copy(&mut self, from: Slot, to: Slot, bytes: usize) -> Result<bool> {
        let newest = self.newest.get(from.index());
        if newest.is_none_or(|newest| *newest == Newest::Host) {
            return Ok(false);
        }
        let places = [from, to].map(|slot| self.address(slot));
        let driver = self.device.driver();
        // SAFETY: both tensors lie at their addresses, and have as many bytes.
        unsafe { driver.copy(Stream::Programs, places, bytes) }?;
        self.newest[to.index()] = Newest::Device;
        Ok(true)
    }
}

/// A store with tensors on a device.
impl Store {
    /// Starts a copy of tensors to the host, as they are after all earlier work of programs, and
    /// returns at once; `None` if no device has tensors, so that the host has all. Programs and the
    /// host may change the tensors at once: writes on the device wait there for the copy, and a
    /// write of the host copies the tensor first.
    ///
    /// Copies go to pinned memory, which the first call allocates unless
    /// [`Self::make_room_to_stage`] has.
    ///
    /// # Errors
    ///
    /// If memory cannot be pinned, or the device fails.
    pub fn stage(&self, slots: &[Slot]) -> Result<Option<Staged>> {
        let Some(on_device) = self.device_tensors_if_any() else {
            return Ok(None);
        };
        let away = slots.iter().filter(|&&slot| !on_device.is_home(slot));
        let stretches = away.map(|&slot| (on_device.address(slot), self.ty(slot).len()));
        // SAFETY: each tensor lies at its address; programs and `send` wait for the copy before
        // they write, and `Driver::destroy` waits.
        let load = unsafe { on_device.staging.load(&stretches.collect::<Vec<_>>()) }?;
        let tensors = slots.iter().map(|&slot| {
            let tensor = &self.tensors[slot.index()];
            let held = on_device.is_home(slot).then(|| tensor.held.clone());
            (tensor.name.clone(), tensor.ty.clone(), held)
        });
        Ok(Some(Staged::new(tensors.collect(), load)))
    }

    /// Pins memory for every tensor that [`Self::stage`] may copy ([`Self::staged_bytes`]), which
    /// is slow; does nothing without a device.
    ///
    /// # Errors
    ///
    /// If memory cannot be pinned.
    pub fn make_room_to_stage(&self) -> Result<()> {
        let on_device = self.device_tensors_if_any();
        on_device.map_or(Ok(()), |on_device| {
            on_device.staging.make_room(self.staged_bytes())
        })
    }

    /// Sends those of `slots` to a device that the host has changed, or that are not on this device
    /// yet.
    pub(crate) fn send(&mut self, device: &Arc<Device>, slots: &[Slot]) -> Result<()> {
        let tensors = self.tensors.len();
        if !self.device_tensors_if_any().is_some_and(|on_device| {
            Arc::ptr_eq(&on_device.device, device) && on_device.starts.len() == tensors
        }) {
            // The store has new tensors, or this is another device.
            self.fetch()?;
            self.elsewhere = None;
            let sizes = self.tensors.iter().map(|tensor| tensor.ty.bytes());
            self.elsewhere = Some(Box::new(DeviceTensors::new(device, sizes)?));
        }
        let (on_device, of_host) = self.device_tensors_mut();
        let new = |slot: &&Slot| on_device.newest[slot.index()] == Newest::Host;
        let sent: Vec<Slot> = slots.iter().filter(new).copied().collect();
        if sent.is_empty() {
            return Ok(());
        }
        let values = sent.iter().map(|slot| of_host[slot.index()].read());
        let values: Vec<Cow<'_, [f32]>> = values.collect();
        let addresses = sent.iter().map(|&slot| on_device.address(slot));
        let pairs = addresses.zip(values.iter().map(|values| &**values));
        on_device.staging.left().make_wait(Stream::Programs)?;
        // SAFETY: each tensor has memory for its values at its address.
        unsafe { on_device.device.upload(&pairs.collect::<Vec<_>>()) }?;
        for slot in sent {
            on_device.newest[slot.index()] = Newest::Both;
        }
        Ok(())
    }

    /// Sends frozen tensors in bf16 to the device of the last [`Self::send`], if changed; no
    /// program writes them.
    pub(crate) fn send_rounded(&mut self, tensors: &[Rounded]) -> Result<()> {
        let (on_device, of_host) = self.device_tensors_mut();
        for tensor in tensors {
            let sent = on_device.rounded.get(tensor);
            if sent.is_some_and(|(_, newest)| *newest) {
                continue;
            }
            let words = two_by_two(&padded(&of_host[tensor.slot.index()], tensor.dims));
            if sent.is_none() {
                let bytes = 4 * words.len();
                let memory = on_device.device.allocate(bytes, "frozen parameters")?;
                on_device.rounded.insert(*tensor, (memory, false));
            }
            let (memory, is_newest) = on_device.rounded.get_mut(tensor).expect("made above");
            // SAFETY: allocated for this many bytes when the tensor was first sent.
            unsafe {
                let words = bytemuck::cast_slice(&words);
                on_device.device.upload(&[(memory.address, words)])?;
            }
            *is_newest = true;
        }
        Ok(())
    }

    /// Records that a program on the device writes tensors.
    pub(crate) fn changed_on_device(&mut self, slots: &[Slot]) {
        let (on_device, _) = self.device_tensors_mut();
        for slot in slots {
            on_device.newest[slot.index()] = Newest::Device;
        }
    }

    /// Tensors on the device of the last [`Self::send`].
    pub(crate) fn device_tensors(&self) -> &DeviceTensors {
        self.device_tensors_if_any()
            .expect("tensors are sent before a program reads them")
    }

    fn device_tensors_if_any(&self) -> Option<&DeviceTensors> {
        <dyn Any>::downcast_ref(self.elsewhere.as_deref()?)
    }

    /// The tensors on the device, mutable, and the host's tensors.
    fn device_tensors_mut(&mut self) -> (&mut DeviceTensors, &[Tensor]) {
        let elsewhere = self.elsewhere.as_deref_mut();
        let on_device = elsewhere.and_then(|there| <dyn Any>::downcast_mut(there));
        let on_device = on_device.expect("tensors are sent before a program reads them");
        (on_device, &self.tensors)
    }

    /// Bytes of all tensors on a device.
    pub fn device_bytes(&self) -> usize {
        bytes(self.tensors.iter().map(|tensor| tensor.ty.bytes()))
    }

    /// Bytes of pinned memory to [stage](Self::stage) every [lasting](Self::lasting) tensor that is
    /// not frozen.
    pub fn staged_bytes(&self) -> usize {
        let slots = self.lasting().filter(|&slot| !self.is_frozen(slot));
        bytes(slots.map(|slot| self.ty(slot).bytes()))
    }
}
