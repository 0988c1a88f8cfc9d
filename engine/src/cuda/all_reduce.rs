//! All-reduce of gradients over all blocks, in buckets, while other gradients are still computed.
//!
//! ```text
//! programs     ... made | ...... | ...... | read ...
//!                    \                   /
//! all-reduces          sum over all blocks
//! ```
//!
//! The all-reduce of a bucket starts when its last value is computed. The program waits for it
//! before the first read of any of its values, so gradients of the last layers travel while those
//! of the first are computed. All ranks replay one program, so their all-reduces have one order.
//!
//! Blocks are added along the [tree](crate::blocks::tree), at the traffic of a ring. A bucket is
//! cut into one slice for each rank; then each rank
//!
//! 1. sends every slice of its values to the rank that owns it,
//! 2. adds the parts of its own slice, one from each rank,
//! 3. sends the sum to all ranks.
//!
//! A message costs a GPU several microseconds, whatever its length. So the small values of a bucket
//! are first packed into one, and unpacked at the end: a model of thousands of tensors sends tens
//! of messages a bucket. The packed values, the parts and the sum of a slice lie in memory of the
//! program, which all buckets share.
#![expect(unsafe_code, reason = "addresses of a device")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::Result;
use super::driver::{Argument, Driver, LibraryCall, Stream};
use super::kernel::Kernel;
use super::lowering::{self, Launch, Lowering, MOST_OPERANDS, SHARED, Source, THREADS, tensors};
use super::nccl::{Communicator, Message};
use super::placed::Placed;
use crate::op::Builder;
use crate::plan::Plan;
use crate::value::Value;

/// Kernels that add parts.
const KERNELS: Source = Source::new("all_reduce", include_str!("all_reduce.cu"));

/// Bytes of a bucket. Below this, latency of an all-reduce outweighs its transfer; unmeasured.
pub(super) const BUCKET: usize = 16 << 20;

/// A value is small if it is at most this part of a bucket.
const SMALL: usize = 64;

/// Most small values of a bucket: as many as one launch copies.
const MOST_SMALL: usize = MOST_OPERANDS / 2;

/// Values that one all-reduce adds up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) values: Vec<Placed>,
    /// Small values, which are packed into one.
    pub(crate) small: Vec<Placed>,
    /// The kernel that packs them.
    pub(crate) pack: Option<usize>,
    /// Steps: the first that may start the all-reduce, and the first that waits for it.
    pub(crate) made: usize,
    pub(crate) read: usize,
}

/// A stretch of a value, and its first element in the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    address: u64,
    len: usize,
    at: usize,
}

/// Elements from one packed value to the next: vectors of 16 bytes are aligned.
fn packed(placed: &Placed) -> usize {
    placed.len.next_multiple_of(4)
}

impl Bucket {
    /// A bucket without values.
    pub(super) fn new(made: usize, read: usize) -> Self {
        Self {
            values: Vec::new(),
            small: Vec::new(),
            pack: None,
            made,
            read,
        }
    }

    fn len(&self) -> usize {
        let large = self.values.iter().map(|placed| placed.len);
        large.sum::<usize>() + self.packed()
    }

    /// Elements of the packed values.
    fn packed(&self) -> usize {
        self.small.iter().map(packed).sum()
    }

    /// All its values.
    fn all(&self) -> impl Iterator<Item = &Placed> {
        self.values.iter().chain(&self.small)
    }

    /// The launch that packs its small values or unpacks them, and the blocks of either.
    pub(super) fn pack(&self) -> Option<Launch> {
        if self.small.is_empty() {
            return None;
        }
        let mut to = Lowering::new(&[], &[], &[]);
        let copied = self.small.iter().map(|small| {
            let [from, packed] = [0, 1].map(|_| to.scratch(small.len));
            vec![from, packed.out()]
        });
        let (blocks, copied) = tensors(copied);
        to.kernel(SHARED, "copy_all<float>", &[])
            .blocks(blocks, 1)
            .launch(&[copied]);
        Some(to.only_launch())
    }

