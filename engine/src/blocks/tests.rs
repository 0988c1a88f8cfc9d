use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use spd_draws::{Purpose, Stream};

use super::*;
use crate::cpu::Pool;
use crate::cuda::Device;
use crate::cuda::emulated::{Emulated, Order, is_there};
use crate::cuda::nccl::Communicator;
use crate::cuda::nccl_tests::{ranks, stand_in};
use crate::executor::{Executor, Processor};
use crate::given::Given;
use crate::ops::oracle::random;
use crate::ops::{AdamW, AdamWOperands, Decay, Expr, Lines};
use crate::store::{Slot, Store};
use crate::value::Type;

const BATCH: usize = 64;
const WIDTH: usize = 24;

/// A step on a batch in this many blocks: an adversary with sources shared by all samples takes two
/// steps, a penalty is nonlinear in a sum over all samples, a term depends only on parameters, an
/// average over steps is kept for each sample, and weights decay by the largest values of all
/// samples.
fn step(blocks: usize) -> (Builder, Store, Vec<Slot>) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    b.in_blocks(blocks);
    let dims = [WIDTH, WIDTH];
    let mut kept = Vec::new();
    let mut weights = Vec::new();
    for seed in 0..2 {
        let name = |kind: &str| format!("{kind} {seed}");
        let slot = store.add(name("w"), &dims, random(&dims, seed).values);
        let [first, second] = ["first", "second"].map(|kind| store.zeros(name(kind), &dims));
        weights.push([slot, first, second].map(|slot| b.persistent(&store, slot)));
        kept.extend([slot, first, second]);
    }
    let rows = BATCH / blocks;
    let x = b.input("x", &Type::f32(&[rows, WIDTH])).unwrap();
    let [w1, w2] = [0, 1].map(|at: usize| b.per_block(weights[at][0]).unwrap());
    let hidden = b.matmul(x, w1).unwrap();
    let stream = Stream::new(Purpose::Source, 0, 0);
    let noise = b.uniform(stream, &[rows, WIDTH]).unwrap();
    let hidden = b.add(hidden, noise).unwrap();
    let kept_rows = store.sharded("rows", &[rows, WIDTH]);
    let kept_rows = b.persistent(&store, kept_rows);
    let new_rows = hidden;
    let hidden = b.add(new_rows, kept_rows).unwrap();
    let of_rows = |b: &mut Builder, source: Value| {
        let source = b.per_block(source).unwrap();
        let y = b.linear_oi(hidden, w2, Some(source)).unwrap();
        b.sum_squares(y).unwrap()
    };
    let mut source = b.uniform_row(stream, WIDTH).unwrap();
    for _ in 0..2 {
        let loss = of_rows(&mut b, source);
        let gradient = b.gradients(loss, &[source]).unwrap()[0].unwrap();
        source = b.ascend(source, gradient, 0.1).unwrap();
    }
    let loss = of_rows(&mut b, source);
    let power = b.sum_squares(hidden).unwrap();
    let power = b.all_reduce(power).unwrap();
    let names = ["penalty", "penalty_grad"];
    let penalty = |[x]: [Expr; 1]| (x * Expr::from(1e-4)).tanh();
    let penalty = b.elementwise(names, [power], penalty).unwrap();
    let of_weights = b.sum_squares(weights[1][0]).unwrap();
    let [loss] = b.all_reduce_scalars(&[loss]).unwrap()[..] else {
        panic!("one scalar");
    };
    let terms = [(1e-3, loss), (0.5, penalty), (0.25, of_weights)];
    let total = b.weighted_sum(&terms).unwrap();
    let wanted: Vec<Value> = weights.iter().map(|[weight, ..]| *weight).collect();
    let gradients = b.gradients(total, &wanted).unwrap();
    let gradients: Vec<Value> = gradients.into_iter().map(Option::unwrap).collect();
    let norm = b.gradient_norm(&gradients).unwrap();
    let on: Vec<AdamWOperands> = weights
        .iter()
        .zip(&gradients)
        .map(|(&[parameter, first, second], &gradient)| AdamWOperands {
            parameter,
            first,
            second,
            gradient,
        })
        .collect();
    let op = AdamW::new(&mut b);
    b.adamw(op, &on, norm, &[]).unwrap();
    let small = |[x]: [Expr; 1]| x * Expr::from(0.02);
    let small = b.elementwise(["small", "small_grad"], [hidden], small);
    let needed = b.max_rows(&[vec![small.unwrap(), x]]).unwrap();
    let op = Decay {
        lr: b.step_scalar("lr"),
        decay: 0.5,
        root: false,
        of: Lines::Rows,
    };
    b.decay(op, weights[0][0], needed[0], &[norm]).unwrap();
    b.keep_average(kept_rows, new_rows, 0.5, &[norm]).unwrap();
    b.output("total", total);
    b.output("norm", norm);
    b.output("source", source);
    b.check_blocks().unwrap();
    (b, store, kept)
}

