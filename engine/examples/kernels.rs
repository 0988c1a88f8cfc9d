//! Times the slowest kernels of a step: `cargo run --release --example kernels [threads]`.
//!
//! Prints the median and least time over replays of small programs, op by op; on a busy machine the
//! least says more about the kernel, the median about the machine. Compare the numbers before and
//! after a change of a kernel.
#![expect(clippy::print_stdout, reason = "prints its results")]

use std::sync::Arc;
use std::time::Duration;

use spd_draws::{Purpose, Stream};
use spd_engine::ops::{
    AdamW, AdamWOperands, AdditiveScores, ComponentMlpWeights, Draw, Gates, GeluKind,
    ImportanceGates, ImportanceMinimality, LogitNoise, Mask, MaskValues, MatMul, Penalty,
    ReactionParameters,
};
use spd_engine::{Alone, Builder, Pool, Result, Store, Value};

/// Replays that each median is taken over.
const REPLAYS: usize = 31;

/// A program to time, and the number of elements (or hidden units) in one run of its kernels.
struct Bench {
    store: Store,
    builder: Builder,
    pool: Arc<Pool>,
}

impl Bench {
    fn new(pool: &Arc<Pool>) -> Self {
        Self {
            store: Store::new(),
            builder: Builder::new(),
            pool: Arc::clone(pool),
        }
    }

    /// Normal numbers.
    fn normal(&mut self, name: &str, dims: &[usize]) -> Value {
        let mut values = vec![0.0; dims.iter().product()];
        let seed = self.store.slots().count() as u64;
        Stream::new(Purpose::Init, 0, 0).fill_normal(seed, 0, 0, &mut values);
        let slot = self.store.add(name, dims, values);
        self.builder.persistent(&self.store, slot)
    }

    /// Appends the gradients of `sum y^2`.
    fn differentiate(&mut self, y: Value, wrt: &[Value]) -> Result<()> {
        let loss = self.builder.sum_squares(y)?;
        for (index, gradient) in self.builder.gradients(loss, wrt)?.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                self.builder.output(index.to_string(), gradient);
            }
        }
        Ok(())
    }

    /// Prints the median time of each op named in `ops`; each handles `elements` elements.
    fn report(mut self, what: &str, elements: usize, ops: &[&str]) {
        let executor = Alone::new(&self.builder, &self.pool.into());
        let mut executor = executor.expect("memory for a few ops");
        for (scalar, value) in [
            ("p", 0.9),
            ("lr", 1e-3),
            ("correction1", 0.1),
            ("correction2", 0.001),
        ] {
            executor.set_scalar(scalar, value);
        }
        let mut run = |executor: &mut Alone| executor.run(&mut self.store).expect("a CPU does");
        run(&mut executor);
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); executor.plan().ops()];
        for _ in 0..REPLAYS {
            executor.start_profile();
            run(&mut executor);
            for (times, op) in times.iter_mut().zip(executor.profile()) {
                times.push(op.time);
            }
        }
        for (mut times, op) in times.into_iter().zip(executor.profile()) {
            if !ops.contains(&op.name) {
                continue;
            }
            times.sort_unstable();
            let [seconds, least] = [times.len() / 2, 0].map(|rank| times[rank].as_secs_f64());
            println!(
                "{what:34} {:22} {:9.1} us {:8.3} ns/element (least {:.3}) {:7.2} GFLOP/s",
                op.name,
                1e6 * seconds,
                1e9 * seconds / elements as f64,
                1e9 * least / elements as f64,
                op.flops as f64 / seconds / 1e9,
            );
        }
    }
}

fn component_mlp(pool: &Arc<Pool>, rows: usize, c: usize, h: usize) -> Result<()> {
    let mut bench = Bench::new(pool);
    let a = bench.normal("a", &[rows, c]);
    let with = ComponentMlpWeights {
        w1: bench.normal("w1", &[c, 1, h]),
        b1: bench.normal("b1", &[c, h]),
        w2: bench.normal("w2", &[c, h, 1]),
        b2: bench.normal("b2", &[c, 1]),
    };
    let z = bench.builder.component_mlp(a, &with)?;
    bench.differentiate(z, &[a, with.w1, with.b1, with.w2, with.b2])?;
    let what = format!("[{rows}, {c}] x {h} hidden");
    bench.report(
        &what,
        rows * c * h,
        &["component_mlp", "component_mlp_grad"],
    );
    Ok(())
}

fn masked(pool: &Arc<Pool>, rows: usize, c: usize, mask: Mask) -> Result<()> {
    let mut bench = Bench::new(pool);
    let (a, importance) = (bench.normal("a", &[rows, c]), bench.normal("g", &[rows, c]));
    let with = MaskValues {
        mask,
        importance: Some(importance),
        given: None,
        delta: Some(
            bench
                .builder
                .uniform_rows(Stream::new(Purpose::Delta, 0, 0), rows)?,
        ),
        route: None,
    };
    let h = bench.builder.masked(a, &with)?;
    bench.differentiate(h, &[a, importance])?;
    let kind = match mask {
        Mask::Between(_) => "drawn",
        _ => "importance",
    };
    bench.report(
        &format!("[{rows}, {c}] {kind}"),
        rows * c,
        &["masked", "masked_grad"],
    );
    Ok(())
}