    /// Elements from one slice to the next, a multiple of 4; the last slices may be shorter.
    fn stride(&self, ranks: usize) -> usize {
        self.len().div_ceil(ranks).next_multiple_of(4)
    }

    /// Elements of a rank's slice.
    fn slice(&self, rank: usize, ranks: usize) -> Range<usize> {
        let [first, end] = [rank, rank + 1].map(|rank| rank * self.stride(ranks));
        first.min(self.len())..end.min(self.len())
    }

    /// Stretches of values, of which the packed ones are the last, that make up a rank's slice.
    fn stretches(&self, values: &[Argument], rank: usize, ranks: usize) -> Vec<Stretch> {
        let slice = self.slice(rank, ranks);
        let mut before = 0;
        let stretches = values.iter().filter_map(|of| {
            let value = before..before + of.len;
            before = value.end;
            let own = value.start.max(slice.start)..value.end.min(slice.end);
            (!own.is_empty()).then(|| Stretch {
                address: of.address + 4 * (own.start - value.start) as u64,
                len: own.len(),
                at: own.start - slice.start,
            })
        });
        stretches.collect()
    }
}

/// f32s of scratch for the largest bucket: the parts of a slice from all ranks, their sum, and the
/// packed values.
pub(super) fn room(buckets: &[Bucket], ranks: usize) -> usize {
    let each = buckets.iter();
    let each = each.map(|bucket| (ranks + 1) * bucket.stride(ranks) + bucket.packed());
    each.max().unwrap_or(0)
}

/// Kernel that adds the parts of a slice, one from each rank. Its words: elements from one part to
/// the next, elements of the slice.
pub(super) fn tree_sum(ranks: usize) -> Launch {
    let mut to = Lowering::new(&[], &[], &[]);
    let [parts, sum] = [0, 1].map(|_| to.scratch(0));
    let words = [0, 0].map(lowering::Argument::Word);
    let operands = [parts.into(), sum.out().into()];
    to.kernel(KERNELS, "tree_sum", &[ranks.to_string()])
        .launch(&[operands, words].concat());
    to.only_launch()
}

/// All-reduces of a program.
pub(super) struct Meeting<'a> {
    pub(super) driver: &'a dyn Driver,
    pub(super) joined: &'a Arc<Communicator>,
    /// Address of a value.
    pub(super) argument: &'a dyn Fn(&Placed) -> Argument,
}

