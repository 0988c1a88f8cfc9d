//! Sums over the blocks of one rank on its GPU, which computes them in turn:
//! [`Running`] on a device.
//!
//! Results of a replay are added to the sums of earlier blocks along the tree. The sum over all
//! blocks of the rank is then all-reduced bucket by bucket. The host enqueues this and waits for
//! nothing.
#![expect(unsafe_code, reason = "addresses of a device")]

use std::sync::Arc;

use super::Fault;
use super::all_reduce::{BUCKET, Bucket, KERNELS, Meeting, room, tree_sum};
use super::device::{Device, Event, Kernels, Memory};
use super::driver::{Argument, Stream};
use super::executor::{Arena, Executor};
use super::kernel::Kernel;
use super::lowering::{self, Launch, Lowering, THREADS, arguments};
use super::placed::{self, Placed};
use crate::blocks::tree::Running;
use crate::store::{Slot, Store};
use crate::value::DType;

/// The sums of a stage.
#[derive(Default)]
pub(crate) struct BlockSums {
    elements: usize,
    /// Whether there is a sum of 1, 2, 4, .. blocks, in buffer 1, 2, 3, ..; buffer 0 takes the next
    /// part.
    subtrees: Vec<bool>,
    loaded: Option<Box<Loaded>>,
}

/// Memory, kernels and events on a device.
struct Loaded {
    device: Arc<Device>,
    /// The kernels [`add_part`] and [`tree_sum`].
    kernels: Kernels,
    buffers: Memory,
    room: Memory,
    made: Event,
    all_reduced: Event,
}

/// Kernel that adds a part to a sum. Its word: elements of each.
fn add_part() -> Launch {
    let mut to = Lowering::new(&[], &[], &[]);
    let [part, sum] = [0, 1].map(|_| to.scratch(0));
    let length = lowering::Argument::Word(0);
    to.kernel(KERNELS, "add_part", &[])
        .launch(&arguments![part, sum.out(), length]);
    to.only_launch()
}

/// The sums as buckets.
fn buckets(elements: usize) -> Vec<Bucket> {
    let each = BUCKET / 4;
    let all = Placed::new(placed::Memory::Arena(0), DType::F32, elements).out();
    let values = (0..elements)
        .step_by(each)
        .map(|first| all.part(first, each.min(elements - first)));
    let bucket = |value| Bucket {
        values: vec![value],
        ..Bucket::new(0, 0)
    };
    values.map(bucket).collect()
}

fn buffers(blocks: usize) -> usize {
    // One more for the next part.
    Running::buffers(blocks) + 1
}

impl BlockSums {
    /// Sums of `elements` f32s.
    pub(crate) fn new(elements: usize) -> Self {
        Self {
            elements,
            ..Self::default()
        }
    }

    /// Bytes on the device, for one of `ranks` ranks with `blocks` blocks each.
    pub(crate) fn bytes(elements: usize, blocks: usize, ranks: usize) -> usize {
        let room = if ranks > 1 {
            room(&buckets(elements), ranks)
        } else {
            0
        };
        4 * (elements * buffers(blocks) + room)
    }

    /// Adds outputs of the last replay of `program`, in the arena of that replay.
    ///
    /// - `block`, `blocks`: index of the block, and number of blocks of this rank
    pub(crate) fn add(
        &mut self,
        (program, names): (&Executor, &[String]),
        (store, arena): (&Store, &Arena),
        (block, blocks): (usize, usize),
    ) -> Result<(), Fault> {
        if block == 0 {
            self.subtrees.clear();
            self.subtrees.resize(buffers(blocks) - 1, false);
            self.load(program.device(), blocks)?;
        }
        let mut first = 0;
        for name in names {
            let from = program.output_at(name, (store, arena));
            self.copy([from.address, self.address(0, first)], from.len)?;
            first += from.len;
        }
        for size in 0..self.subtrees.len() {
            if !std::mem::replace(&mut self.subtrees[size], true) {
                let places = [0, size + 1].map(|buffer| self.address(buffer, 0));
                return self.copy(places, self.elements);
            }
            self.subtrees[size] = false;
            self.add_to_first(size + 1)?;
        }
        unreachable!("a buffer for each subtree of {blocks} blocks")
    }

    /// Adds up all blocks of all ranks, and fills the tensors `sums` of the store in order.
    pub(crate) fn finish(&mut self, store: &mut Store, sums: &[Slot]) -> Result<(), Fault> {
        let mut is_first = true;
        for size in 0..self.subtrees.len() {
            if !self.subtrees[size] {
                continue;
            }
            if std::mem::take(&mut is_first) {
                let places = [size + 1, 0].map(|buffer| self.address(buffer, 0));
                self.copy(places, self.elements)?;
            } else {
                self.add_to_first(size + 1)?;
            }
        }
        self.all_reduce()?;
        store.send(&self.loaded().device, sums)?;
        let mut first = 0;
        for &slot in sums {
            let len = store.ty(slot).len();
            let to = store.device_tensors().address(slot);
            self.copy([self.address(0, first), to], len)?;
            first += len;
        }
        store.changed_on_device(sums);
        Ok(())
    }

    fn load(&mut self, device: &Arc<Device>, blocks: usize) -> Result<(), Fault> {
        let bytes = 4 * self.elements * buffers(blocks);
        let is_there =
            |loaded: &Loaded| Arc::ptr_eq(&loaded.device, device) && loaded.buffers.bytes >= bytes;
        if self.loaded.as_deref().is_some_and(is_there) {
            return Ok(());
        }
        self.loaded = None;
        let ranks = device.joined().map_or(1, |joined| joined.size);
        let what = "sums of blocks";
        let kernels = [add_part(), tree_sum(ranks)].map(|launch| Kernel::of(&launch));
        let buffers = device.allocate(bytes, what)?;
        let room = Self::bytes(self.elements, blocks, ranks) - bytes;
        self.loaded = Some(Box::new(Loaded {
            buffers,
            room: device.allocate(room, what)?,
            made: device.event()?,
            all_reduced: device.event()?,
            kernels: device.load(&kernels)?,
            device: Arc::clone(device),
        }));
        Ok(())
    }