fn gates(pool: &Arc<Pool>, rows: usize, c: usize, gates: Gates, noise: LogitNoise) -> Result<()> {
    let mut bench = Bench::new(pool);
    let z = bench.normal("z", &[rows, c]);
    let op = ImportanceGates {
        gates,
        noise,
        penalty: Some((Penalty::Power, bench.builder.step_scalar("p"))),
        alive: 0.0,
    };
    let found = bench.builder.importance_gates(op, z, None)?;
    let penalty = ImportanceMinimality::mean(rows);
    let penalty = bench
        .builder
        .importance_minimality(penalty, found.penalty_sums)?;
    let squares = bench.builder.sum_squares(found.importance)?;
    let loss = bench
        .builder
        .weighted_sum(&[(1.0, penalty), (1.0, squares)])?;
    if let Some(gradient) = bench.builder.gradients(loss, &[z])?[0] {
        bench.builder.output("gradient", gradient);
    }
    let drawn = if noise == LogitNoise::None {
        ""
    } else {
        " noisy"
    };
    bench.report(
        &format!("[{rows}, {c}] {gates:?}{drawn}"),
        rows * c,
        &["importance_gates", "importance_gates_grad"],
    );
    Ok(())
}

fn adamw(pool: &Arc<Pool>, len: usize) -> Result<()> {
    let mut bench = Bench::new(pool);
    let gradient = bench.normal("gradient", &[len]);
    let group = bench.builder.gradient_norm(&[gradient])?;
    let b = &mut bench.builder;
    let op = AdamW {
        clip: Some(1.0),
        ..AdamW::new(b)
    };
    let on = AdamWOperands {
        parameter: bench.normal("w", &[len]),
        first: bench.normal("m", &[len]),
        second: bench.normal("v", &[len]),
        gradient,
    };
    bench.builder.adamw(op, &[on], group, &[])?;
    bench.report(&format!("[{len}]"), len, &["adamw", "gradient_norm"]);
    Ok(())
}

fn elementwise(pool: &Arc<Pool>, rows: usize, columns: usize) -> Result<()> {
    type Of = fn(&mut Builder, Value, Value) -> Result<Value>;
    let all: [(&[&str], Of); 7] = [
        (&["relu", "relu_grad"], |b, x, _| b.relu(x)),
        (&["gelu", "gelu_grad"], |b, x, _| b.gelu(x, GeluKind::Exact)),
        (&["swiglu", "swiglu_grad"], |b, x, y| b.swiglu(x, y)),
        (&["mul", "mul_grad"], |b, x, y| b.mul(x, y)),
        (&["mse", "mse_grad"], |b, x, y| b.mse(x, y)),
        (&["softmax", "softmax_grad"], |b, x, _| b.softmax(x)),
        (&["concatenate", "columns_grad"], |b, x, y| {
            b.concatenate(&[x, y])
        }),
    ];
    for (names, of) in all {
        let mut bench = Bench::new(pool);
        let values = ["x", "y"].map(|name| bench.normal(name, &[rows, columns]));
        let y = of(&mut bench.builder, values[0], values[1])?;
        bench.differentiate(y, &values)?;
        bench.report(&format!("[{rows}, {columns}]"), rows * columns, names);
    }
    Ok(())
}

fn matmul(pool: &Arc<Pool>, a: [usize; 2], b: [usize; 2], transposed: [bool; 2]) -> Result<()> {
    let mut bench = Bench::new(pool);
    let (left, right) = (bench.normal("a", &a), bench.normal("b", &b));
    let op = MatMul {
        a_transposed: transposed[0],
        b_transposed: transposed[1],
        alpha: 1.0,
    };
    let y = bench.builder.op1(op, &[left, right])?;
    bench.builder.output("y", y);
    let elements = bench.builder.ty(y).len();
    let t = transposed.map(|t| if t { "^T" } else { "" });
    let what = format!("{a:?}{} x {b:?}{}", t[0], t[1]);
    bench.report(&what, elements, &["matmul"]);
    Ok(())
}

