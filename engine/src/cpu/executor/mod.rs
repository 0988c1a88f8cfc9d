//! Replays a program on the CPU.

mod io;
mod meetings;
mod prepared_op;
#[cfg(feature = "compare-emulated")]
mod repeat;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arena::Arena;
use super::frame::View;
use super::pool::Pool;
use crate::blocks::Ranks;
use crate::op::Builder;
use crate::plan::{Place, Plan};
use crate::rounding::precision_of_products;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::{DType, Type, Value};
use meetings::Meetings;
use prepared_op::{PreparedOp, prepare};
#[cfg(feature = "compare-emulated")]
pub(crate) use repeat::{Found, Repeat};

/// A program and its plan; with an arena, ready to be replayed on the CPU.
pub struct Executor {
    plan: Plan,
    ops: Vec<PreparedOp>,
    arena: Option<Arena>,
    /// Address of the arena that the views point into; 0 before the first.
    base: usize,
    inputs: Vec<(String, View)>,
    outputs: Vec<(String, Place, Type)>,
    /// Parameters of the next replay.
    pub parameters: StepParameters,
    scalars: Vec<String>,
    profile: Option<Vec<Duration>>,
    pool: Arc<Pool>,
    /// All-reduces with other ranks.
    meetings: Meetings,
    ranks: Option<Arc<dyn Ranks>>,
    #[cfg(feature = "compare-emulated")]
    repeat: Option<Box<dyn Repeat>>,
}

impl Executor {
    /// Plans a program and makes an arena for it alone. A replay allocates nothing of its own.
    ///
    /// # Panics
    ///
    /// As [`Self::planned`] does, and when there is no memory for the arena.
    pub fn new(builder: &Builder, pool: Arc<Pool>) -> Self {
        let mut executor = Self::planned(builder, pool);
        let arena = Arena::new(executor.plan.arena_bytes()).expect("memory for the arena");
        executor.attach(arena);
        executor
    }