impl Meeting<'_> {
    /// Enqueues the all-reduce of a bucket by NCCL itself, in whatever order of addition NCCL
    /// picks.
    ///
    /// # Safety
    ///
    /// Values lie in their places, which nothing else reads or writes until the all-reduce is done.
    pub(super) unsafe fn fast(&self, bucket: &Bucket) -> Result<()> {
        let values: Vec<Argument> = bucket.all().map(self.argument).collect();
        let places: Vec<(u64, usize)> = values.iter().map(|at| (at.address, at.len)).collect();
        let joined = Arc::clone(self.joined);
        // SAFETY: the caller's promise.
        let call: LibraryCall = Arc::new(move |stream| unsafe { joined.sum(stream, &places) });
        // SAFETY: as above.
        unsafe { self.driver.call(Stream::AllReduce, &values, call) }
    }

    /// Enqueues the all-reduce of a bucket along the tree.
    ///
    /// - `room`: [`room`] f32s of device memory
    /// - `kernel`: the loaded [`tree_sum`]
    /// - `pack`: the loaded [`Bucket::pack`], if the bucket has small values
    ///
    /// # Safety
    ///
    /// As for [`Self::fast`]; only other buckets use `room`.
    pub(super) unsafe fn exact(
        &self,
        bucket: &Bucket,
        room: Argument,
        kernel: (u64, &Kernel),
        pack: Option<(u64, &Kernel)>,
    ) -> Result<()> {
        let (rank, ranks) = (self.joined.rank, self.joined.size);
        let stride = bucket.stride(ranks);
        let scratch = |first: usize, len, written| {
            Argument::f32s(room.address + 4 * first as u64, len, written)
        };
        let mut operands: Vec<Argument> = bucket.values.iter().map(self.argument).collect();
        let first_packed = (ranks + 1) * stride;
        let packed_values = scratch(first_packed, bucket.packed(), true);
        operands.extend(pack.map(|_| packed_values));
        let own = bucket.stretches(&operands, rank, ranks);
        let mut values = Vec::new();
        let (mut parts, mut sums) = (Vec::new(), Vec::new());
        for of in 0..ranks {
            let message = |address, len| Message {
                address,
                len,
                rank: of,
            };
            for stretch in bucket.stretches(&operands, of, ranks) {
                values.push(message(stretch.address, stretch.len));
            }
            for &Stretch { len, at, .. } in &own {
                parts.push(message(scratch(of * stride + at, len, true).address, len));
                sums.push(message(
                    scratch(ranks * stride + at, len, false).address,
                    len,
                ));
            }
        }
        // The small values, and their places among the packed ones.
        let mut next = first_packed;
        let copied = bucket.small.iter().map(|small| {
            let first = next;
            next += packed(small);
            [(self.argument)(small), scratch(first, small.len, true)]
        });
        let copied: Vec<[Argument; 2]> = copied.collect();
        let copy = |from: usize| {
            let Some(pack) = pack else { return Ok(()) };
            let arguments = copied.iter().flat_map(|pair| {
                let (from, to) = (pair[from], pair[1 - from]);
                [(from, false), (to, true)].map(|(of, written)| Argument { written, ..of })
            });
            let arguments: Vec<Argument> = arguments.collect();
            let blocks = bucket.small.iter().map(|small| lowering::shares(small.len));
            let blocks = [blocks.sum(), 1];
            // SAFETY: the caller's promise.
            unsafe {
                self.driver
                    .launch(Stream::AllReduce, pack, blocks, &arguments, &[])
            }
        };
        operands.push(room);
        copy(0)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.exchange(&operands, values.clone(), parts)?;
            let len = bucket.slice(rank, ranks).len();
            if len > 0 {
                let arguments = [
                    scratch(0, ranks * stride, false),
                    scratch(ranks * stride, len, true),
                ];
                let words = [stride, len].map(|n| u32::try_from(n).expect("elements of a slice"));
                let blocks = [len.div_ceil(THREADS), 1];
                self.driver
                    .launch(Stream::AllReduce, kernel, blocks, &arguments, &words)?;
            }
            self.exchange(&operands, sums, values)?;
        }
        copy(1)
    }

    /// # Safety
    ///
    /// Messages lie in the operands, which nothing else reads or writes until the exchange is done.
    unsafe fn exchange(
        &self,
        operands: &[Argument],
        sent: Vec<Message>,
        received: Vec<Message>,
    ) -> Result<()> {
        let joined = Arc::clone(self.joined);
        let call: LibraryCall = Arc::new(move |stream| {
            // SAFETY: the caller's promise.
            unsafe { joined.exchange(stream, &sent, &received) }
        });
        // SAFETY: as above.
        unsafe { self.driver.call(Stream::AllReduce, operands, call) }
    }
}

/// A value in its place, and the steps between which nothing reads or writes it.
#[derive(Debug)]
struct Idle {
    placed: Placed,
    made: usize,
    read: usize,
}

