//! Replays a program on the CPU.

mod meetings;
mod outputs;
mod prepared_op;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

use super::arena::Arena;
use super::pool::Pool;
use crate::blocks::Ranks;
use crate::given::Given;
use crate::op::Builder;
use crate::plan::{Place, Plan};
use crate::replay::Replay;
use crate::rounding::precision_of_products;
use crate::store::Store;
use crate::value::{DType, Value};
use meetings::Meetings;
use prepared_op::{Memory, PreparedOp, prepare};

/// A program and its plan, ready to be replayed on the CPU.
pub struct Executor {
    ops: Vec<PreparedOp>,
    last: Replay,
    given: Given,
    /// Place and length of each output.
    outputs: Vec<(Place, usize)>,
    pool: Arc<Pool>,
    /// All-reduces with other ranks.
    meetings: Meetings,
    ranks: Option<Arc<dyn Ranks>>,
}

impl Executor {
    /// Plans a program.
    ///
    /// # Panics
    ///
    /// When the program holds bf16 values: on the CPU, [`Precision::Bf16`](crate::Precision::Bf16)
    /// only rounds the factors of products.
    pub fn planned(builder: &Builder, pool: Arc<Pool>) -> Self {
        assert!(
            builder.types.iter().all(|ty| ty.dtype != DType::Bf16),
            "the CPU executor holds no bf16 values"
        );
        let (plan, products) = (Plan::new(builder), precision_of_products(builder));
        let ops: Vec<PreparedOp> = plan
            .nodes
            .iter()
            .map(|planned| prepare(builder, planned, products[planned.node]))
            .collect();
        let meetings = Meetings::of(builder, &plan);
        let place = |value: Value| plan.places[value.index()].expect("an output is computed");
        let outputs = builder
            .outputs
            .iter()
            .map(|&(_, value)| (place(value), builder.ty(value).len()))
            .collect();
        let mut given = Given::new(builder, plan);
        given.own.all_reduced_elements = meetings.elements();
        given.own.packed = ops.iter().map(PreparedOp::packed_bytes).max().unwrap_or(0);
        given.own.packed_factors = ops.iter().flat_map(PreparedOp::packed_factors).collect();
        Self {
            given,
            ops,
            last: Replay::default(),
            outputs,
            pool,
            meetings,
            ranks: None,
        }
    }

    /// Connects its all-reduces to those of other ranks.
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        ranks.expect(self.meetings.sums(), self.meetings.elements());
        self.ranks = Some(ranks);
    }

    /// Runs the program once in an arena, and overwrites its contents. Allocates nothing of its own
    /// (`allocations::a_replay_allocates_nothing`) but the factors that the first replay in an
    /// arena [packs](crate::OwnMemory::packed_factors); the `gemm-f32` crate packs operands into
    /// buffers of its own, and rayon's queue allocates a block for every 63 replays.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan, or it has all-reduces and no ranks.
    pub fn run(&mut self, store: &mut Store, arena: &mut Arena) {
        assert!(
            arena.bytes() >= self.plan().arena_bytes(),
            "an arena of {} bytes for a program of {}",
            arena.bytes(),
            self.plan().arena_bytes()
        );
        assert!(
            self.ranks.is_some() || self.meetings.sums() == 0,
            "a program with all-reduces has ranks"
        );
        self.given.make_room();
        self.last.begin(&mut arena.of);
        self.replay(store, arena);
    }

    /// The replay in an arena that is large enough.
    fn replay(&mut self, store: &mut Store, arena: &mut Arena) {
        let Self {
            ops,
            given,
            pool,
            meetings,
            ranks,
            ..
        } = self;
        let mut times = given.times.take();
        let (pool, ranks) = (&**pool, ranks.as_deref());
        for factor in ops.iter().flat_map(|op| &op.operands.packed) {
            arena.factors.make(store, factor);
        }
        let mut memory = Memory {
            store,
            given,
            arena,
        };
        // A thread of the pool runs the ops, so that their chunks start without a wake-up.
        pool.attended(|| {
            for (index, op) in ops.iter_mut().enumerate() {
                let mut clock = times.as_mut().map(|times| (times, Instant::now()));
                let mut count = |index: usize| {
                    if let Some((times, start)) = &mut clock {
                        times[index] += start.elapsed();
                        *start = Instant::now();
                    }
                };
                if let Some(ranks) = ranks {
                    meetings.wait(index, memory.arena, ranks, &mut count);
                    if meetings.start(index, memory.arena, ranks) {
                        count(index);
                        continue;
                    }
                }
                op.run(&mut memory, pool);
                count(index);
            }
            if let Some(ranks) = ranks {
                meetings.wait(ops.len(), memory.arena, ranks, &mut |_| {});
            }
        });
        given.times = times;
    }
}

