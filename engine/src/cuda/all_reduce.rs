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
//! The parts and the sum of a slice lie in memory of the program, which all buckets share.
#![expect(unsafe_code, reason = "addresses of a device")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::Fault;
use super::device_op::DeviceGraph;
use super::driver::{Argument, Driver, LibraryCall, Stream};
use super::kernel::Kernel;
use super::lowering::{self, Launch, Lowering, Source, THREADS};
use super::nccl::{Communicator, Message};
use super::placed::{Placed, PlacedOp};
use crate::plan::Plan;
use crate::value::{DType, Value};

/// Kernels that add parts.
pub(super) const KERNELS: Source = Source::new("all_reduce", include_str!("all_reduce.cu"));

/// Bytes of a bucket. Below this, latency of an all-reduce outweighs its transfer; unmeasured.
pub(super) const BUCKET: usize = 16 << 20;

/// Values that one all-reduce adds up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) values: Vec<Placed>,
    /// Steps: the first that may start the all-reduce, and the first that waits for it.
    pub(crate) made: usize,
    pub(crate) read: usize,
}

/// A stretch of a value, and its first element in the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    placed: Placed,
    at: usize,
}

impl Bucket {
    fn len(&self) -> usize {
        self.values.iter().map(|placed| placed.len).sum()
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

    /// Stretches of values that make up a rank's slice.
    fn stretches(&self, rank: usize, ranks: usize) -> Vec<Stretch> {
        let slice = self.slice(rank, ranks);
        let mut before = 0;
        let stretches = self.values.iter().filter_map(|placed| {
            let value = before..before + placed.len;
            before = value.end;
            let own = value.start.max(slice.start)..value.end.min(slice.end);
            (!own.is_empty()).then(|| Stretch {
                placed: Placed {
                    first: placed.first + own.start - value.start,
                    len: own.len(),
                    ..*placed
                },
                at: own.start - slice.start,
            })
        });
        stretches.collect()
    }
}

/// f32s of scratch for the largest bucket: the parts of a slice from all ranks, and their sum.
pub(super) fn room(buckets: &[Bucket], ranks: usize) -> usize {
    let strides = buckets.iter().map(|bucket| bucket.stride(ranks));
    (ranks + 1) * strides.max().unwrap_or(0)
}

/// Kernel that adds the parts of a slice, one from each rank. Its words: elements from one part to
/// the next, elements of the slice.
pub(super) fn tree_sum(ranks: usize) -> Launch {
    let mut to = Lowering::new(&[], &[], &[]);
    let [parts, sum] = [0, 1].map(|_| to.scratch(0));
    let words = [0, 0].map(lowering::Argument::Word);
    let operands = [parts.into(), sum.out().into()];
    to.kernel(KERNELS, "tree_sum", &[ranks.into()])
        .launch(&[operands, words].concat());
    to.only_launch()
}

/// All-reduces of one program or stage.
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
    pub(super) unsafe fn fast(&self, bucket: &Bucket) -> Result<(), Fault> {
        let values: Vec<Argument> = bucket.values.iter().map(self.argument).collect();
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
    ///
    /// # Safety
    ///
    /// As for [`Self::fast`]; only other buckets use `room`.
    pub(super) unsafe fn exact(
        &self,
        bucket: &Bucket,
        room: Argument,
        kernel: (u64, &Kernel),
    ) -> Result<(), Fault> {
        let (rank, ranks) = (self.joined.rank, self.joined.size);
        let stride = bucket.stride(ranks);
        let part = |of: usize, stretch: &Stretch| Message {
            address: room.address + 4 * (of * stride + stretch.at) as u64,
            len: stretch.placed.len,
            rank: of,
        };
        let value = |of: usize, stretch: &Stretch| Message {
            address: (self.argument)(&stretch.placed).address,
            len: stretch.placed.len,
            rank: of,
        };
        let own = bucket.stretches(rank, ranks);
        let of_all = || {
            (0..ranks).flat_map(|of| {
                bucket
                    .stretches(of, ranks)
                    .into_iter()
                    .map(move |stretch| (of, stretch))
            })
        };
        let own_of_all = || (0..ranks).flat_map(|of| own.iter().map(move |stretch| (of, stretch)));
        let values: Vec<Message> = of_all().map(|(of, stretch)| value(of, &stretch)).collect();
        let parts: Vec<Message> = own_of_all()
            .map(|(of, stretch)| part(of, stretch))
            .collect();
        let sums = own_of_all().map(|(of, stretch)| Message {
            rank: of,
            ..part(ranks, stretch)
        });
        let sums: Vec<Message> = sums.collect();
        let mut operands: Vec<Argument> = bucket.values.iter().map(self.argument).collect();
        operands.push(room);
        // SAFETY: the caller's promise.
        unsafe {
            self.exchange(&operands, values.clone(), parts)?;
            let len = bucket.slice(rank, ranks).len();
            if len > 0 {
                let argument = |first: usize, len, written| Argument {
                    address: room.address + 4 * (first * stride) as u64,
                    len,
                    written,
                    dtype: DType::F32,
                };
                let arguments = [
                    argument(0, ranks * stride, false),
                    argument(ranks, len, true),
                ];
                let words = [stride, len].map(|n| u32::try_from(n).expect("elements of a slice"));
                let blocks = [len.div_ceil(THREADS), 1];
                self.driver
                    .launch(Stream::AllReduce, kernel, blocks, &arguments, &words)?;
            }
            self.exchange(&operands, sums, values)
        }
    }

    /// # Safety
    ///
    /// Messages lie in the operands, which nothing else reads or writes until the exchange is done.
    unsafe fn exchange(
        &self,
        operands: &[Argument],
        sent: Vec<Message>,
        received: Vec<Message>,
    ) -> Result<(), Fault> {
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
    builder: &DeviceGraph,
    (plan, ops): (&Plan, &[PlacedOp]),
    placed: impl Fn(Value) -> Option<Placed>,
    bytes: usize,
) -> Vec<Bucket> {
    let end = ops.last().map_or(0, |op| op.steps.end);
    let mut idle: BTreeMap<Value, Idle> = BTreeMap::new();
    for (planned, op) in plan.nodes.iter().zip(ops) {
        let node = &builder.nodes[planned.node];
        for value in node.inputs.iter().chain(node.into.iter().flatten()) {
            if let Some(idle) = idle.get_mut(value) {
                idle.read = idle.read.min(op.steps.start);
            }
        }
        for &value in &node.outputs {
            if let (true, Some(placed)) = (builder.all_reduced.contains(&value), placed(value)) {
                let made = op.steps.end;
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
        match buckets.last_mut() {
            Some(last) if filled < bytes && made <= last.read => {
                last.values.push(placed);
                (last.made, last.read) = (made, last.read.min(read));
            }
            _ => {
                filled = 0;
                let values = vec![placed];
                buckets.push(Bucket { values, made, read });
            }
        }
        filled += placed.len * placed.dtype.bytes();
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::tree;
    use crate::cuda::Device;
    use crate::cuda::Executor;
    use crate::cuda::device_op::on_device;
    use crate::cuda::driver::Stream;
    use crate::cuda::emulated::{Call, Emulated, Ignored, Order, is_there};
    use crate::cuda::nccl_tests::{ranks, stand_in};
    use crate::cuda::placed::Memory;
    use crate::cuda::program::{Program, value};
    use crate::cuda::replay_tests::emulated;
    use crate::cuda::tests;
    use crate::cuda::tests::{Alone, same_bits};
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::reduction::Reduction;
    use crate::store::Store;

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
        let at = |v: Value| program.plan.places[v.index()].map(|place| value(place, b.ty(v)));
        let buckets = buckets(b, (&program.plan, &program.ops), at, bytes);
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
        let norms = program.ops.last().unwrap().steps.start;
        assert!(buckets.iter().all(|bucket| bucket.read == norms));
        assert!(buckets[0].made + 2 < norms);
        // A bucket of the usual size holds all of them.
        let usual = Program::laid_out(&on_device(&b)).buckets;
        assert_eq!((usual.len(), usual[0].values.len()), (1, 6));
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
        let mut ops = program.ops.iter();
        let reads = ops.find(|op| op.work.name == "sum_squares").unwrap();
        let sizes = program.buckets.iter().map(|bucket| bucket.values.len());
        assert_eq!(sizes.collect::<Vec<_>>(), [1, 3]);
        assert_eq!(program.buckets[0].read, reads.steps.start);
        assert!(
            program
                .buckets
                .iter()
                .all(|bucket| bucket.made <= bucket.read)
        );
    }

    #[test]
    fn slices_cover_a_bucket() {
        let placed = |offset, len| Placed {
            memory: Memory::Arena(offset),
            dtype: DType::F32,
            first: 0,
            len,
            written: false,
        };
        for lens in [&[1][..], &[7, 1, 100], &[4096, 3, 0, 5]] {
            let values = lens.iter().enumerate();
            let bucket = Bucket {
                values: values.map(|(at, &len)| placed(1000 * at, len)).collect(),
                made: 0,
                read: 0,
            };
            for ranks in 1..=8 {
                let mut at_value = (0, 0);
                for rank in 0..ranks {
                    let mut at = 0;
                    for stretch in bucket.stretches(rank, ranks) {
                        while bucket.values[at_value.0].len == at_value.1 {
                            at_value = (at_value.0 + 1, 0);
                        }
                        let expected = (bucket.values[at_value.0].memory, at_value.1, at);
                        let found = (stretch.placed.memory, stretch.placed.first, stretch.at);
                        assert_eq!(found, expected);
                        at_value.1 += stretch.placed.len;
                        at += stretch.placed.len;
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
    fn tree_sum_on_a_device_matches_the_cpu() {
        if !is_there() {
            return;
        }
        let device = Device::of(Emulated::new(Order::new(true, true)));
        for ranks in 1..=8 {
            let kernel = Kernel::of(&tree_sum(ranks));
            let module = device.driver().load(std::slice::from_ref(&kernel)).unwrap();
            for len in [1usize, 5, 256, 1001] {
                let stride = len.next_multiple_of(4);
                let parts = random(&[ranks * stride], (ranks * len) as u64).values;
                let slices: Vec<&[f32]> = parts.chunks(stride).map(|part| &part[..len]).collect();
                let mut expected = vec![0.0; len];
                tree::sum(&slices, &mut expected);
                let given = device.allocate(4 * parts.len(), "parts").unwrap();
                let sum = device.allocate(4 * len, "a sum").unwrap();
                let argument = |address, len, written| Argument {
                    address,
                    len,
                    written,
                    dtype: DType::F32,
                };
                let arguments = [
                    argument(given.address, parts.len(), false),
                    argument(sum.address, len, true),
                ];
                let words = [stride, len].map(|n| u32::try_from(n).unwrap());
                let mut found = vec![0.0; len];
                // SAFETY: memory of that many f32s.
                unsafe {
                    device.upload(&[(given.address, &parts)]).unwrap();
                    let driver = device.driver();
                    let blocks = [len.div_ceil(THREADS), 1];
                    let function = module.functions[0];
                    driver
                        .launch(
                            Stream::AllReduce,
                            (function, &kernel),
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
            // SAFETY: all launches are done.
            unsafe { device.driver().unload(&module) };
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
        let (expected, _) = found(Order::new(false, false), None, None);
        let found = ranks(nccl, 2, |joined| {
            let (emulated, device) = emulated(Order::new(false, false));
            device.joins(joined);
            let (mut b, mut store) = chain(6, true);
            let exact = Program::laid_out(&on_device(&b)).all_reduce_bytes();
            b.reduce(Reduction::Fast);
            let program = Program::laid_out(&on_device(&b));
            // Six matrices of 64 elements in f32; a slice is one half: a part from each rank, and
            // the sum.
            assert_eq!((exact, program.all_reduce_bytes()), (4 * 3 * 192, 0));
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
    /// the third.
    fn found(
        order: Order,
        joined: Option<Communicator>,
        ignored: Option<Ignored>,
    ) -> (Vec<(String, Vec<f32>)>, Vec<Call>) {
        let (emulated, device) = emulated(order);
        emulated.ignore(ignored);
        let (b, mut store) = chain(6, joined.is_some());
        joined.into_iter().for_each(|joined| device.joins(joined));
        let mut executor = Alone::of(Executor::of(with_buckets(&b, TWO)), &device).unwrap();
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
        let of_ranks = |order, ignored| {
            let mut found = ranks(nccl, 2, |joined| found(order, Some(joined), ignored));
            let (one, other) = (found.pop().unwrap(), found.pop().unwrap());
            assert!(ignored.is_some() || one == other);
            one
        };
        // Sums double and their squares quadruple: exponents change, other bits do not.
        let (mut expected, _) = found(Order::new(true, true), None, None);
        for (name, values) in &mut expected {
            let factor = match name.as_str() {
                "norms" => 4.0,
                name if name.starts_with("gradient") => 2.0,
                _ => 1.0,
            };
            values.iter_mut().for_each(|x| *x *= factor);
        }
        for order in Order::ALL {
            let (found, calls) = of_ranks(order, None);
            same_bits(&format!("in {order:?}"), &found, &expected);
            // The all-reduces are part of the graph.
            assert!(calls.contains(&Call::Graph) && !calls.contains(&Call::Library));
        }
        // Control: each wait is needed in one of the orders.
        for stream in [Stream::AllReduce, Stream::Programs] {
            let wrong = Order::ALL.iter().any(|&order| {
                let (found, _) = of_ranks(order, Some(Ignored::StreamWait(stream)));
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