/// The state after three steps, on a rank of `world` with so many threads.
fn trained(
    blocks: usize,
    rank_of: (usize, usize),
    ranks: Option<Arc<dyn Ranks>>,
    threads: usize,
) -> Vec<u32> {
    let processor = Processor::Cpu(Arc::new(Pool::new(threads).unwrap()));
    trained_on(&processor, blocks, rank_of, ranks)
}

/// [`trained`] on a processor, or on the GPU of a rank that has joined those of others.
fn trained_on(
    processor: &Processor,
    blocks: usize,
    (rank, world): (usize, usize),
    ranks: Option<Arc<dyn Ranks>>,
) -> Vec<u32> {
    let (b, mut store, kept) = step(blocks);
    let (of_rank, rows) = (blocks / world, BATCH / blocks);
    store.hold_blocks(rank * of_rank..(rank + 1) * of_rank, blocks);
    let planned = |b: &Builder| Executor::planned(b, processor);
    let (mut stages, mut program) = if of_rank == 1 {
        (None, planned(&b))
    } else {
        let (stages, last) = Stages::planned(&b, &mut store, "step", of_rank, planned);
        (Some(stages), last)
    };
    if let Some(ranks) = &ranks {
        match &mut stages {
            Some(stages) => stages.meet(ranks),
            None => program.meet(Arc::clone(ranks)),
        }
        ranks.make_room().unwrap();
    }
    let programs = stages.iter().flat_map(Stages::programs).chain([&program]);
    let bytes = programs.map(|program| program.plan().arena_bytes()).max();
    let mut arena = processor.arena(bytes.unwrap()).unwrap();
    let mut found = Vec::new();
    for step in 0..3 {
        let batch = random(&[BATCH, WIDTH], 10 + u64::from(step)).values;
        let set = |given: &mut Given| {
            given.parameters.step = step;
            for (name, value) in [("lr", 0.1), ("correction1", 0.1), ("correction2", 0.001)] {
                given.set_scalar(name, value);
            }
        };
        let fill = |given: &mut Given, block: usize| {
            let first = (rank * of_rank + block) * rows;
            let values = &batch[first * WIDTH..][..rows * WIDTH];
            given.input("x").copy_from_slice(values);
            given.parameters.block = u32::try_from(rank * of_rank + block).unwrap();
            set(given);
        };
        match &mut stages {
            Some(stages) => {
                let made = stages.run(&mut store, &mut arena, fill);
                made.unwrap();
                set(&mut program);
            }
            None => fill(&mut program, 0),
        }
        program.run_and_fetch(&mut store, &mut arena).unwrap();
        for name in ["total", "norm", "source"] {
            let values = program.output(name, &store, &arena).iter();
            found.extend(values.map(|x| x.to_bits()));
        }
    }
    store.fetch().unwrap();
    for slot in kept {
        found.extend(store.get(slot).iter().map(|x| x.to_bits()));
    }
    let shards = store.shards(store.slot("rows").unwrap());
    assert_eq!(shards.dims, [BATCH, WIDTH]);
    let numbers = shards.held.iter().map(|(number, _)| *number);
    assert!(numbers.eq(rank * of_rank..(rank + 1) * of_rank));
    let mut rows = shards.held.iter().flat_map(|&(_, slot)| store.get(slot));
    assert!(rows.all(|x| *x != 0.0));
    found
}