/// Buckets of a program that was laid out, of at least `bytes` each where values suffice, in the
/// order in which they are complete.
pub(crate) fn buckets(
    builder: &Builder,
    (plan, ops): (&Plan, &[Range<usize>]),
    placed: impl Fn(Value) -> Option<Placed>,
    bytes: usize,
) -> Vec<Bucket> {
    let end = ops.last().map_or(0, |steps| steps.end);
    let mut idle: BTreeMap<Value, Idle> = BTreeMap::new();
    for (planned, steps) in plan.nodes.iter().zip(ops) {
        let node = &builder.nodes[planned.node];
        for value in node.inputs.iter().chain(node.into.iter().flatten()) {
            if let Some(idle) = idle.get_mut(value) {
                idle.read = idle.read.min(steps.start);
            }
        }
        for &value in &node.outputs {
            if let (true, Some(placed)) = (builder.all_reduced.contains(&value), placed(value)) {
                let made = steps.end;
                let read = end;
                idle.insert(value, Idle { placed, made, read });
            }
        }
    }
    let mut idle: Vec<Idle> = idle.into_values().collect();
    idle.sort_by_key(|idle| idle.made);
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut filled = bytes;
    for Idle { placed, made, read } in idle {
        let size = placed.len * placed.dtype.bytes();
        match buckets.last_mut() {
            Some(last) if filled < bytes && made <= last.read => {
                (last.made, last.read) = (made, last.read.min(read));
            }
            _ => {
                filled = 0;
                buckets.push(Bucket::new(made, read));
            }
        }
        filled += size;
        let bucket = buckets.last_mut().expect("pushed above");
        let is_small = SMALL * size <= bytes && bucket.small.len() < MOST_SMALL;
        let values = match is_small {
            true => &mut bucket.small,
            false => &mut bucket.values,
        };
        values.push(placed);
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::tree;
    use crate::cuda::Device;
    use crate::cuda::Executor;
    use crate::cuda::driver::Stream;
    use crate::cuda::emulated::{Call, Emulated, Ignored, Order, is_there};
    use crate::cuda::nccl_tests::{ranks, stand_in};
    use crate::cuda::placed::Memory;
    use crate::cuda::program::{Program, value};
    use crate::cuda::replay_tests::emulated;
    use crate::cuda::routed_rows::on_device;
    use crate::cuda::tests;
    use crate::cuda::tests::{Alone, same_bits};
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::reduction::Reduction;
    use crate::store::Store;
    use crate::value::DType;

    /// Bytes of a bucket that holds two of the gradients below.
    const TWO: usize = 512;

    /// A chain of products: the sum of squares of its result, and its factors.
    fn products(layers: u64) -> (Builder, Store, Value, Vec<Value>) {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let mut kept = |b: &mut Builder, name: String, seed: u64| {
            let sample = random(&[8, 8], seed);
            let slot = store.add(name, &sample.dims, sample.values);
            b.persistent(&store, slot)
        };
        let mut x = kept(&mut b, "x".to_owned(), 1);
        let weights = (0..layers).map(|layer| kept(&mut b, format!("w {layer}"), 2 + layer));
        let weights: Vec<Value> = weights.collect();
        for &w in &weights {
            x = b.matmul(x, w).unwrap();
        }
        let loss = b.sum_squares(x).unwrap();
        (b, store, loss, weights)
    }

    /// [`products`] with gradients of all factors and their norms, all-reduced or not.
    fn chain(layers: u64, all_reduced: bool) -> (Builder, Store) {
        let (mut b, store, loss, weights) = products(layers);
        let gradients = b.gradients(loss, &weights).unwrap();
        b.in_blocks(if all_reduced { 2 } else { 1 });
        let gradients = gradients.into_iter().map(Option::unwrap);
        let gradients: Vec<Value> = gradients.map(|part| b.all_reduce(part).unwrap()).collect();
        for (index, &gradient) in gradients.iter().enumerate() {
            b.output(format!("gradient {index}"), gradient);
        }
        let norms = b.gradient_norm(&gradients).unwrap();
        b.output("norms", norms);
        (b, store)
    }

    /// The program with buckets of another size.
    fn with_buckets(b: &Builder, bytes: usize) -> Program {
        let b = &on_device(b);
        let program = Program::laid_out(b);
        let at = |v: Value| program.given.plan.places[v.index()].map(|place| value(place, b.ty(v)));
        let mut buckets = buckets(b, (&program.given.plan, &program.ops), at, bytes);
        // The usual buckets have the kernels of their small values.
        for (bucket, usual) in buckets.iter_mut().zip(&program.buckets) {
            bucket.pack = usual.pack.filter(|_| bucket.small == usual.small);
        }
        Program { buckets, ..program }
    }

    #[test]
    fn gradients_travel_while_others_are_computed() {
        let (b, _) = chain(6, true);
        let program = with_buckets(&b, TWO);
        let buckets = &program.buckets;
        let sizes = buckets.iter().map(|bucket| bucket.values.len());
        assert_eq!(sizes.collect::<Vec<_>>(), [2; 3]);
        assert!(buckets.is_sorted_by(|one, next| one.made < next.made));
        // Norms are the last op; nothing waits before them.
        let norms = program.ops.last().unwrap().start;
        assert!(buckets.iter().all(|bucket| bucket.read == norms));
        assert!(buckets[0].made + 2 < norms);
        // A bucket of the usual size holds all of them.
        let usual = Program::laid_out(&on_device(&b)).buckets;
        assert_eq!((usual.len(), usual[0].small.len()), (1, 6));
        assert!(
            Program::laid_out(&on_device(&chain(6, false).0))
                .buckets
                .is_empty()
        );
    }

    #[test]
    fn a_value_that_is_read_early_is_waited_for_early() {
        let (mut b, _, loss, weights) = products(4);
        b.in_blocks(2);
        let mut sums = Vec::new();
        // The gradient of the last factor is complete first; an op reads it before the others are
        // computed.
        for wanted in [&weights[3..], &weights[..3]] {
            for gradient in b.gradients(loss, wanted).unwrap() {
                sums.push(b.all_reduce(gradient.unwrap()).unwrap());
            }
            b.eager = true;
            let early = b.sum_squares(sums[0]).unwrap();
            b.eager = false;
            b.output("early", early);
        }
        let norms = b.gradient_norm(&sums).unwrap();
        b.output("norms", norms);
        let program = with_buckets(&b, usize::MAX);
        let mut ops = program.given.ops.iter().zip(&program.ops);
        let (_, reads) = ops.find(|((_, op), _)| op.name == "sum_squares").unwrap();
        let sizes = program.buckets.iter().map(|bucket| bucket.all().count());
        assert_eq!(sizes.collect::<Vec<_>>(), [1, 3]);
        assert_eq!(program.buckets[0].read, reads.start);
        assert!(
            program
                .buckets
                .iter()
                .all(|bucket| bucket.made <= bucket.read)
        );
    }

    #[test]
    fn slices_cover_a_bucket() {
        let placed = |len| Placed::new(Memory::Arena(0), DType::F32, len);
        for lens in [&[1][..], &[7, 1, 100], &[4096, 3, 0, 5]] {
            let bucket = Bucket {
                values: lens.iter().map(|&len| placed(len)).collect(),
                ..Bucket::new(0, 0)
            };
            let values = lens.iter().zip(1u64..);
            let values = values.map(|(&len, at)| Argument::f32s(1_000_000 * at, len, true));
            let values: Vec<Argument> = values.collect();
            for ranks in 1..=8 {
                let mut at_value = (0, 0);
                for rank in 0..ranks {
                    let mut at = 0;
                    for stretch in bucket.stretches(&values, rank, ranks) {
                        while values[at_value.0].len == at_value.1 {
                            at_value = (at_value.0 + 1, 0);
                        }
                        let expected = values[at_value.0].address + 4 * at_value.1 as u64;
                        assert_eq!((stretch.address, stretch.at), (expected, at));
                        at_value.1 += stretch.len;
                        at += stretch.len;
                    }
                    assert!(at <= bucket.stride(ranks));
                }
                let whole = lens.iter().rposition(|&len| len > 0).unwrap();
                assert_eq!(at_value, (whole, lens[whole]));
                let room = super::room(std::slice::from_ref(&bucket), ranks);
                assert!(room >= bucket.len() && room <= (bucket.len() / ranks + 4) * (ranks + 1));
            }
        }
    }

    #[test]
    fn small_values_are_one_message_for_each_rank() {
        let (b, _) = chain(6, true);
        let [plain, packed] = [TWO, BUCKET].map(|bytes| with_buckets(&b, bytes).buckets);
        let messages = |bucket: &Bucket, lens: Vec<usize>| -> usize {
            let values = lens.iter().map(|&len| Argument::f32s(0, len, true));
            let values: Vec<Argument> = values.collect();
            (0..2)
                .map(|rank| bucket.stretches(&values, rank, 2).len())
                .sum()
        };
        let lens = |bucket: &Bucket| bucket.values.iter().map(|placed| placed.len).collect();
        let sent = plain.iter().map(|bucket| messages(bucket, lens(bucket)));
        assert_eq!(sent.sum::<usize>(), 6);
        let bucket = &packed[0];
        assert!(bucket.values.is_empty() && bucket.pack.is_some());
        assert_eq!(messages(bucket, vec![bucket.packed()]), 2);
        // A value of a 64th of a bucket is small, and a launch copies so many.
        let large = with_buckets(&b, 64 * 256 - 1).buckets;
        assert_eq!((large[0].values.len(), large[0].small.len()), (6, 0));
    }

    #[test]
    fn tree_sum_on_a_device_matches_the_cpu() {
        if !is_there() {
            return;
        }
        let device = Device::of(Emulated::new(Order::new(true, true)));
        for ranks in 1..=8 {
            let kernels = device.load(&[Kernel::of(&tree_sum(ranks))]).unwrap();
            for len in [1usize, 5, 256, 1001] {
                let stride = len.next_multiple_of(4);
                let parts = random(&[ranks * stride], (ranks * len) as u64).values;
                let slices: Vec<&[f32]> = parts.chunks(stride).map(|part| &part[..len]).collect();
                let mut expected = vec![0.0; len];
                tree::sum(&slices, &mut expected);
                let given = device.allocate(4 * parts.len(), "parts").unwrap();
                let sum = device.allocate(4 * len, "a sum").unwrap();
                let arguments = [
                    Argument::f32s(given.address, parts.len(), false),
                    Argument::f32s(sum.address, len, true),
                ];
                let words = [stride, len].map(|n| u32::try_from(n).unwrap());
                let mut found = vec![0.0; len];
                // SAFETY: memory of that many f32s.
                unsafe {
                    device.upload(&[(given.address, &parts)]).unwrap();
                    let driver = device.driver();
                    let blocks = [len.div_ceil(THREADS), 1];
                    driver
                        .launch(
                            Stream::AllReduce,
                            kernels.get(0),
                            blocks,
                            &arguments,
                            &words,
                        )
                        .unwrap();
                    let done = device.event().unwrap();
                    done.record(Stream::AllReduce).unwrap();
                    device.wait(&done).unwrap();
                    device.download(&mut [(sum.address, &mut found)]).unwrap();
                }
                let bits =
                    |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{ranks} parts of {len}");
            }
        }
    }

    #[test]
    fn a_lost_rank_is_reported_and_frees_device_memory() {
        let Some(nccl) = stand_in().filter(|_| is_there()) else {
            return;
        };
        let told = ranks(nccl, 2, |joined| {
            let goes = joined.rank == 1;
            let (emulated, device) = emulated(Order::new(false, false));
            device.joins(joined);
            let (b, mut store) = chain(6, true);
            let mut executor = Alone::of(Executor::of(with_buckets(&b, TWO)), &device).unwrap();
            executor.run(&mut store).unwrap();
            executor.fetch(&mut store).unwrap();
            if goes {
                return None;
            }
            let ended = executor.run(&mut store);
            let fault = ended.and_then(|()| executor.fetch(&mut store)).unwrap_err();
            drop((executor, store, device));
            assert!(emulated.is_empty());
            Some(fault)
        });
        let fault = told[0].clone().unwrap();
        assert!(fault.is_peer_lost());
        assert_eq!(
            fault.to_string(),
            "NCCL cannot exchange parts of sums: remote process exited or there was a network error: rank 1 has gone"
        );
    }

    #[test]
    fn a_fast_sum_is_one_call_of_nccl_and_takes_no_memory() {
        let Some(nccl) = stand_in().filter(|_| is_there()) else {
            return;
        };
        let (expected, _) = found(Order::new(false, false), None, None, TWO);
        let found = ranks(nccl, 2, |joined| {
            let (emulated, device) = emulated(Order::new(false, false));
            device.joins(joined);
            let (mut b, mut store) = chain(6, true);
            let exact = Program::laid_out(&on_device(&b)).all_reduce_bytes();
            b.reduce(Reduction::Fast);
            let program = Program::laid_out(&on_device(&b));
            // Six matrices of 64 elements in f32, packed; a slice is one half: a part from each
            // rank, and the sum.
            let bytes = 4 * (3 * 192 + 384);
            assert_eq!((exact, program.all_reduce_bytes()), (bytes, 0));
            let mut executor = Alone::of(Executor::of(program), &device).unwrap();
            executor.run(&mut store).unwrap();
            let calls = emulated.calls();
            let calls = calls.iter().filter(|call| **call == Call::Library);
            // Once directly, once while the graph is captured.
            assert_eq!(calls.count(), 2);
            tests::found(&mut executor, &mut store).unwrap()
        });
        for (name, values) in found.into_iter().flatten() {
            let (_, alone) = expected.iter().find(|(known, _)| *known == name).unwrap();
            if name.starts_with("gradient") {
                let twice: Vec<f32> = alone.iter().map(|x| 2.0 * x).collect();
                assert_eq!(values, twice, "{name}");
            }
        }
    }

    /// Results of three replays, where the other rank contributes the same, and the device calls of
    /// the third; buckets are of so many bytes.
    fn found(
        order: Order,
        joined: Option<Communicator>,
        ignored: Option<Ignored>,
        bytes: usize,
    ) -> (Vec<(String, Vec<f32>)>, Vec<Call>) {
        let (emulated, device) = emulated(order);
        emulated.ignore(ignored);
        let (b, mut store) = chain(6, joined.is_some());
        joined.into_iter().for_each(|joined| device.joins(joined));
        let mut executor = Alone::of(Executor::of(with_buckets(&b, bytes)), &device).unwrap();
        executor.run(&mut store).unwrap();
        executor.run(&mut store).unwrap();
        emulated.calls();
        executor.run(&mut store).unwrap();
        let calls = emulated.calls();
        (tests::found(&mut executor, &mut store).unwrap(), calls)
    }

    #[test]
    fn gradients_are_summed_before_they_are_read_in_any_order_of_streams() {
        let Some(nccl) = stand_in().filter(|_| is_there()) else {
            return;
        };
        let of_ranks = |order, ignored, bytes| {
            let found = |joined| found(order, Some(joined), ignored, bytes);
            let mut found = ranks(nccl, 2, found);
            let (one, other) = (found.pop().unwrap(), found.pop().unwrap());
            assert!(ignored.is_some() || one == other);
            one
        };
        // Sums double and their squares quadruple: exponents change, other bits do not.
        let (mut expected, _) = found(Order::new(true, true), None, None, TWO);
        for (name, values) in &mut expected {
            let factor = match name.as_str() {
                "norms" => 4.0,
                name if name.starts_with("gradient") => 2.0,
                _ => 1.0,
            };
            values.iter_mut().for_each(|x| *x *= factor);
        }
        for order in Order::ALL {
            // Each value is sent as it is, or all are packed into one.
            for bytes in [TWO, BUCKET] {
                let (found, calls) = of_ranks(order, None, bytes);
                same_bits(&format!("in {order:?}"), &found, &expected);
                // The all-reduces are part of the graph.
                assert!(calls.contains(&Call::Graph) && !calls.contains(&Call::Library));
            }
        }
        // Control: each wait is needed in one of the orders.
        for stream in [Stream::AllReduce, Stream::Programs] {
            let wrong = Order::ALL.iter().any(|&order| {
                let (found, _) = of_ranks(order, Some(Ignored::StreamWait(stream)), TWO);
                let pairs = found.iter().zip(&expected);
                pairs.into_iter().any(|((_, one), (_, other))| {
                    one.iter()
                        .zip(other)
                        .any(|(x, y)| x.to_bits() != y.to_bits())
                })
            });
            assert!(wrong, "{stream:?}");
        }
    }
}
