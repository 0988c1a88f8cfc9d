//! Replays a program.
#![expect(
    unsafe_code,
    reason = "operands are pieces of one arena, placed by the plan"
)]

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::{Frame, View};
use super::pool::Pool;
use crate::builder::{Builder, StepScalar};
use crate::op::Op;
use crate::plan::{Place, Plan};
use crate::store::Store;
use crate::value::{DType, Type, Value};

/// The numbers that change from step to step.
#[derive(Debug, Clone, Default)]
pub struct StepParameters {
    /// Keys every draw.
    pub seed: u64,
    /// Step of the draws.
    pub step: u32,
    /// Row number, in the whole batch, of this program's first row.
    pub first_row: u32,
    /// Values of the program's step scalars.
    pub scalars: Vec<f32>,
}

/// A program, its plan and its arena, ready to be replayed on the CPU.
pub struct Executor {
    plan: Plan,
    ops: Vec<PreparedOp>,
    arena: Vec<CacheLine>,
    inputs: Vec<(String, View)>,
    outputs: Vec<(String, Place, Type)>,
    /// Numbers of the next replay.
    pub parameters: StepParameters,
    scalars: Vec<String>,
    profile: Option<Vec<Duration>>,
    pool: Arc<Pool>,
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "only its size and alignment matter")] [u8; 64]);

struct PreparedOp {
    op: Arc<dyn Op>,
    types: Vec<Type>,
    inputs: Vec<View>,
    /// Inputs that lie in the store, whose address is looked up at each replay.
    stored: Vec<(usize, crate::store::Slot)>,
    outputs: Vec<View>,
    accumulate: Vec<bool>,
    copies: Vec<(View, usize)>,
    stored_copies: Vec<(crate::store::Slot, usize)>,
    scratch: View,
    flops: u64,
    bytes: u64,
}

/// Time and work of one op, summed over the replays since profiling was switched on.
#[derive(Debug, Clone)]
pub struct OpProfile {
    /// Name of the op.
    pub name: &'static str,
    /// Settings of the op, as it prints them.
    pub shapes: String,
    /// Time spent.
    pub time: Duration,
    /// Multiplications and additions in one replay.
    pub flops: u64,
    /// Bytes read and written in one replay, each operand once.
    pub bytes: u64,
}

impl Executor {
    /// Plans a program and allocates its arena. The only allocation: a replay makes none of its own.
    ///
    /// # Panics
    ///
    /// When the program holds bf16 values, which the CPU does not compute.
    pub fn new(builder: &Builder, pool: Arc<Pool>) -> Self {
        assert!(
            builder.types.iter().all(|ty| ty.dtype != DType::Bf16),
            "the CPU executor computes f32 programs"
        );
        let plan = Plan::new(builder);
        let lines = plan.arena_bytes().div_ceil(size_of::<CacheLine>());
        let mut arena = vec![CacheLine([0; 64]); lines];
        let base = arena.as_mut_ptr().cast::<u8>();
        let view = |offset: usize, ty: &Type| View {
            // SAFETY: the plan's offsets lie inside the arena, which has its size.
            start: unsafe { base.add(offset) },
            len: ty.len(),
            dtype: ty.dtype,
        };
        let ops = plan
            .nodes
            .iter()
            .map(|planned| prepare(builder, planned, &view))
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
            arena,
            inputs,
            outputs,
            parameters,
            scalars,
            profile: None,
            pool,
        }
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
    /// When the program has no f32 input of this name.
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

    fn input_view(&self, name: &str) -> View {
        let found = self.inputs.iter().find(|(known, _)| known == name);
        found
            .unwrap_or_else(|| panic!("the program has an input `{name}`"))
            .1
    }

    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, ..)| name.as_str())
    }

    /// An output of the last replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        let found = self.outputs.iter().find(|(known, ..)| known == name);
        let (_, place, ty) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        match *place {
            Place::Store(slot) => store.get(slot),
            Place::Arena(offset) => {
                let start = self.arena.as_ptr().cast::<u8>();
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

    /// Runs the program once. Allocates nothing of its own (`allocations::a_replay_allocates_nothing`); the `gemm` crate
    /// packs operands into buffers of its own, and rayon's queue takes a block for every 63 replays.
    pub fn run(&mut self, store: &mut Store) {
        let Self {
            ops,
            parameters,
            pool,
            profile,
            ..
        } = self;
        let pool = &**pool;
        // A thread of the pool runs the ops, so that their chunks start without waking anyone.
        pool.enter(|| {
            for (index, op) in ops.iter_mut().enumerate() {
                let start = profile.is_some().then(Instant::now);
                op.run(store, parameters, pool);
                if let (Some(times), Some(start)) = (profile.as_mut(), start) {
                    times[index] += start.elapsed();
                }
            }
        });
    }

    /// Starts (or restarts) the clock of every op.
    pub fn start_profile(&mut self) {
        self.profile = Some(vec![Duration::ZERO; self.ops.len()]);
    }

    /// Time and work of each op since [`Executor::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        let times = self.profile.clone().unwrap_or_default();
        self.ops
            .iter()
            .zip(times)
            .map(|(op, time)| OpProfile {
                name: op.op.name(),
                shapes: format!("{:?}", op.op),
                time,
                flops: op.flops,
                bytes: op.bytes,
            })
            .collect()
    }
}

impl PreparedOp {
    fn run(&mut self, store: &mut Store, parameters: &StepParameters, pool: &Pool) {
        for &(index, slot) in &self.stored {
            let values = store.get_mut(slot);
            self.inputs[index] = View {
                start: values.as_mut_ptr().cast(),
                len: values.len(),
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
        let mut frame = Frame {
            types: &self.types,
            inputs: &self.inputs,
            outputs: &self.outputs,
            accumulate: &self.accumulate,
            scratch: self.scratch,
            parameters,
            pool,
            marker: PhantomData,
        };
        self.op.run(&mut frame);
    }
}

fn prepare(
    builder: &Builder,
    planned: &crate::plan::PlannedNode,
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
    let bytes = types.iter().map(|ty| ty.bytes()).sum::<usize>()
        + output_types().map(Type::bytes).sum::<usize>();
    PreparedOp {
        op: Arc::clone(&node.op),
        types: types.iter().map(|&ty| ty.clone()).collect(),
        inputs,
        stored,
        outputs,
        accumulate: node.into.iter().map(Option::is_some).collect(),
        copies,
        stored_copies,
        scratch: view(planned.scratch, &scratch),
        flops: node.op.flops(&types),
        bytes: bytes as u64,
    }
}