    fn loaded(&self) -> &Loaded {
        self.loaded.as_deref().expect("a part was added")
    }

    /// Address of an element of a buffer.
    fn address(&self, buffer: usize, element: usize) -> u64 {
        self.loaded().buffers.address + 4 * (buffer * self.elements + element) as u64
    }

    fn argument(&self, buffer: usize, written: bool) -> Argument {
        Argument::f32s(self.address(buffer, 0), self.elements, written)
    }

    /// Copies `len` elements from the first address to the second.
    fn copy(&self, places: [u64; 2], len: usize) -> Result<(), Fault> {
        let driver = self.loaded().device.driver();
        // SAFETY: outputs in their arena, buffers and tensors of the store have that length; only
        // this stream uses them.
        unsafe { driver.copy(Stream::Programs, places, 4 * len) }
    }

    /// Adds a buffer to buffer 0.
    fn add_to_first(&self, buffer: usize) -> Result<(), Fault> {
        let loaded = self.loaded();
        let arguments = [self.argument(buffer, false), self.argument(0, true)];
        let len = u32::try_from(self.elements).expect("elements of sums");
        // SAFETY: both buffers have `elements` f32s.
        unsafe {
            loaded.device.driver().launch(
                Stream::Programs,
                loaded.kernels.get(0),
                [self.elements.div_ceil(THREADS), 1],
                &arguments,
                &[len],
            )
        }
    }

    /// All-reduces buffer 0.
    fn all_reduce(&self) -> Result<(), Fault> {
        let loaded = self.loaded();
        let joined = loaded.device.joined();
        let Some(joined) = joined.filter(|joined| joined.size > 1) else {
            return Ok(());
        };
        let first = self.address(0, 0);
        let meeting = Meeting {
            driver: loaded.device.driver(),
            joined,
            argument: &|placed| Argument::of(placed, first),
        };
        let room = Argument::f32s(loaded.room.address, loaded.room.bytes / 4, true);
        loaded.made.record(Stream::Programs)?;
        loaded.made.make_wait(Stream::AllReduce)?;
        for bucket in buckets(self.elements) {
            // SAFETY: the first buffer is left alone until `all_reduced` has happened.
            unsafe { meeting.exact(&bucket, room, loaded.kernels.get(1), None) }?;
        }
        loaded.all_reduced.record(Stream::AllReduce)?;
        loaded.all_reduced.make_wait(Stream::Programs)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // Nothing may still run in memory that is freed, or of kernels that are unloaded.
        let _ = self
            .made
            .record(Stream::Programs)
            .and_then(|()| self.device.wait_uncounted(&self.made));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::tree;
    use crate::cuda::emulated::{Emulated, Order, is_there};
    use crate::cuda::tests::on;
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::value::Type;

    #[test]
    fn blocks_are_added_as_on_the_cpu_in_any_order_of_streams() {
        if !is_there() {
            return;
        }
        let names = ["y".to_owned(), "z".to_owned()];
        for order in Order::ALL {
            let device = Device::of(Emulated::new(order));
            let (mut b, mut store) = (Builder::new(), Store::new());
            let x = b.input("x", &Type::f32(&[37])).unwrap();
            let z = b.slice(x, 5..8).unwrap();
            for (name, value) in names.iter().zip([x, z]) {
                let twice = b.add(value, value).unwrap();
                b.output(name, twice);
            }
            let slots = [("sum of y", 37), ("sum of z", 3)]
                .map(|(name, len)| store.transient(name, &[len]));
            let mut executor = on(&device, &b).unwrap();
            let mut sums = BlockSums::new(40);
            for blocks in 1..=7 {
                let parts: Vec<Vec<f32>> = (0..blocks)
                    .map(|block| random(&[37], (10 * blocks + block) as u64).values)
                    .collect();
                for (block, part) in parts.iter().enumerate() {
                    executor.input("x").copy_from_slice(part);
                    executor.run(&mut store).unwrap();
                    sums.add(
                        (&executor, &names),
                        (&store, &executor.arena),
                        (block, blocks),
                    )
                    .unwrap();
                }
                sums.finish(&mut store, &slots).unwrap();
                store.fetch().unwrap();
                let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                let mut whole = [0.0; 37];
                tree::sum(&parts, &mut whole);
                let twice = whole.map(|x| 2.0 * x);
                assert_eq!(store.get(slots[0]), twice, "{blocks} blocks, {order:?}");
                assert_eq!(store.get(slots[1]), &twice[5..8]);
            }
        }
    }

    // By hand: sums of 1, 2 and 4 blocks and the next part; two parts of a slice of 50, rounded up
    // to vectors of 4, and their sum.
    #[test]
    fn bytes_are_known_before() {
        assert_eq!(BlockSums::bytes(100, 4, 1), 4 * 400);
        assert_eq!(BlockSums::bytes(100, 4, 2), 4 * (400 + 3 * 52));
        // A large sum is all-reduced one bucket at a time.
        let elements = 10 * BUCKET / 4;
        let room = 3 * BUCKET / 8;
        assert_eq!(BlockSums::bytes(elements, 2, 2), 4 * (3 * elements + room));
    }
}
