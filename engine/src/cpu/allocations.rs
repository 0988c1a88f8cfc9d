//! Tests that a replay allocates nothing, as [`Executor::run`](super::Executor::run) says.
#![expect(unsafe_code, reason = "the trait of allocators is unsafe")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use spd_draws::{Purpose, Stream};

use super::gemm::tests::INSIDE;
use super::{Alone, Pool};
use crate::derivation::SiteInputs;
use crate::op::{Builder, Result};
use crate::ops::oracle::random;
use crate::ops::{
    AdamW, AdamWOperands, ComponentMlpWeights, Decay, Draw, Gates, GeluKind, Heads,
    ImportanceGates, ImportanceMinimality, Lines, LogitNoise, Mask, MaskValues, Penalty, Qkv,
};
use crate::store::Store;
use crate::value::{Type, Value};

thread_local! {
    /// Whether the allocations of this thread are counted: other tests run at the same time.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no flags any more, and no allocations of a replay.
        let counted = COUNTED.try_with(Cell::get).unwrap_or(false);
        if counted && !INSIDE.try_with(Cell::get).unwrap_or(true) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; `start` came from `System`.
        unsafe { System.dealloc(start, layout) };
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Rows of a batch, positions, width, components, vocabulary entries. Large enough for several
/// chunks.
const B: usize = 8;
const T: usize = 64;
const D: usize = 16;
const C: usize = 40;
const V: usize = 50;

/// A program under construction, its parameters and their store.
#[derive(Default)]
struct Step {
    b: Builder,
    store: Store,
    parameters: Vec<(String, Value)>,
}

impl Step {
    fn parameter(&mut self, name: &str, dims: &[usize]) -> Value {
        let values = random(dims, self.parameters.len() as u64).values;
        let values = values.into_iter().map(|x| 0.1 * x).collect();
        let slot = self.store.add(name, dims, values);
        let value = self.b.persistent(&self.store, slot);
        self.parameters.push((name.to_owned(), value));
        value
    }

    /// Embedding, norms, both forms of attention, GELU, ReLU and SwiGLU: f32 `[b, t, d]`.
    fn residual(&mut self, tokens: Value) -> Result<Value> {
        let (wte, wpe) = (
            self.parameter("wte", &[V, D]),
            self.parameter("wpe", &[T, D]),
        );
        let (scale, shift) = (self.parameter("scale", &[D]), self.parameter("shift", &[D]));
        let w_qkv = self.parameter("w_qkv", &[D, 3 * D]);
        let x = self.b.embed(tokens, wte, Some(wpe))?;
        let normed = self.b.layer_norm(x, scale, shift, 1e-5)?;
        let qkv = self.b.linear_io(normed, w_qkv, None)?;
        let attended = self
            .b
            .attention(Qkv::Joined(qkv), Heads::causal(2, 2), None)?;
        let x = self.b.add(x, attended)?;
        let x = self.b.gelu(x, GeluKind::Tanh)?;
        let x = self.b.relu(x)?;
        let w_kv = self.parameter("w_kv", &[D, D / 2]);
        let q = self.b.rms_norm(x, scale, 1e-6)?;
        let kv = self.b.linear_io(q, w_kv, None)?;
        let table = self.b.rotary_table(T, D / 4, 1e4, None)?;
        let qkv = Qkv::Apart([q, kv, kv]);
        let documents = Some(self.b.documents(tokens, 1)?);
        let heads = Heads::causal(4, 2);
        let turned = self
            .b
            .attention_in_documents(qkv, heads, Some(table), documents)?;
        let y = self.b.swiglu(turned, x)?;
        let both = self.b.concatenate(&[y, x])?;
        let half = self.b.slice(both, D / 2..D + D / 2)?;
        let y = self.b.reshape(half, &[B, T, D])?;
        let gate = self.b.silu(y)?;
        let gate = self.b.softmax(gate)?;
        let y = self.b.mul(y, gate)?;
        let factor = self.b.mean(gate)?;
        self.b.scale(y, factor)
    }

    fn mlp(&mut self) -> ComponentMlpWeights {
        ComponentMlpWeights {
            w1: self.parameter("w1", &[C, 1, 4]),
            b1: self.parameter("b1", &[C, 4]),
            w2: self.parameter("w2", &[C, 4, 1]),
            b2: self.parameter("b2", &[C, 1]),
        }
    }

    /// A masked site: its output f32 `[b, t, d]`, and its penalty.
    fn site(&mut self, x: Value) -> Result<[Value; 2]> {
        let (v_ic, u_co) = (
            self.parameter("v_ic", &[D, C]),
            self.parameter("u_co", &[C, D]),
        );
        let (w_oi, bias) = (
            self.parameter("w_oi", &[D, D]),
            self.parameter("bias", &[D]),
        );
        let mlp = self.mlp();
        let acts = self.b.matmul(x, v_ic)?;
        let clean = self.b.linear_oi(x, w_oi, Some(bias))?;
        let logits = self.b.component_mlp(acts, &mlp)?;
        let gates = ImportanceGates {
            gates: Gates::LeakyHard,
            noise: LogitNoise::Drawn(Stream::new(Purpose::LogitNoise, 0, 0)),
            penalty: Some((Penalty::Power, self.b.step_scalar("p"))),
            alive: 0.0,
        };
        let importances = self.b.importance_gates(gates, logits, None)?;
        let importance = importances.importance;
        let penalty = ImportanceMinimality {
            beta: 0.5,
            ..ImportanceMinimality::mean(B * T)
        };
        let penalty = self
            .b
            .importance_minimality(penalty, importances.penalty_sums)?;
        self.b.output("active", importances.active);
        let delta = self
            .b
            .uniform_rows(Stream::new(Purpose::Delta, 0, 0), B * T)?;
        let route = self
            .b
            .uniform_subsets(Stream::new(Purpose::Routing, 0, 0), B * T, 3)?[1];
        let masked = MaskValues {
            mask: Mask::Between(Draw::Uniform(Stream::new(Purpose::Source, 0, 0))),
            importance: Some(importance),
            given: None,
            delta: Some(delta),
            route: Some(route),
        };
        let joined = SiteInputs {
            clean: Some(clean),
            bias: Some(bias),
            delta: Some(delta),
            route: Some(route),
        };
        let attacked = self.ascent((x, v_ic, u_co), &masked, &joined)?;
        let compacted = self.b.routed_matmul(x, v_ic, route)?;
        let h = self.b.masked(compacted, &masked)?;
        let y = self.b.site_output(h, u_co, &joined)?;
        Ok([self.b.add(y, attacked)?, penalty])
    }

    /// The output under an adversary after a step, its sources shared and at half of the positions.
    fn ascent(
        &mut self,
        (x, v_ic, u_co): (Value, Value, Value),
        masked: &MaskValues,
        joined: &SiteInputs,
    ) -> Result<Value> {
        let stream = Stream::new(Purpose::Source, 1, 0);
        let (source, delta) = (
            self.b.uniform_row(stream, C)?,
            self.b.uniform_row(stream, 1)?,
        );
        let route = Stream::new(Purpose::Routing, 1, 0);
        let route = self.b.bernoulli(route, B * T, 0.5)?;
        let acts = self.b.routed_matmul(x, v_ic, route)?;
        let attacked = |b: &mut Builder, source, delta| {
            let with = MaskValues {
                mask: Mask::Between(Draw::Given),
                given: Some(source),
                delta: Some(delta),
                route: Some(route),
                ..*masked
            };
            let h = b.masked(acts, &with)?;
            let with = SiteInputs {
                delta: Some(delta),
                route: Some(route),
                ..*joined
            };
            b.site_output(h, u_co, &with)
        };
        let before = attacked(&mut self.b, source, delta)?;
        let loss = self.b.sum_squares(before)?;
        let gradients = self.b.gradients(loss, &[source, delta])?;
        let mut up = |source, gradient: Option<Value>| {
            let gradient = gradient.expect("the loss depends on it");
            self.b.ascend(source, gradient, 0.1)
        };
        let (source, delta) = (up(source, gradients[0])?, up(delta, gradients[1])?);
        attacked(&mut self.b, source, delta)
    }

    fn loss(&mut self) -> Result<Value> {
        let tokens = self.b.input("tokens", &Type::u32(&[B, T]))?;
        let labels = self.b.input("labels", &Type::u32(&[B, T]))?;
        let x = self.residual(tokens)?;
        let [y, penalty] = self.site(x)?;
        let (w, bias) = (
            self.parameter("parallel", &[4, 4, 4]),
            self.parameter("parallel bias", &[4, 4]),
        );
        let y = self.b.parallel_linear(y, w, bias)?;
        let head_vd = self.parameter("head_vd", &[V, D]);
        let head_dv = self.b.transpose(head_vd)?;
        let target = self.b.input("target", &Type::f32(&[B, T, V]))?;
        let output = self.b.input("output", &Type::f32(&[B, T, D]))?;
        let logits = self.b.matmul(y, head_dv)?;
        let target_lse = self.b.log_sum_exp(target)?;
        let frozen = self.b.input("frozen head", &Type::f32(&[V, D]))?;
        let through = self.b.linear_oi(y, frozen, None)?;
        let with = [target, target_lse, through];
        let through = self.b.kl_divergence_and_cross_entropy(with, labels)?;
        self.b.output("entropy", through[1]);
        let terms = [
            (1.0, through[0]),
            (1.0, self.b.kl_divergence(target, target_lse, logits)?),
            (1.0, self.b.cross_entropy(logits, labels)?),
            (0.5, self.b.mse(y, output)?),
            (1e-3, self.b.sum_squares(head_dv)?),
            (1e-3, self.b.mean(logits)?),
            (1e-2, penalty),
        ];
        self.b.weighted_sum(&terms)
    }

    fn update(&mut self, loss: Value) -> Result<()> {
        let parameters = self.parameters.clone();
        let values: Vec<Value> = parameters.iter().map(|&(_, value)| value).collect();
        let gradients: Vec<Value> = self
            .b
            .gradients(loss, &values)?
            .into_iter()
            .map(|gradient| gradient.expect("the loss depends on every parameter"))
            .collect();
        let group = self.b.gradient_norm(&gradients)?;
        let halt = self.store.zeros("halt", &[2]);
        let halt = self.b.persistent(&self.store, halt);
        self.b.halt(halt, &[group])?;
        let average = self.store.zeros("average", &[4]);
        let average = self.b.persistent(&self.store, average);
        let x = self.b.constant(1.0, &[4])?;
        let correction = self.b.step_scalar("correction1");
        let smooth = self.b.average(average, x, 0.25, correction)?;
        self.b.output("average", smooth);
        self.b.keep_average(average, x, 0.25, &[group])?;
        let needed = self.b.max_rows(&[vec![x]])?[0];
        let op = Decay {
            lr: self.b.step_scalar("lr"),
            decay: 0.1,
            root: false,
            of: Lines::Columns,
        };
        self.b.decay(op, average, needed, &[group])?;
        let op = AdamW {
            decay: 0.01,
            clip: Some(1.0),
            ..AdamW::new(&mut self.b)
        };
        let mut on = Vec::new();
        for ((name, parameter), gradient) in parameters.into_iter().zip(gradients) {
            let dims = self.b.ty(parameter).dims.clone();
            let [first, second] = ["first", "second"].map(|moment| {
                let slot = self.store.zeros(format!("{name} {moment}"), &dims);
                self.b.persistent(&self.store, slot)
            });
            on.push(AdamWOperands {
                parameter,
                first,
                second,
                gradient,
            });
        }
        self.b.adamw(op, &on, group, &[halt])
    }
}

/// Allocations of this thread and the pool's while `work` runs.
fn allocations(pool: &Pool, work: impl FnOnce()) -> usize {
    let count = |on: bool| {
        pool.on_each_thread(|| COUNTED.set(on));
        COUNTED.set(on);
    };
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    count(true);
    work();
    COUNTED.set(false);
    let after = ALLOCATIONS.load(Ordering::Relaxed);
    count(false);
    after - before
}

#[test]
fn a_replay_allocates_nothing() {
    let mut step = Step::default();
    let loss = step.loss().unwrap();
    step.b.output("loss", loss);
    step.update(loss).unwrap();
    let Step {
        b: builder,
        mut store,
        ..
    } = step;
    let mut names: Vec<&str> = builder.nodes.iter().map(|node| node.op.name()).collect();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| !name.contains("grad") || *name == "gradient_norm");
    // Every op is here: a new one must be added to this program.
    let all = [
        "adamw",
        "add",
        "ascend",
        "attention",
        "average",
        "averaged",
        "bernoulli",
        "component_mlp",
        "concatenate",
        "constant",
        "cross_entropy",
        "decay",
        "documents",
        "embed",
        "gelu",
        "gradient_norm",
        "halt",
        "head_divergence",
        "importance_gates",
        "importance_minimality",
        "keep",
        "kl_divergence",
        "layer_norm",
        "log_sum_exp",
        "masked",
        "matmul",
        "max_rows",
        "mean",
        "mse",
        "mul",
        "parallel_linear",
        "relu",
        "reshape",
        "rms_norm",
        "rotary_table",
        "routed_matmul",
        "scale",
        "silu",
        "site_output",
        "site_share",
        "slice",
        "softmax",
        "sum_rows",
        "sum_squares",
        "swiglu",
        "transpose",
        "uniform",
        "uniform_subsets",
        "weighted_sum",
    ];
    assert_eq!(names, all);
    for threads in [1, 2] {
        let pool = Arc::new(Pool::new(threads).unwrap());
        let mut executor = Alone::new(&builder, Arc::clone(&pool));
        for (name, value) in [
            ("p", 0.9),
            ("lr", 1e-3),
            ("correction1", 0.1),
            ("correction2", 0.001),
        ] {
            executor.set_scalar(name, value);
        }
        // The first replays start the threads and rayon's buffers for each of them.
        (0..3).for_each(|_| executor.run(&mut store));
        // On a busy machine, a thread that had no work so far makes its buffers when it first gets
        // some; allocations of a replay itself would occur every time.
        let mut times =
            (0..8).map(|_| allocations(&pool, || (0..5).for_each(|_| executor.run(&mut store))));
        assert!(times.any(|found| found == 0), "{threads} threads");
        assert!(executor.output("loss", &store)[0].is_finite());
    }
}

#[test]
fn an_allocation_is_counted() {
    for threads in [1, 2] {
        let pool = Pool::new(threads).unwrap();
        let found = allocations(&pool, || {
            pool.enter(|| drop(std::hint::black_box(vec![1u8])));
        });
        assert!(found >= 1, "{threads} threads");
    }
}
