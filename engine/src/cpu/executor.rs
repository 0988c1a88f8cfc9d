//! Replays a program.
#![expect(
    unsafe_code,
    reason = "operands are pieces of one arena, placed by the plan"
)]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arena::{Arena, Factors, RightFactor};
use super::bf16::{PANELS, Panel};
use super::frame::{Frame, Operands, View};
use super::pool::Pool;
use crate::op::{Builder, Op};
use crate::plan::{Place, Plan};
use crate::precision::Precision;
use crate::profile::OpProfile;
use crate::rounding::precision_of_products;
use crate::step_parameters::StepParameters;
use crate::store::{Slot, Store};
use crate::value::{DType, StepScalar, Type, Value};

/// A program and its plan; in an arena, ready to be replayed on the CPU.
pub struct Executor {
    plan: Plan,
    ops: Vec<PreparedOp>,
    arena: Option<Arena>,
    /// Address of the arena that the views point into; 0 before there is one.
    base: usize,
    inputs: Vec<(String, View)>,
    outputs: Vec<(String, Place, Type)>,
    /// Numbers of the next replay.
    pub parameters: StepParameters,
    scalars: Vec<String>,
    profile: Option<Vec<Duration>>,
    pool: Arc<Pool>,
    #[cfg(feature = "compare-emulated")]
    repeated: Option<Box<dyn Repeat>>,
}

/// Names and values of outputs, then of the tensors of the store.
#[cfg(feature = "compare-emulated")]
pub(crate) type Found = Vec<(String, Vec<f32>)>;

/// Repeats replays of a program elsewhere.
#[cfg(feature = "compare-emulated")]
pub(crate) trait Repeat: Send {
    /// Repeats what the executor is about to do, and says what it found, where that is to be compared.
    ///
    /// - `inputs`: names and words
    fn run(
        &mut self,
        inputs: Vec<(&str, &[u32])>,
        parameters: &StepParameters,
        store: &Store,
    ) -> Option<Found>;

    /// Compares what it found with what the executor did.
    ///
    /// # Panics
    ///
    /// When it differs.
    fn compare(&self, found: &Found, expected: Vec<&[f32]>);
}

struct PreparedOp {
    op: Arc<dyn Op>,
    types: Vec<Type>,
    inputs: Vec<View>,
    /// Inputs that lie in the store, whose address is looked up at each replay.
    stored: Vec<(usize, Slot)>,
    /// Inputs that it writes to.
    writes: Range<usize>,
    outputs: Vec<View>,
    accumulate: Vec<bool>,
    copies: Vec<(View, usize)>,
    stored_copies: Vec<(Slot, usize)>,
    scratch: View,
    /// What a kernel has taken of its frame.
    taken: Vec<bool>,
    precision: Precision,
    /// Frozen right factors of its products, where those are of bf16.
    laid_out: Vec<RightFactor>,
    part: &'static str,
    work: OpProfile,
}

impl Executor {
    /// Plans a program and makes an arena for it alone. The only allocation: a replay makes none of its own.
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

    /// Plans a program, which runs when it is given an [`Arena`].
    ///
    /// # Panics
    ///
    /// When the program holds bf16 values: on the CPU, [`Precision::Bf16`] is what products round their factors to.
    pub fn planned(builder: &Builder, pool: Arc<Pool>) -> Self {
        assert!(
            builder.types.iter().all(|ty| ty.dtype != DType::Bf16),
            "the CPU executor holds no bf16 values"
        );
        assert!(
            builder.all_reduced.is_empty(),
            "the CPU executor knows of no other ranks"
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
            #[cfg(feature = "compare-emulated")]
            repeated: None,
        }
    }