impl Deref for Executor {
    type Target = Given;

    fn deref(&self) -> &Given {
        &self.given
    }
}

impl DerefMut for Executor {
    fn deref_mut(&mut self) -> &mut Given {
        &mut self.given
    }
}

/// A program with an arena for itself.
#[cfg(test)]
pub(crate) type Alone = crate::alone::Alone<Executor, Arena>;

#[cfg(test)]
impl Alone {
    pub(crate) fn new(builder: &Builder, pool: Arc<Pool>) -> Self {
        let program = Executor::planned(builder, pool);
        let arena = Arena::new(program.plan().arena_bytes()).expect("memory for the arena");
        Self { program, arena }
    }

    pub(crate) fn run(&mut self, store: &mut Store) {
        self.program.run(store, &mut self.arena);
    }

    pub(crate) fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        self.program.output(name, store, &self.arena)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ops::MatMul;
    use crate::ops::oracle::random;
    use crate::precision::Precision;
    use crate::value::Type;

    /// `y = x^2` over `rows` rows, planned only.
    fn square(rows: usize, pool: &Arc<Pool>) -> Executor {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[rows])).unwrap();
        let y = b.sum_squares(x).unwrap();
        b.output("y", y);
        Executor::planned(&b, Arc::clone(pool))
    }

    #[test]
    fn programs_share_one_arena() {
        let (pool, mut store) = (Arc::new(Pool::single()), Store::new());
        let mut programs = [square(3, &pool), square(1000, &pool)];
        let largest = programs.iter().map(|p| p.plan().arena_bytes()).max();
        let mut arenas = [(); 2].map(|()| Arena::new(largest.unwrap()).unwrap());
        let rows = [3.0, 1000.0];
        // An input that is not filled again has its values wherever the program runs next: here
        // after another program in the same arena, and after it was filled for another arena.
        for (program, arena, filled, x) in [
            (0, 0, Some(1.0), 1.0),
            (1, 0, Some(2.0), 2.0),
            (0, 0, None, 1.0),
            (0, 1, Some(3.0), 3.0),
            (0, 0, None, 3.0),
            (1, 1, None, 2.0),
        ] {
            let (rows, arena) = (rows[program], &mut arenas[arena]);
            let program = &mut programs[program];
            if let Some(x) = filled {
                program.input("x").fill(x);
            }
            program.run(&mut store, arena);
            let found = program.output("y", &store, arena)[0];
            assert_eq!(found.to_bits(), f32::to_bits(rows * x * x));
        }
    }

    // Its arena may be too small to hold the output.
    #[test]
    #[should_panic(expected = "outputs are read from the arena of the last replay")]
    fn no_output_is_read_before_the_first_replay() {
        let program = square(3, &Arc::new(Pool::single()));
        program.output("y", &Store::new(), &Arena::new(0).unwrap());
    }

    #[test]
    #[should_panic(expected = "before another program runs there")]
    fn an_output_is_read_before_another_program_runs() {
        let (pool, mut store) = (Arc::new(Pool::single()), Store::new());
        let [mut first, mut next] = [square(3, &pool), square(3, &pool)];
        let mut arena = Arena::new(first.plan().arena_bytes()).unwrap();
        first.run(&mut store, &mut arena);
        next.run(&mut store, &mut arena);
        first.output("y", &store, &arena);
    }

    #[test]
    fn a_replay_changes_only_the_tensors_it_writes() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let [w, halt] = ["w", "halt"].map(|name| store.zeros(name, &[2]));
        store.freeze(w);
        let [weights, stop] = [w, halt].map(|slot| b.persistent(&store, slot));
        let norm = b.gradient_norm(&[weights]).unwrap();
        b.halt(stop, &[norm]).unwrap();
        // The copy shares all values until one of the two stores changes them.
        let before = store.copy();
        Alone::new(&b, Arc::new(Pool::single())).run(&mut store);
        let shared = [w, halt].map(|slot| store.get(slot).as_ptr() == before.get(slot).as_ptr());
        assert_eq!(shared, [true, false]);
    }

    /// Outputs and bytes of the arena of a program: `y = x W^T + c`, its squares, their gradient,
    /// `W + x^T x`, and rows of `W`, in a precision. `W` and `c` are rounded to bf16 and held in
    /// bf16 or in f32.
    fn of_rounded(precision: Precision, holds: bool, threads: usize) -> (Vec<u32>, usize) {
        let (rows, inner, outer) = (70, 40, 40);
        let (mut b, mut store) = (Builder::with_precision(precision), Store::new());
        let mut frozen = |name: &str, dims: &[usize], seed| {
            let slot = store.add(name, dims, random(dims, seed).values);
            store.hold_in_bf16(slot);
            if !holds {
                let rounded = store.read(slot).into_owned();
                let in_f32 = store.add(format!("{name} in f32"), dims, rounded);
                store.freeze(in_f32);
                return b.persistent(&store, in_f32);
            }
            b.persistent(&store, slot)
        };
        let (w, c) = (frozen("w", &[outer, inner], 1), frozen("c", &[outer], 2));
        let x = b.input("x", &Type::f32(&[rows, inner])).unwrap();
        let y = b.linear_oi(x, w, Some(c)).unwrap();
        let loss = b.sum_squares(y).unwrap();
        let gradient = b.gradients(loss, &[x]).unwrap()[0].unwrap();
        let product = MatMul::stored(true, false);
        let added = b.matmul_into(product, x, x, w).unwrap();
        let tokens = b.input("tokens", &Type::u32(&[1, 3])).unwrap();
        let vectors = b.embed(tokens, w, None).unwrap();
        let names = ["loss", "gradient", "added", "vectors"];
        for (name, value) in names.into_iter().zip([loss, gradient, added, vectors]) {
            b.output(name, value);
        }
        let mut executor = Alone::new(&b, Arc::new(Pool::new(threads).unwrap()));
        executor
            .input("x")
            .copy_from_slice(&random(&[rows, inner], 3).values);
        executor.input_u32("tokens").copy_from_slice(&[3, 0, 39]);
        executor.run(&mut store);
        let outputs = names.map(|name| executor.output(name, &store));
        let bits = outputs.concat().into_iter().map(f32::to_bits).collect();
        (bits, executor.plan().arena_bytes())
    }

    #[test]
    fn tensors_held_in_bf16_are_widened_for_each_reader() {
        for precision in [Precision::F32, Precision::Bf16] {
            let (expected, bytes) = of_rounded(precision, false, 1);
            for threads in [1, 3] {
                let (found, more) = of_rounded(precision, true, threads);
                assert_eq!(found, expected, "{precision:?} {threads}");
                // The largest op has scratch for the widened matrix and bias.
                assert!(more <= bytes + 4 * 40 * 41 + 2 * 64, "{bytes} {more}");
            }
        }
    }

    #[test]
    fn every_op_counts_for_one_part() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("w", &[100, 100]);
        let w = b.persistent(&store, slot);
        b.part("forward");
        let y = b.matmul(w, w).unwrap();
        let loss = b.sum_squares(y).unwrap();
        b.part("after");
        assert_eq!(b.matmul(w, w).unwrap(), y);
        let gradient = b.gradients(loss, &[w]).unwrap()[0].unwrap();
        let norm = b.gradient_norm(&[gradient]).unwrap();
        b.output("loss", loss);
        b.output("norm", norm);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        assert!(executor.part_times().is_empty());
        executor.start_profile();
        executor.run(&mut store);
        let ops: Duration = executor.profile().iter().map(|op| op.time).sum();
        let parts = executor.part_times();
        let mut names: Vec<&str> = parts.iter().map(|(part, _)| *part).collect();
        names.sort_unstable();
        assert_eq!(names, ["after", crate::BACKWARD, "forward"]);
        assert_eq!(parts.iter().map(|(_, time)| *time).sum::<Duration>(), ops);
        assert!(executor.part_times().is_empty(), "the clock was stopped");
    }

    #[test]
    #[should_panic(expected = "an arena of 64 bytes for a program of ")]
    fn an_arena_must_be_large_enough() {
        let mut arena = Arena::new(64).unwrap();
        square(1000, &Arc::new(Pool::single())).run(&mut Store::new(), &mut arena);
    }
}