/// Elements are silus of pairs, with 8 heads of 64 columns.
fn additive_attention(pool: &Arc<Pool>, [b, t, e]: [usize; 3]) -> Result<()> {
    let (heads, size) = (8, 64);
    let mut bench = Bench::new(pool);
    let by_head = ["q", "k"].map(|name| bench.normal(name, &[b, t, heads, e]));
    let shared = ["c", "d"].map(|name| bench.normal(name, &[b, t, e]));
    let scores = AdditiveScores {
        by_head,
        shared,
        w: bench.normal("w", &[e]),
        beta: bench.normal("beta", &[]),
        scale: bench.normal("scale", &[]),
    };
    let v = bench.normal("v", &[b, t, heads * size]);
    let y = bench.builder.additive_attention(scores, v, true)?;
    let AdditiveScores { w, beta, scale, .. } = scores;
    let all = [&by_head[..], &shared, &[v, w, beta, scale]].concat();
    bench.differentiate(y, &all)?;
    bench.report(
        &format!("[{b}, {t}] x {heads} heads, {e} hidden"),
        b * heads * t * (t + 1) / 2 * e,
        &["additive_attention", "additive_attention_grad"],
    );
    Ok(())
}

fn causal_mixing(pool: &Arc<Pool>, [b, t, d]: [usize; 3]) -> Result<()> {
    let mut bench = Bench::new(pool);
    let (x, h) = (bench.normal("x", &[b, t, d]), bench.normal("h", &[t, d]));
    let bias = bench.normal("bias", &[d]);
    let y = bench.builder.causal_mixing(x, h, bias)?;
    bench.differentiate(y, &[x, h, bias])?;
    let names = [
        "causal_mixing",
        "causal_mixing_grad",
        "causal_mixing_kernel_grad",
    ];
    bench.report(&format!("[{b}, {t}, {d}]"), b * t * (t + 1) / 2 * d, &names);
    Ok(())
}

fn linear_attention(pool: &Arc<Pool>, [b, t, heads, k]: [usize; 4]) -> Result<()> {
    let mut bench = Bench::new(pool);
    let qkv = ["q", "k", "v"].map(|name| bench.normal(name, &[b, t, heads * k]));
    let y = bench.builder.linear_attention(qkv, heads)?;
    bench.differentiate(y, &qkv)?;
    let what = format!("[{b}, {t}] x {heads} heads of {k}");
    bench.report(&what, b * t * heads * k * k, &["linear_attention"]);
    Ok(())
}

fn gram_penalty(pool: &Arc<Pool>, [b, t]: [usize; 2]) -> Result<()> {
    let mut bench = Bench::new(pool);
    let phi = bench.normal("phi", &[b, t, 32]);
    let y = bench.builder.gram_penalty(phi)?;
    bench.differentiate(y, &[phi])?;
    let names = ["gram_penalty", "gram_penalty_grad"];
    bench.report(&format!("[{b}, {t}, 32]"), b * t * 32 * 32, &names);
    Ok(())
}

fn reaction(pool: &Arc<Pool>, [b, t]: [usize; 2]) -> Result<()> {
    let mut bench = Bench::new(pool);
    let [x, y] = ["x", "y"].map(|name| bench.normal(name, &[b, t, 512]));
    let [a, decay, dt] = ["a", "b", "dt"].map(|name| bench.normal(name, &[]));
    let with = ReactionParameters { a, b: decay, dt };
    let u = bench.builder.reaction(x, y, with, 2)?;
    bench.differentiate(u, &[x, y, a, dt])?;
    let names = ["reaction", "reaction_grad"];
    bench.report(&format!("[{b}, {t}, 512]"), b * t * 512, &names);
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let pool = Arc::new(Pool::new(threads.unwrap_or(1))?);
    for c in [200, 20] {
        component_mlp(&pool, 4096, c, 16)?;
    }
    let source = Stream::new(Purpose::Source, 0, 0);
    for c in [200, 20] {
        masked(&pool, 4096, c, Mask::Between(Draw::Uniform(source)))?;
    }
    masked(&pool, 4096, 200, Mask::Importance)?;
    let noise = LogitNoise::Drawn(Stream::new(Purpose::LogitNoise, 0, 0));
    gates(&pool, 4096, 1200, Gates::LeakyHard, LogitNoise::None)?;
    gates(&pool, 4096, 1200, Gates::LeakyHard, noise)?;
    gates(&pool, 4096, 1200, Gates::SwishHard, LogitNoise::None)?;
    elementwise(&pool, 4096, 5)?;
    elementwise(&pool, 512, 3072)?;
    for [b, t] in [[2, 64], [1, 128]] {
        additive_attention(&pool, [b, t, 256])?;
        gram_penalty(&pool, [b, t])?;
        reaction(&pool, [b, t])?;
    }
    causal_mixing(&pool, [4, 64, 256])?;
    causal_mixing(&pool, [1, 2048, 256])?;
    linear_attention(&pool, [2, 64, 4, 32])?;
    adamw(&pool, 1200 * 128)?;
    adamw(&pool, 1200 * 3072)?;
    for (a, b, transposed) in [
        ([512, 1200], [1200, 128], [false, false]),
        ([512, 128], [512, 1200], [true, false]),
        ([4096, 128], [4096, 512], [true, false]),
        ([4096, 5], [5, 20], [false, false]),
        ([4096, 20], [5, 20], [false, true]),
        ([4096, 5], [4096, 20], [true, false]),
    ] {
        matmul(&pool, a, b, transposed)?;
    }
    Ok(())
}