    /// Takes an arena to run in. What another program left there is overwritten.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan asks for.
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
            for view in views.chain(self.inputs.iter_mut().map(|(_, view)| view)) {
                // Offsets lie inside every arena that is large enough.
                view.start = start.wrapping_add(view.start.addr() - old);
            }
            self.base = start.addr();
        }
        self.arena = Some(arena);
    }

    /// Gives the arena up for another program to run in; nothing where there is none.
    pub fn detach(&mut self) -> Option<Arena> {
        self.arena.take()
    }

    /// Order and places.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The threads it runs on.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Sets a step scalar by name; a name that the program does not use is ignored.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        if let Some(index) = self.scalars.iter().position(|known| known == name) {
            self.parameters.scalars[index] = value;
        }
    }

    /// Value of a step scalar at the next replay.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }

    /// Whether the program reads an input of this name.
    pub fn has_input(&self, name: &str) -> bool {
        self.inputs.iter().any(|(known, _)| known == name)
    }

    /// An f32 input, to be filled before a replay.
    ///
    /// # Panics
    ///
    /// When the program has no f32 input of this name, or no arena.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        let view = self.input_view(name);
        assert_eq!(view.dtype, DType::F32, "input `{name}` holds f32");
        // SAFETY: inputs lie in the arena for the whole life of the executor; `&mut self` forbids replays.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<f32>(), view.len) }
    }

    /// An input of token ids, to be filled before a replay.
    ///
    /// # Panics
    ///
    /// When the program has no such input of this name.
    pub fn input_u32(&mut self, name: &str) -> &mut [u32] {
        let view = self.input_view(name);
        assert_eq!(view.dtype, DType::U32, "input `{name}` holds u32");
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<u32>(), view.len) }
    }

    /// An input as words, whatever they stand for.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn input_words(&mut self, name: &str) -> &mut [u32] {
        let view = self.input_view(name);
        // SAFETY: as for `input`; both types of inputs have elements of four bytes.
        unsafe { std::slice::from_raw_parts_mut(view.start.cast::<u32>(), view.len) }
    }

    fn input_view(&self, name: &str) -> View {
        self.arena();
        let found = self.inputs.iter().find(|(known, _)| known == name);
        found
            .unwrap_or_else(|| panic!("the program has an input `{name}`"))
            .1
    }

    fn arena(&self) -> &Arena {
        self.arena.as_ref().expect("a program runs in an arena")
    }

    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, ..)| name.as_str())
    }

    /// An output of the last replay, unless another program has had the arena since.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name, or no arena.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        let found = self.outputs.iter().find(|(known, ..)| known == name);
        let (_, place, ty) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        match *place {
            Place::Store(slot) => store.get(slot),
            Place::Arena(offset) => {
                let start = self.arena().start();
                // SAFETY: the plan's offsets and lengths lie inside the arena; every bit pattern is an f32.
                unsafe { std::slice::from_raw_parts(start.add(offset).cast::<f32>(), ty.len()) }
            }
        }
    }

    /// A scalar output of the last replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub fn scalar_output(&self, name: &str, store: &Store) -> f32 {
        self.output(name, store)[0]
    }

    /// Runs the program once. Allocates nothing of its own (`allocations::a_replay_allocates_nothing`) but what the first replay in
    /// an arena [lays out](Self::laid_out); the `gemm-f32` crate packs operands into buffers of its own, and rayon's queue takes a
    /// block for every 63 replays.
    ///
    /// # Panics
    ///
    /// When it has no arena.
    pub fn run(&mut self, store: &mut Store) {
        self.arena();
        #[cfg(feature = "compare-emulated")]
        let found = self.replay_emulated(store);
        self.replay(store);
        #[cfg(feature = "compare-emulated")]
        self.compare_emulated(found, store);
    }

    /// The replay of a program whose arena is there.
    fn replay(&mut self, store: &mut Store) {
        let Self {
            ops,
            parameters,
            pool,
            profile,
            arena,
            ..
        } = self;
        let pool = &**pool;
        let factors = &mut arena.as_mut().expect("a program runs in an arena").factors;
        for factor in ops.iter().flat_map(|op| &op.laid_out) {
            factors.make(store, factor);
        }
        let factors = &*factors;
        // A thread of the pool runs the ops, so that their chunks start without waking anyone.
        pool.enter(|| {
            for (index, op) in ops.iter_mut().enumerate() {
                let start = profile.is_some().then(Instant::now);
                op.run(store, parameters, (pool, factors));
                if let (Some(times), Some(start)) = (profile.as_mut(), start) {
                    times[index] += start.elapsed();
                }
            }
        });
    }

    /// Has replays repeated elsewhere, and compared.
    #[cfg(feature = "compare-emulated")]
    pub(crate) fn repeat(&mut self, repeated: impl Repeat + 'static) {
        self.repeated = Some(Box::new(repeated));
    }

    #[cfg(feature = "compare-emulated")]
    fn replay_emulated(&mut self, store: &Store) -> Option<Found> {
        let inputs = self.inputs.iter().map(|(name, view)| {
            // SAFETY: as for `input`; both types of inputs have elements of four bytes.
            let words = unsafe { std::slice::from_raw_parts(view.start.cast::<u32>(), view.len) };
            (name.as_str(), words)
        });
        let inputs = inputs.collect();
        self.repeated.as_mut()?.run(inputs, &self.parameters, store)
    }

    #[cfg(feature = "compare-emulated")]
    fn compare_emulated(&self, found: Option<Found>, store: &Store) {
        let outputs = self.output_names().map(|name| self.output(name, store));
        let tensors = store.slots().map(|slot| store.get(slot));
        if let (Some(found), Some(repeated)) = (found, &self.repeated) {
            repeated.compare(&found, outputs.chain(tensors).collect());
        }
    }

    /// Starts (or restarts) the clock of every op.
    pub fn start_profile(&mut self) {
        self.profile = Some(vec![Duration::ZERO; self.ops.len()]);
    }

    /// Stops the clock of the ops, and returns what each [part](Builder::part) of the program took since
    /// [`Executor::start_profile`], in the order in which they first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, Duration)> {
        let mut parts: Vec<(&'static str, Duration)> = Vec::new();
        let times = self.profile.take().unwrap_or_default();
        for (op, time) in self.ops.iter().zip(times) {
            match parts.iter_mut().find(|(part, _)| *part == op.part) {
                Some((_, sum)) => *sum += time,
                None => parts.push((op.part, time)),
            }
        }
        parts
    }

    /// Bytes that the host writes before a replay.
    pub fn input_bytes(&self) -> usize {
        // Both types of inputs have elements of four bytes.
        self.inputs.iter().map(|(_, view)| 4 * view.len).sum()
    }

    /// Bytes that each thread holds at most beside the arena: what it lays out anew for a product.
    pub fn packed_bytes(&self) -> usize {
        let of_op = |op: &PreparedOp| match op.precision {
            Precision::F32 | Precision::Tf32 => {
                op.op.packed_bytes(&op.types.iter().collect::<Vec<_>>())
            }
            Precision::Bf16 => PANELS,
        };
        self.ops.iter().map(of_op).max().unwrap_or(0)
    }

    /// For each product in bf16 with a frozen right factor: the matrix, whether the product reads it transposed, and the bytes that it
    /// takes beside the arena. It is laid out by the first replay, once for all products and all programs that share the arena.
    pub fn laid_out(&self) -> impl Iterator<Item = ((Slot, bool), usize)> {
        self.ops.iter().flat_map(|op| {
            op.laid_out.iter().map(|factor| {
                let ty = &op.types[factor.input];
                // As many for a matrix as for its transpose.
                let bytes = Panel::bytes(ty.rows(), ty.columns());
                ((factor.slot, factor.transposed), bytes)
            })
        })
    }

    /// Time and work of each op since [`Executor::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        let times = self.profile.clone().unwrap_or_default();
        self.ops
            .iter()
            .zip(times)
            .map(|(op, time)| OpProfile {
                time,
                ..op.work.clone()
            })
            .collect()
    }
}

