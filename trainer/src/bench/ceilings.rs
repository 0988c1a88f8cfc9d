//! Ceilings of this machine: the lines of a roofline, measured with the threads of the run, at the
//! time of the run.
//!
//! Rates are the best of several rounds: a ceiling is what can be reached, and whatever else runs
//! on the machine only lowers a round.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;
use spd_draws::{Purpose, Stream};
use spd_engine::ops::GeluKind;
use spd_engine::{Alone, Builder, OpProfile, Pool, Precision, Processor, Store, Type};

use crate::fault::Fault;
use crate::rounded::whole;

/// Work long enough for the clock, short enough for a command line.
const ROUND_S: f64 = 0.02;
/// Enough that one falls into a quiet moment of a machine that others use too.
const ROUNDS: usize = 25;

/// Side of the large square product.
pub(super) const SQUARE: usize = 1024;

/// Bytes of the large copy, beyond every cache.
const LARGE: usize = 1 << 28;

/// Elements of which GELUs are measured: near enough that memory does not weigh.
const NEAR: usize = 1 << 16;

/// Highest rates of this machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Multiplications and additions per second of a large square product with our kernel, in the
    /// precision of the step.
    pub gemm: f64,
    /// Rows, sums and columns of `x V` at the workload's first site.
    pub site_shape: [usize; 3],
    /// The same kernel's rate at that shape.
    pub site_gemm: f64,
    /// Bytes per second, read and written, of a large copy.
    pub copy: f64,
    /// Bytes of a copy as large as the workload's memory, arena and store, at least 1 MiB, at most
    /// those of the large one.
    pub near_bytes: usize,
    /// Bytes per second, read and written, of that copy: what caches make of it.
    pub near_copy: f64,
    /// Values of GELU per second.
    pub gelus: f64,
    /// Slopes of GELU per second.
    pub gelu_slopes: f64,
    /// Random numbers per second.
    pub draws: f64,
}

/// The step whose ops are held against ceilings.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuredStep<'a> {
    pub(super) processor: &'a Processor,
    pub(super) precision: Precision,
    /// Rows, length of the sums, and columns of the first product of a site.
    pub(super) site_shape: [usize; 3],
    /// Memory of its programs and its state.
    pub(super) bytes: usize,
}

impl Ceilings {
    /// Measures; to be called on a thread of the pool.
    ///
    /// - `sizes`: of what is measured where the processor is a GPU
    pub(super) fn measure(
        step: &MeasuredStep<'_>,
        pool: &Arc<Pool>,
        sizes: Sizes,
    ) -> Result<Self, Fault> {
        let &MeasuredStep {
            processor,
            precision,
            site_shape,
            bytes,
        } = step;
        let is_gpu = matches!(processor, Processor::Gpu(_));
        let sizes = if is_gpu { sizes } else { CPU_SIZES };
        let gemm = |shape| match is_gpu {
            true => gemm_of_gpu(processor, precision, shape, sizes.rounds),
            false => gemm(pool, precision, shape),
        };
        let copy = |bytes| match is_gpu {
            true => copy_of_gpu(processor, bytes, sizes.rounds),
            false => Ok(copy(pool.threads(), bytes)),
        };
        let [gelus, gelu_slopes, draws] = expensive_ops(processor, sizes.near, sizes.rounds)?;
        let near_bytes = bytes.clamp(sizes.large / 256, sizes.large);
        Ok(Self {
            gemm: gemm([sizes.square; 3])?,
            site_shape,
            site_gemm: gemm(site_shape)?,
            copy: copy(sizes.large)?,
            near_bytes,
            near_copy: copy(near_bytes)?,
            gelus,
            gelu_slopes,
            draws,
        })
    }

    /// Lower bound of the time of an op, in seconds: the longer of its arithmetic, one kind after
    /// the other, and its reads and writes.
    pub(super) fn floor_s(&self, op: &OpProfile) -> f64 {
        let arithmetic = [
            (op.flops, self.gemm.max(self.site_gemm)),
            (op.expensive_ops.gelus, self.gelus),
            (op.expensive_ops.gelu_slopes, self.gelu_slopes),
            (op.expensive_ops.draws, self.draws),
        ];
        let arithmetic: f64 = arithmetic
            .iter()
            .map(|&(count, rate)| count as f64 / rate)
            .sum();
        arithmetic.max(op.bytes as f64 / self.copy.max(self.near_copy))
    }
}