/// The ranks of a world in shared memory, and over connections.
fn worlds(size: usize) -> [Vec<Arc<dyn Ranks>>; 2] {
    let file = SharedMemory::file().unwrap();
    let near = (0..size).map(|rank| -> Arc<dyn Ranks> {
        let file = file.try_clone().unwrap();
        Arc::new(SharedMemory::open(file, rank, size, Box::new(|_| {})).unwrap())
    });
    let far = connections(size).into_iter().enumerate();
    let far = far.map(|(rank, streams)| -> Arc<dyn Ranks> {
        let lost = Box::new(|rank, how: &str| panic!("rank {rank}: {how}"));
        Arc::new(Sockets::new(rank, streams, Box::new(|_| {}), lost).unwrap())
    });
    [near.collect(), far.collect()]
}

/// The connections of each rank with all others.
pub(super) fn connections(size: usize) -> Vec<Vec<Option<TcpStream>>> {
    let mut of_ranks: Vec<Vec<Option<TcpStream>>> = Vec::new();
    of_ranks.resize_with(size, || (0..size).map(|_| None).collect());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pairs = (0..size).flat_map(|one| (0..one).map(move |other| (one, other)));
    for (one, other) in pairs {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        of_ranks[one][other] = Some(near);
        of_ranks[other][one] = Some(listener.accept().unwrap().0);
    }
    of_ranks
}

#[test]
fn all_worlds_give_the_same_bits() {
    for blocks in [2, 4, 8] {
        let expected = trained(blocks, (0, 1), None, 1);
        assert!(
            expected != trained(2 * blocks, (0, 1), None, 1),
            "other blocks"
        );
        let mut size = 2;
        while size <= blocks {
            for world in worlds(size) {
                let expected = &expected;
                std::thread::scope(|scope| {
                    for (rank, ranks) in world.into_iter().enumerate() {
                        scope.spawn(move || {
                            let name = format!("{blocks} blocks, {ranks:?}");
                            let place = (rank, size);
                            let found = trained(blocks, place, Some(ranks.clone()), 1 + rank % 2);
                            ranks.leave();
                            assert!(found == *expected, "{name}");
                        });
                    }
                });
            }
            size *= 2;
        }
    }
}

// Four blocks on one GPU, two on each of two, one on each of four, with devices in every order.
#[test]
fn gpus_give_the_same_bits_in_all_worlds() {
    let Some(nccl) = stand_in().filter(|_| is_there()) else {
        return;
    };
    let on = |order, joined: Option<Communicator>| {
        let device = Device::of(Emulated::new(order));
        joined.into_iter().for_each(|joined| device.joins(joined));
        Processor::Gpu(Some(device))
    };
    let expected = trained_on(&on(Order::new(false, false), None), 4, (0, 1), None);
    for (number, order) in Order::ALL.into_iter().enumerate() {
        for world in [1, 2, 4] {
            let file = SharedMemory::file().unwrap();
            let found = ranks(nccl, world, |joined| {
                let rank = joined.rank;
                let file = file.try_clone().unwrap();
                let waits = Box::new(|_: Waiting| {});
                let ranks = SharedMemory::open(file, rank, world, waits).unwrap();
                // Each rank uses another order.
                let order = Order::ALL[(number + rank) % Order::ALL.len()];
                trained_on(
                    &on(order, Some(joined)),
                    4,
                    (rank, world),
                    Some(Arc::new(ranks)),
                )
            });
            assert!(
                found.iter().all(|of_rank| *of_rank == expected),
                "{order:?}, {world} ranks"
            );
        }
    }
}

#[test]
fn all_ranks_receive_the_broadcast_of_the_first() {
    for world in worlds(3) {
        std::thread::scope(|scope| {
            for (rank, ranks) in world.into_iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..100u8 {
                        let mut bytes = [if rank == 0 { round } else { 255 }; 1024];
                        ranks.broadcast(&mut bytes);
                        assert_eq!(bytes, [round; 1024]);
                        assert_eq!(ranks.agree(round < 99), round < 99);
                    }
                    ranks.leave();
                });
            }
        });
    }
}