impl PreparedOp {
    /// Everything that lies in the arena.
    fn views(&mut self) -> impl Iterator<Item = &mut View> {
        let stored: Vec<usize> = self.stored.iter().map(|&(index, _)| index).collect();
        let inputs = self.inputs.iter_mut().enumerate();
        inputs
            .filter(move |(index, _)| !stored.contains(index))
            .map(|(_, view)| view)
            .chain(&mut self.outputs)
            .chain(self.copies.iter_mut().map(|(from, _)| from))
            .chain([&mut self.scratch])
    }

    fn run(
        &mut self,
        store: &mut Store,
        parameters: &StepParameters,
        (pool, factors): (&Pool, &Factors),
    ) {
        for &(index, slot) in &self.stored {
            // Only what is written counts as changed, here or on a device.
            let (start, len) = if self.writes.contains(&index) {
                let values = store.get_mut(slot);
                (values.as_mut_ptr(), values.len())
            } else {
                let values = store.get(slot);
                (values.as_ptr().cast_mut(), values.len())
            };
            self.inputs[index] = View {
                start: start.cast(),
                len,
                dtype: DType::F32,
            };
        }
        for &(from, output) in &self.copies {
            let to = self.outputs[output];
            // SAFETY: the plan gives an output that is not in place a block of its own, as long as `from`.
            unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, 4 * to.len) };
        }
        for &(slot, output) in &self.stored_copies {
            let to = self.outputs[output];
            let from = store.get(slot);
            assert_eq!(from.len(), to.len, "an accumulation keeps its shape");
            // SAFETY: the store and the arena do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.start.cast(), to.len) };
        }
        let operands = Operands {
            op: self.work.name,
            types: &self.types,
            inputs: &self.inputs,
            writes: self.writes.clone(),
            outputs: &self.outputs,
            accumulate: &self.accumulate,
            scratch: self.scratch,
            taken: &mut self.taken,
            precision: self.precision,
            laid_out: &self.laid_out,
            factors,
        };
        // SAFETY: the plan keeps an op's inputs, outputs and scratch in places that do not overlap while it runs
        // (`plan::tests::nothing_overlaps_while_it_lives`), aligned to 64 bytes, inside the arena. What lies in the store is held
        // mutably, and a tensor that an op writes to is one of its inputs once (`Builder::op`).
        let mut frame = unsafe { Frame::new(operands, parameters, pool) };
        self.op.run(&mut frame);
    }
}