fn gemm(pool: &Arc<Pool>, precision: Precision, [m, k, n]: [usize; 3]) -> Result<f64, Fault> {
    let mut b = Builder::with_precision(precision);
    let a = b.input("a", &Type::f32(&[m, k]))?;
    let w = b.input("w", &Type::f32(&[k, n]))?;
    let product = b.matmul(a, w)?;
    b.output("product", product);
    let mut program = Alone::new(&b, &Arc::clone(pool).into())?;
    fill(program.input("a"));
    fill(program.input("w"));
    let mut store = Store::new();
    Ok((2 * m * k * n) as f64
        / fastest_s(|| {
            program
                .run(&mut store)
                .expect("the processor refuses nothing")
        }))
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Side of the large square product.
    square: usize,
    /// Bytes of the large copy.
    large: usize,
    /// Elements of which GELUs are measured, in rows of 1024.
    near: usize,
    rounds: usize,
}

const CPU_SIZES: Sizes = Sizes {
    square: SQUARE,
    large: LARGE,
    near: NEAR,
    rounds: 10 * ROUNDS,
};

/// Enough to fill a GPU.
pub(super) const GPU_SIZES: Sizes = Sizes {
    square: 4096,
    large: LARGE,
    near: 1 << 22,
    rounds: 20,
};

/// Seconds that the op of each name takes in the best of so many replays.
fn fastest_ops_s<const N: usize>(
    program: &mut Alone,
    store: &mut Store,
    names: [&str; N],
    rounds: usize,
) -> Result<[f64; N], Fault> {
    let mut best_s = [f64::INFINITY; N];
    for _ in 0..rounds {
        program.start_profile();
        program.run(store)?;
        for op in program.profile() {
            for (name, best_s) in names.iter().zip(&mut best_s) {
                if op.name == *name {
                    *best_s = best_s.min(op.time.as_secs_f64());
                }
            }
        }
    }
    Ok(best_s)
}

/// Of what depends on a batch and a frozen weight; a sum that reads the product lets it be stored
/// as in a step.
fn gemm_of_gpu(
    processor: &Processor,
    precision: Precision,
    [m, k, n]: [usize; 3],
    rounds: usize,
) -> Result<f64, Fault> {
    let (mut b, mut store) = (Builder::with_precision(precision), Store::new());
    let a = b.input("a", &Type::f32(&[m, k]))?;
    let mut factor = vec![0.0; k * n];
    fill(&mut factor);
    let w = store.add("w", &[k, n], factor);
    store.freeze(w);
    let w = b.persistent(&store, w);
    let product = b.matmul(a, w)?;
    let sum = b.sum_squares(product)?;
    b.output("sum", sum);
    let mut program = Alone::new(&b, processor)?;
    fill(program.input("a"));
    let [s] = fastest_ops_s(&mut program, &mut store, ["matmul"], rounds)?;
    Ok((2 * m * k * n) as f64 / s)
}

/// An op that reads what it writes as much of.
fn copy_of_gpu(processor: &Processor, bytes: usize, rounds: usize) -> Result<f64, Fault> {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let rows = (bytes / 2 / size_of::<f32>() / 1024).max(1);
    let mut values = vec![0.0; rows * 1024];
    fill(&mut values);
    let x = store.add("x", &[rows, 1024], values);
    let x = b.persistent(&store, x);
    let y = b.relu(x)?;
    b.output("y", y);
    let mut program = Alone::new(&b, processor)?;
    let [s] = fastest_ops_s(&mut program, &mut store, ["relu"], rounds)?;
    Ok((2 * rows * 1024 * size_of::<f32>()) as f64 / s)
}

/// GELUs, their slopes and random numbers per second, by the best of so many replays on `near`
/// elements.
fn expensive_ops(processor: &Processor, near: usize, rounds: usize) -> Result<[f64; 3], Fault> {
    let mut b = Builder::new();
    let x = b.input("x", &Type::f32(&[near / 1024, 1024]))?;
    let y = b.gelu(x, GeluKind::Exact)?;
    let loss = b.sum_squares(y)?;
    if let Some(slopes) = b.gradients(loss, &[x])?[0] {
        b.output("slopes", slopes);
    }
    let draws = b.uniform(Stream::new(Purpose::Source, 0, 0), &[near / 1024, 1024])?;
    b.output("draws", draws);
    let mut program = Alone::new(&b, processor)?;
    fill(program.input("x"));
    let names = ["gelu", "gelu_grad", "uniform"];
    let best_s = fastest_ops_s(&mut program, &mut Store::new(), names, rounds)?;
    Ok(best_s.map(|best_s| near as f64 / best_s))
}