    /// Plans a program, which runs once it has an [`Arena`].
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
        let view = |offset: usize, ty: &Type| View {
            start: std::ptr::without_provenance_mut(offset),
            len: ty.len(),
            dtype: ty.dtype,
        };
        let ops = plan
            .nodes
            .iter()
            .map(|planned| prepare(builder, planned, products[planned.node], &view))
            .collect();
        let meetings = Meetings::of(builder, &plan);
        let inputs = builder
            .inputs
            .iter()
            .filter_map(|(name, &value)| match plan.places[value.index()] {
                Some(Place::Arena(offset)) => Some((name.clone(), view(offset, builder.ty(value)))),
                _ => None,
            })
            .collect();
        let place = |value: Value| plan.places[value.index()].expect("an output is computed");
        let outputs = builder
            .outputs
            .iter()
            .map(|(name, value)| (name.clone(), place(*value), builder.ty(*value).clone()))
            .collect();
        let scalars = builder.scalars.clone();
        let parameters = StepParameters {
            scalars: vec![0.0; scalars.len()],
            ..StepParameters::default()
        };
        Self {
            plan,
            ops,
            arena: None,
            base: 0,
            inputs,
            outputs,
            parameters,
            scalars,
            profile: None,
            pool,
            meetings,
            ranks: None,
            #[cfg(feature = "compare-emulated")]
            repeat: None,
        }
    }

    /// Takes an arena to run in, and overwrites its contents.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan.
    pub fn attach(&mut self, arena: Arena) {
        assert!(
            arena.bytes() >= self.plan.arena_bytes(),
            "an arena of {} bytes for a program of {}",
            arena.bytes(),
            self.plan.arena_bytes()
        );
        let (start, old) = (arena.start(), self.base);
        if start.addr() != old {
            let views = self.ops.iter_mut().flat_map(PreparedOp::views);
            let others = self.inputs.iter_mut().map(|(_, view)| view);
            for view in views.chain(others).chain(self.meetings.views()) {
                // Offsets lie inside every arena that is large enough.
                view.start = start.wrapping_add(view.start.addr() - old);
            }
            self.base = start.addr();
        }
        self.arena = Some(arena);
    }

    /// Gives up the arena, if there is one, for another program to run in.
    pub fn detach(&mut self) -> Option<Arena> {
        self.arena.take()
    }

    /// The plan: order of ops and places of values.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Its threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Connects its all-reduces to those of other ranks.
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        ranks.expect(self.meetings.sums(), self.meetings.elements());
        self.ranks = Some(ranks);
    }

    /// Elements that each replay all-reduces.
    pub fn all_reduced_elements(&self) -> usize {
        self.meetings.elements()
    }

    fn arena(&self) -> &Arena {
        self.arena.as_ref().expect("a program runs in an arena")
    }

    /// Runs the program once. Allocates nothing of its own
    /// (`allocations::a_replay_allocates_nothing`) but the factors that the first replay in an
    /// arena [packs](Self::packed_factors); the `gemm-f32` crate packs operands into buffers of its
    /// own, and rayon's queue allocates a block for every 63 replays.
    ///
    /// # Panics
    ///
    /// When it has no arena, or has all-reduces and no ranks.
    pub fn run(&mut self, store: &mut Store) {
        self.arena();
        assert!(
            self.ranks.is_some() || self.meetings.sums() == 0,
            "a program with all-reduces has ranks"
        );
        #[cfg(feature = "compare-emulated")]
        let found = self.repeated(store);
        self.replay(store);
        #[cfg(feature = "compare-emulated")]
        self.compare(found, store);
    }

    /// The replay of a program that has an arena.
    fn replay(&mut self, store: &mut Store) {
        let Self {
            ops,
            parameters,
            pool,
            profile,
            arena,
            meetings,
            ranks,
            ..
        } = self;
        let (pool, ranks) = (&**pool, ranks.as_deref());
        let factors = &mut arena.as_mut().expect("a program runs in an arena").factors;
        for factor in ops.iter().flat_map(|op| &op.packed) {
            factors.make(store, factor);
        }
        let factors = &*factors;
        // A thread of the pool runs the ops, so that their chunks start without a wake-up.
        pool.enter(|| {
            for (index, op) in ops.iter_mut().enumerate() {
                let mut clock = profile.as_mut().map(|times| (times, Instant::now()));
                let mut count = |index: usize| {
                    if let Some((times, start)) = &mut clock {
                        times[index] += start.elapsed();
                        *start = Instant::now();
                    }
                };
                if let Some(ranks) = ranks {
                    meetings.wait(index, ranks, &mut count);
                    if meetings.start(index, ranks) {
                        count(index);
                        continue;
                    }
                }
                op.run(store, parameters, pool, factors);
                count(index);
            }
            if let Some(ranks) = ranks {
                meetings.wait(ops.len(), ranks, &mut |_| {});
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::MatMul;
    use crate::ops::oracle::random;
    use crate::precision::Precision;

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
        let mut arena = Arena::new(largest.unwrap()).unwrap();
        for (round, expected) in [(1u8, [3.0, 1000.0]), (2, [12.0, 4000.0])] {
            for (program, expected) in programs.iter_mut().zip(expected) {
                program.attach(arena);
                program.input("x").fill(f32::from(round));
                program.run(&mut store);
                assert_eq!(
                    program.scalar_output("y", &store).to_bits(),
                    f32::to_bits(expected)
                );
                arena = program.detach().unwrap();
            }
        }
        // Another arena, at another address, works too.
        let other = Arena::new(arena.bytes()).unwrap();
        assert_ne!(other.start(), arena.start());
        let [program, _] = &mut programs;
        program.attach(other);
        program.input("x").fill(3.0);
        program.run(&mut store);
        assert_eq!(
            program.scalar_output("y", &store).to_bits(),
            27f32.to_bits()
        );
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
        Executor::new(&b, Arc::new(Pool::single())).run(&mut store);
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
        let product = MatMul {
            a_transposed: true,
            b_transposed: false,
            alpha: 1.0,
        };
        let added = b.matmul_into(product, x, x, w).unwrap();
        let tokens = b.input("tokens", &Type::u32(&[1, 3])).unwrap();
        let vectors = b.embed(tokens, w, None).unwrap();
        let names = ["loss", "gradient", "added", "vectors"];
        for (name, value) in names.into_iter().zip([loss, gradient, added, vectors]) {
            b.output(name, value);
        }
        let mut executor = Executor::new(&b, Arc::new(Pool::new(threads).unwrap()));
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
        let mut executor = Executor::new(&b, Arc::new(Pool::single()));
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
    #[should_panic(expected = "a program runs in an arena")]
    fn a_program_without_an_arena_does_not_run() {
        square(3, &Arc::new(Pool::single())).run(&mut Store::new());
    }

    #[test]
    #[should_panic(expected = "an arena of 64 bytes for a program of ")]
    fn an_arena_must_be_large_enough() {
        square(1000, &Arc::new(Pool::single())).attach(Arena::new(64).unwrap());
    }
}
