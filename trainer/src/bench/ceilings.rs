//! What this machine can do: the lines of a roofline, measured with the threads of the run, at the time of the run.
//!
//! Rates are the best of several rounds: a ceiling is what can be reached, and whatever else runs on the machine only lowers
//! a round.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;
use spd_engine::{Builder, Executor, Pool, Store, Type};

use crate::fault::Fault;

/// Work long enough for the clock, short enough for a command line.
const ROUND_S: f64 = 0.02;
/// Enough that one falls into a quiet moment of a machine that others use too.
const ROUNDS: usize = 25;

/// Side of the large square product.
pub(super) const SQUARE: usize = 1024;

/// Bytes of the large copy, beyond every cache.
const LARGE: usize = 1 << 28;

/// Highest rates of this machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Multiplications and additions per second of a large square product with our kernel, f32.
    pub gemm: f64,
    /// Rows, sums and columns of `x V` at the workload's first site.
    pub site_shape: [usize; 3],
    /// The same kernel's rate at that shape.
    pub site_gemm: f64,
    /// Bytes per second, read and written, of a large copy.
    pub copy: f64,
    /// Bytes of a copy as large as the workload's memory, arena and store, at least 1 MiB, at most those of the large one.
    pub near_bytes: usize,
    /// Bytes per second, read and written, of that copy: what caches make of it.
    pub near_copy: f64,
}

impl Ceilings {
    /// Measures; to be called on a thread of the pool.
    pub(super) fn measure(
        pool: &Arc<Pool>,
        site_shape: [usize; 3],
        workload_bytes: usize,
    ) -> Result<Self, Fault> {
        let near_bytes = workload_bytes.clamp(1 << 20, LARGE);
        Ok(Self {
            gemm: gemm(pool, [SQUARE; 3])?,
            site_shape,
            site_gemm: gemm(pool, site_shape)?,
            copy: copy(pool.threads(), LARGE),
            near_bytes,
            near_copy: copy(pool.threads(), near_bytes),
        })
    }

    /// Seconds that so much work must take at least.
    pub(super) fn floor_s(&self, flops: u64, bytes: u64) -> f64 {
        let arithmetic = self.gemm.max(self.site_gemm);
        let bandwidth = self.copy.max(self.near_copy);
        (flops as f64 / arithmetic).max(bytes as f64 / bandwidth)
    }
}

fn gemm(pool: &Arc<Pool>, [m, k, n]: [usize; 3]) -> Result<f64, Fault> {
    let mut b = Builder::new();
    let a = b.input("a", &Type::f32(&[m, k]))?;
    let w = b.input("w", &Type::f32(&[k, n]))?;
    let product = b.matmul(a, w)?;
    b.output("product", product);
    let mut program = Executor::new(&b, Arc::clone(pool));
    program.input("a").fill(1.0);
    program.input("w").fill(1.0);
    let mut store = Store::new();
    Ok((2 * m * k * n) as f64 / fastest_s(|| program.run(&mut store)))
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
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of calls"
    )]
    let calls = (ROUND_S / once_s).ceil() as usize;
    let mut best_s = once_s;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..calls).for_each(|_| work());
        best_s = best_s.min(start.elapsed().as_secs_f64() / calls as f64);
    }
    best_s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_arithmetic_and_memory_is_the_floor() {
        let ceilings = Ceilings {
            gemm: 100.0,
            site_shape: [1; 3],
            site_gemm: 50.0,
            copy: 10.0,
            near_bytes: 1,
            near_copy: 20.0,
        };
        // By hand: 300 / 100 against 40 / 20, then 100 / 100 against 40 / 20.
        assert!((ceilings.floor_s(300, 40) - 3.0).abs() < 1e-12);
        assert!((ceilings.floor_s(100, 40) - 2.0).abs() < 1e-12);
    }
}
