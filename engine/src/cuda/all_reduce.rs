//! All-reduce: gradients become their sums over all blocks, in buckets, while other gradients are still computed.
//!
//! ```text
//! programs     ... made | ...... | ...... | read ...
//!                    \                   /
//! all-reduces          sum over all blocks
//! ```
//!
//! A bucket's all-reduce starts when its last value is made, and is waited for before the first of its values is read: gradients of
//! the last layers travel while those of the first are computed. All ranks replay one program, so their all-reduces have one order.

use std::collections::BTreeMap;

use super::device_op::DeviceGraph;
use super::placed::{Placed, PlacedOp};
use crate::plan::Plan;
use crate::value::Value;

/// Bytes of a bucket: below them, the latency of an all-reduce costs more than its transfer. Unmeasured.
pub(super) const BUCKET: usize = 16 << 20;

/// Values that are all-reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) values: Vec<Placed>,
    /// The first step that may run after they are given away, and the first that waits for them.
    pub(crate) made: usize,
    pub(crate) read: usize,
}

/// A value in its place, and between which steps it is neither written nor read.
#[derive(Debug)]
struct Idle {
    placed: Placed,
    made: usize,
    read: usize,
}

/// The buckets of a program whose ops were laid out, of so many bytes or a little more, in the order in which they are made.
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
    use crate::cuda::Executor;
    use crate::cuda::device_op::on_device;
    use crate::cuda::driver::Stream;
    use crate::cuda::emulated::{Call, Ignored, Order, is_there};
    use crate::cuda::program::{Program, value};
    use crate::cuda::replay_tests::emulated;
    use crate::cuda::tests::same_bits;
    use crate::cuda::{Arena, tests};
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::store::Store;

    /// Bytes of a bucket of two of the gradients below.
    const TWO: usize = 512;

    /// A chain of products: the sum of the squares of what it gives, and its factors.
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

    /// The same with the gradients of all factors and their norms, which are all-reduced or not.
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

    /// The same program, with buckets of another size.
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
        // Nobody waits before the norms, which are the last op.
        let norms = program.ops.last().unwrap().steps.start;
        assert!(buckets.iter().all(|bucket| bucket.read == norms));
        assert!(buckets[0].made + 2 < norms);
        // All of them fit into one of the usual size.
        let usual = Program::laid_out(&on_device(&b)).buckets;
        assert_eq!((usual.len(), usual[0].values.len()), (1, 6));
        assert!(
            Program::laid_out(&on_device(&chain(6, false).0))
                .buckets
                .is_empty()
        );
    }

    #[test]
    fn what_is_read_early_is_waited_for_early() {
        let (mut b, _, loss, weights) = products(4);
        b.in_blocks(2);
        let mut sums = Vec::new();
        // The last factor's first, and read by an op that runs before the others are made.
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

    /// What three replays find, the other rank having as much; and what was asked of the device for the last.
    fn found(
        order: Order,
        all_reduced: bool,
        ignored: Option<Ignored>,
    ) -> (Vec<(String, Vec<f32>)>, Vec<Call>) {
        let (emulated, device) = emulated(order);
        emulated.set_other_rank(|x| x);
        emulated.ignore(ignored);
        let (b, mut store) = chain(6, all_reduced);
        let mut executor = Executor::of(with_buckets(&b, TWO));
        let arena = Arena::new(&device, executor.plan().arena_bytes());
        executor.attach(arena.unwrap()).unwrap();
        executor.run(&mut store).unwrap();
        executor.run(&mut store).unwrap();
        emulated.calls();
        executor.run(&mut store).unwrap();
        let calls = emulated.calls();
        (tests::found(&mut executor, &mut store).unwrap(), calls)
    }

    #[test]
    fn whoever_reads_a_gradient_reads_the_sum_whatever_a_device_does_first() {
        if !is_there() {
            return;
        }
        // Twice the gradients, four times their squares: the same bits but for the exponents.
        let (mut expected, _) = found(Order::new(true, true), false, None);
        for (name, values) in &mut expected {
            let factor = match name.as_str() {
                "norms" => 4.0,
                name if name.starts_with("gradient") => 2.0,
                _ => 1.0,
            };
            values.iter_mut().for_each(|x| *x *= factor);
        }
        for order in Order::ALL {
            let (found, calls) = found(order, true, None);
            same_bits(&format!("in {order:?}"), &found, &expected);
            // The meetings are part of the graph.
            assert!(calls.contains(&Call::Graph) && !calls.contains(&Call::Agree));
        }
        // The test can fail: each wait is needed in one of the orders.
        for stream in [Stream::AllReduce, Stream::Programs] {
            let wrong = Order::ALL.iter().any(|&order| {
                let (found, _) = found(order, true, Some(Ignored::Follow(stream)));
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