fn prepare(
    builder: &Builder,
    planned: &crate::plan::PlannedNode,
    precision: Precision,
    view: &dyn Fn(usize, &Type) -> View,
) -> PreparedOp {
    let node = &builder.nodes[planned.node];
    let types: Vec<&Type> = node.inputs.iter().map(|&input| builder.ty(input)).collect();
    let nowhere = |ty: &Type| View {
        start: std::ptr::null_mut(),
        len: ty.len(),
        dtype: ty.dtype,
    };
    let mut stored = Vec::new();
    let inputs = planned
        .inputs
        .iter()
        .zip(&types)
        .enumerate()
        .map(|(index, (place, ty))| match *place {
            Place::Arena(offset) => view(offset, ty),
            Place::Store(slot) => {
                stored.push((index, slot));
                nowhere(ty)
            }
        })
        .collect();
    let output_types = || node.outputs.iter().map(|&output| builder.ty(output));
    let outputs: Vec<View> = planned
        .outputs
        .iter()
        .zip(output_types())
        .map(|(&offset, ty)| view(offset, ty))
        .collect();
    let (mut copies, mut stored_copies) = (Vec::new(), Vec::new());
    for &(place, output) in &planned.copies {
        match place {
            Place::Arena(offset) => {
                copies.push((view(offset, builder.ty(node.outputs[output])), output));
            }
            Place::Store(slot) => stored_copies.push((slot, output)),
        }
    }
    let scratch = Type::f32(&[node.op.scratch_bytes(&types) / 4]);
    let writes = node.op.writes(types.len());
    let of_frozen = |(input, transposed)| match planned.inputs[input] {
        Place::Store(slot) if builder.frozen.contains(&slot) => Some(RightFactor {
            input,
            slot,
            transposed,
        }),
        _ => None,
    };
    let laid_out = if precision == Precision::Bf16 {
        let factors = node.op.right_factors(&types).into_iter();
        factors.filter_map(of_frozen).collect()
    } else {
        Vec::new()
    };
    PreparedOp {
        op: Arc::clone(&node.op),
        types: types.iter().map(|&ty| ty.clone()).collect(),
        inputs,
        stored,
        // Every output, every tensor that is written to, and the scratch.
        taken: vec![false; outputs.len() + writes.len() + 1],
        writes,
        outputs,
        accumulate: node.into.iter().map(Option::is_some).collect(),
        copies,
        stored_copies,
        scratch: view(planned.scratch, &scratch),
        precision,
        laid_out,
        part: node.part,
        work: OpProfile::of(builder, node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `y = x^2` over `rows` rows, planned only.
    fn square(rows: usize, pool: &Arc<Pool>) -> Executor {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[rows])).unwrap();
        let y = b.sum_squares(x).unwrap();
        b.output("y", y);
        Executor::planned(&b, Arc::clone(pool))
    }

    #[test]
    fn programs_take_turns_in_one_arena() {
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
        // Another arena, elsewhere, does as well.
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
    fn a_replay_changes_what_it_writes_and_nothing_that_it_reads() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let [w, halt] = ["w", "halt"].map(|name| store.zeros(name, &[2]));
        store.freeze(w);
        let [weights, stop] = [w, halt].map(|slot| b.persistent(&store, slot));
        let norm = b.gradient_norm(&[weights]).unwrap();
        b.halt(stop, &[norm]).unwrap();
        // It shares all values, until one of the two stores changes them.
        let before = store.copy();
        Executor::new(&b, Arc::new(Pool::single())).run(&mut store);
        let shared = [w, halt].map(|slot| store.get(slot).as_ptr() == before.get(slot).as_ptr());
        assert_eq!(shared, [true, false]);
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
