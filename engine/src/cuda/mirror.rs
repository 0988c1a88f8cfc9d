//! The tensors of a store, on a device, and which of the two places has their newest values.
//!
//! What the host changes is sent by the next replay that reads it. Who needs the values of a step later, as a checkpoint does, has them
//! [staged](Store::stage), and programs go on meanwhile.
#![expect(unsafe_code, reason = "tensors are copied to their addresses")]

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;

use super::Fault;
use super::device::{ALIGN, Device, Memory};
use super::driver::Stream;
use super::staging::{Load, Staged, Staging, Values};
use crate::store::{Elsewhere, Slot, Store};

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
fn bytes(sizes: impl Iterator<Item = usize>) -> usize {
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
        values: impl Fn(Slot) -> Cow<'v, [f32]>,
    ) -> Result<(), Fault> {
        let new = |slot: &&Slot| self.newest[slot.index()] == Newest::Host;
        if !slots.iter().any(|slot| new(&slot)) {
            return Ok(());
        }
        let sent = slots.iter().filter(new);
        let sent: Vec<(u64, Cow<'_, [f32]>)> = sent
            .map(|&slot| (self.address(slot), values(slot)))
            .collect();
        let sent: Vec<(u64, &[f32])> = sent.iter().map(|(at, values)| (*at, &**values)).collect();
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
        values: impl Fn(Slot) -> Cow<'v, [f32]>,
    ) -> Result<(), Fault> {
        for &slot in slots {
            if self.rounded.get(&slot).is_some_and(|(_, newest)| *newest) {
                continue;
            }
            let bits = |x: &f32| u32::from(bf16::from_f32(*x).to_bits());
            let values = values(slot);
            let words = values
                .chunks(2)
                .map(|pair| bits(&pair[0]) | pair.get(1).map_or(0, bits) << 16);
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
}

impl Elsewhere for Mirror {
    // Those of one that was added since are.
    fn is_home(&self, slot: Slot) -> bool {
        self.newest.get(slot.index()) != Some(&Newest::Device)
    }

    fn changed_at_home(&mut self, slot: Slot) {
        if let Some(newest) = self.newest.get_mut(slot.index()) {
            *newest = Newest::Host;
        }
        if let Some((_, is_newest)) = self.rounded.get_mut(&slot) {
            *is_newest = false;
        }
    }

    fn fetch(&mut self, tensors: Vec<(Slot, &mut Arc<Vec<f32>>)>) -> Result<(), Fault> {
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
}

/// What programs on a device make of a store.
impl Store {
    /// Asks for tensors as they are when all that programs were asked for is done, and returns before they have come; `None` where
    /// no device is, and all is at home. Programs and the host may change them at once: what a device has to write waits there
    /// until the values have left, and those at home are copied when the host changes them.
    ///
    /// They travel to pinned memory, which the first time asks for where nobody [made room](Self::make_room_to_stage).
    ///
    /// # Errors
    ///
    /// When there is no memory to pin, or the device refuses.
    pub fn stage(&self, slots: &[Slot]) -> Result<Option<Staged>, Fault> {
        let Some(mirror) = self.mirrored() else {
            return Ok(None);
        };
        let away = slots.iter().filter(|&&slot| !mirror.is_home(slot));
        let load = mirror.stage(away.map(|&slot| (slot, self.ty(slot).len())))?;
        let tensors = slots.iter().map(|&slot| {
            let tensor = &self.tensors[slot.index()];
            let values = if mirror.is_home(slot) {
                Values::Home(tensor.held.clone())
            } else {
                Values::Travels
            };
            (tensor.name.clone(), tensor.ty.clone(), values)
        });
        Ok(Some(Staged::new(tensors.collect(), load)))
    }

    /// Pins memory for all that [`Self::stage`] can be asked for ([`Self::staged_bytes`]), which takes a while; nothing where no device
    /// is.
    ///
    /// # Errors
    ///
    /// When there is no memory to pin.
    pub fn make_room_to_stage(&self) -> Result<(), Fault> {
        let mirror = self.mirrored();
        mirror.map_or(Ok(()), |mirror| mirror.make_room(self.staged_bytes()))
    }

    /// Sends to a device whatever of `slots` the host has changed, or that device has not seen.
    pub(crate) fn send(&mut self, device: &Arc<Device>, slots: &[Slot]) -> Result<(), Fault> {
        let tensors = self.tensors.len();
        if !self
            .mirrored()
            .is_some_and(|mirror| mirror.is_of(device, tensors))
        {
            // Tensors were added since, or it is another device.
            self.fetch()?;
            self.elsewhere = None;
            let sizes = self.tensors.iter().map(|tensor| tensor.ty.bytes());
            self.elsewhere = Some(Box::new(Mirror::new(device, sizes)?));
        }
        let (mirror, values) = self.mirror_mut();
        mirror.send(slots, values)
    }

    /// Sends them in bf16 to the device that they were last sent to, as far as it has not seen them so.
    pub(crate) fn send_rounded(&mut self, slots: &[Slot]) -> Result<(), Fault> {
        let (mirror, values) = self.mirror_mut();
        mirror.send_rounded(slots, values)
    }

    /// A program on the device changes tensors.
    pub(crate) fn changed_on_device(&mut self, slots: &[Slot]) {
        self.mirror_mut().0.changed_on_device(slots);
    }

    /// The tensors on the device that they were last sent to.
    pub(crate) fn mirror(&self) -> &Mirror {
        self.mirrored()
            .expect("tensors are sent before a program reads them")
    }

    fn mirrored(&self) -> Option<&Mirror> {
        let elsewhere: &dyn Any = self.elsewhere.as_deref()?;
        elsewhere.downcast_ref()
    }

    /// The same to be changed, and the host's values.
    fn mirror_mut<'s>(&'s mut self) -> (&'s mut Mirror, impl Fn(Slot) -> Cow<'s, [f32]>) {
        let Self {
            tensors, elsewhere, ..
        } = self;
        let elsewhere: Option<&mut dyn Any> = match elsewhere {
            Some(elsewhere) => Some(&mut **elsewhere),
            None => None,
        };
        let mirror = elsewhere.and_then(|there| there.downcast_mut());
        let mirror = mirror.expect("tensors are sent before a program reads them");
        (mirror, |slot: Slot| tensors[slot.index()].read())
    }

    /// Bytes that all tensors take on a device.
    pub fn device_bytes(&self) -> usize {
        bytes(self.tensors.iter().map(|tensor| tensor.ty.bytes()))
    }

    /// Bytes of pinned memory through which tensors are [staged](Self::stage): a place for each that is not frozen.
    pub fn staged_bytes(&self) -> usize {
        let slots = self.slots().filter(|&slot| !self.is_frozen(slot));
        bytes(slots.map(|slot| self.ty(slot).bytes()))
    }
}