// One rank may have any number of blocks. It holds the sums of a block, and of whole subtrees that
// wait for others.
#[test]
fn blocks_of_one_rank_are_added_along_the_tree() {
    let orders = Order::ALL.into_iter().filter(|_| is_there());
    let devices = orders.map(|order| Processor::Gpu(Some(Device::of(Emulated::new(order)))));
    let on_cpu = [1, 2].map(|threads| Processor::Cpu(Arc::new(Pool::new(threads).unwrap())));
    for processor in on_cpu.into_iter().chain(devices) {
        let held = [(2, 2), (3, 3), (4, 3), (5, 4), (7, 4), (8, 4), (9, 5)];
        for (blocks, held) in held {
            let (mut b, mut store) = (Builder::new(), Store::new());
            b.in_blocks(blocks);
            let x = b.input("x", &Type::f32(&[37])).unwrap();
            let some = b.slice(x, 5..8).unwrap();
            for (name, part) in [("all", x), ("some", some)] {
                let twice = b.add(part, part).unwrap();
                let sum = b.all_reduce(twice).unwrap();
                b.output(name, sum);
            }
            let planned = |b: &Builder| Executor::planned(b, &processor);
            let planned = Stages::planned(&b, &mut store, "test", blocks, planned);
            let (mut stages, mut last) = planned;
            assert_eq!(store.slots().count(), 2 * held, "{blocks} blocks");
            let programs = stages.programs().chain([&last]);
            let bytes = programs.map(|program| program.plan().arena_bytes()).max();
            let mut arena = processor.arena(bytes.unwrap()).unwrap();
            // The second step adds nothing to the sums of the first.
            for step in 0..2 {
                let seed = |block| (100 * step + 10 * blocks + block) as u64;
                let parts = (0..blocks).map(|block| random(&[37], seed(block)).values);
                let parts: Vec<Vec<f32>> = parts.collect();
                let fill = |given: &mut Given, block: usize| {
                    given.input("x").copy_from_slice(&parts[block]);
                };
                stages.run(&mut store, &mut arena, fill).unwrap();
                last.run_and_fetch(&mut store, &mut arena).unwrap();
                let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                let mut whole = [0.0; 37];
                tree::sum(&parts, &mut whole);
                let twice = whole.map(|x| 2.0 * x);
                let [all, some] = ["all", "some"].map(|name| last.output(name, &store, &arena));
                assert_eq!(all, twice, "{blocks} blocks, {processor:?}");
                assert_eq!(some, &twice[5..8]);
            }
        }
    }
}

// The sum over all samples, in one block, and in two.
#[test]
fn blocks_add_up_to_the_batch() {
    let [one, two] = [1, 2].map(|blocks| f32::from_bits(trained(blocks, (0, 1), None, 1)[0]));
    // Sums of some thousand numbers of order one, in another order.
    assert!((one / two - 1.0).abs() < 1e-5, "{one} {two}");
}

#[test]
fn outputs_that_differ_between_blocks_are_refused() {
    let mut b = Builder::new();
    b.in_blocks(2);
    let x = b.input("x", &Type::f32(&[4])).unwrap();
    let squares = b.sum_squares(x).unwrap();
    b.output("squares", squares);
    let line = "all_reduce: the output `squares` differs between blocks";
    assert_eq!(b.check_blocks().unwrap_err().to_string(), line);
    let sum = b.all_reduce(squares).unwrap();
    b.outputs.clear();
    b.output("squares", sum);
    b.check_blocks().unwrap();
    // Draws of rows differ between blocks too; draws of a row that all share do not.
    let stream = Stream::new(Purpose::Source, 0, 0);
    let shared = b.uniform_row(stream, 3).unwrap();
    b.output("shared", shared);
    b.check_blocks().unwrap();
    let rows = b.uniform_rows(stream, 3).unwrap();
    b.output("rows", rows);
    assert!(b.check_blocks().is_err());
}

#[test]
fn the_first_rank_decides_for_all() {
    for world in worlds(3) {
        let answers: Vec<Vec<bool>> = std::thread::scope(|scope| {
            let ranks = world.into_iter().map(|ranks| {
                scope.spawn(move || {
                    let mut answers = Vec::new();
                    while answers.last() != Some(&false) {
                        let asked = answers.len();
                        answers.push(ranks.agree(asked < 100));
                    }
                    ranks.leave();
                    answers
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(answers[0].len(), 101);
        assert!(answers.iter().all(|of_rank| *of_rank == answers[0]));
    }
}