/// Random numbers, as a step has them: a device takes less power, and time, for constants.
fn fill(values: &mut [f32]) {
    Stream::new(Purpose::Features, 0, 0).fill_uniform(0, 0, 0, values);
}

fn copy(threads: usize, bytes: usize) -> f64 {
    let len = bytes / 2 / size_of::<f32>();
    let from = vec![1.0f32; len];
    let mut to = vec![0.0f32; len];
    let seconds = fastest_s(|| {
        if threads > 1 {
            let each = len.div_ceil(threads);
            to.par_chunks_mut(each)
                .zip(from.par_chunks(each))
                .for_each(|(to, from)| to.copy_from_slice(from));
        } else {
            to.copy_from_slice(&from);
        }
        black_box(&mut to);
    });
    (2 * len * size_of::<f32>()) as f64 / seconds
}

/// Seconds of one call in the best round, a round being as many calls as fill it.
fn fastest_s(mut work: impl FnMut()) -> f64 {
    work();
    let start = Instant::now();
    work();
    let once_s = start.elapsed().as_secs_f64().max(1e-9);
    let calls = whole((ROUND_S / once_s).ceil());
    let mut best_s = once_s;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..calls).for_each(|_| work());
        best_s = best_s.min(start.elapsed().as_secs_f64() / calls as f64);
    }
    best_s
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use spd_engine::ExpensiveOps;
    use spd_engine::cuda::Device;

    use super::*;

    /// Over soon on an emulated GPU.
    pub(in crate::bench) const SMALL: Sizes = Sizes {
        square: 16,
        large: 1 << 13,
        near: 1 << 10,
        rounds: 2,
    };

    /// A GPU made of this machine's processor; the test is skipped where there is no
    /// g++.
    pub(in crate::bench) fn emulated() -> Option<Arc<Device>> {
        if std::process::Command::new("g++")
            .arg("--version")
            .output()
            .is_err()
        {
            spd_testing::skip("g++");
            return None;
        }
        Some(spd_emulated::device())
    }

    #[test]
    fn the_slower_of_arithmetic_and_memory_is_the_floor() {
        let ceilings = Ceilings {
            gemm: 100.0,
            site_shape: [1; 3],
            site_gemm: 50.0,
            copy: 10.0,
            near_bytes: 1,
            near_copy: 20.0,
            gelus: 4.0,
            gelu_slopes: 2.0,
            draws: 8.0,
        };
        let floor = |flops, bytes, expensive_ops| {
            ceilings.floor_s(&OpProfile {
                name: "op",
                settings: String::new(),
                operands: String::new(),
                time: Duration::ZERO,
                flops,
                expensive_ops,
                bytes,
            })
        };
        // By hand: 300 / 100 against 40 / 20, then 100 / 100 against 40 / 20, then 1 + 4 / 4 + 4 /
        // 2 + 4 / 8.
        let none = ExpensiveOps::default();
        let expensive_ops = ExpensiveOps {
            gelus: 4,
            gelu_slopes: 4,
            draws: 4,
        };
        for (found, expected) in [
            (floor(300, 40, none), 3.0),
            (floor(100, 40, none), 2.0),
            (floor(100, 40, expensive_ops), 4.5),
        ] {
            assert!((found - expected).abs() < 1e-12, "{found}");
        }
    }

    #[test]
    fn the_dear_have_rates() {
        let pool = Arc::new(Pool::single());
        let rates = pool
            .enter(|| expensive_ops(&Arc::clone(&pool).into(), NEAR, 250))
            .unwrap();
        assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 1e6));
    }

    #[test]
    fn a_gpu_has_ceilings_by_its_own_clock() {
        let Some(device) = emulated() else {
            return;
        };
        for precision in [Precision::F32, Precision::Bf16] {
            let measured = Ceilings::measure(
                &MeasuredStep {
                    processor: &Processor::Gpu(Some(Arc::clone(&device))),
                    precision,
                    site_shape: [8, 5, 3],
                    bytes: 1 << 12,
                },
                &Arc::new(Pool::single()),
                SMALL,
            );
            let Ceilings {
                gemm,
                site_gemm,
                copy,
                near_bytes,
                near_copy,
                gelus,
                gelu_slopes,
                draws,
                ..
            } = measured.unwrap();
            assert_eq!(near_bytes, 1 << 12);
            for rate in [gemm, site_gemm, copy, near_copy, gelus, gelu_slopes, draws] {
                assert!(rate.is_finite() && rate > 0.0, "{rate}");
            }
        }
    }
}
