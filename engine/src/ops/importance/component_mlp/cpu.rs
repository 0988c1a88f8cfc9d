//! Components lie across the lanes. The activations are read as one long row: after
//! [`Tiling::rows`] rows its lanes stand for the same components again, for any number of
//! components, so no lane is idle, nothing is gathered, and a sum over rows is one vector. A hidden
//! unit's weights stay in registers while it processes a block of rows.

use pulp::{Simd, WithSimd};

use super::tiling::{LANES, Lanes, Tiling, VECTORS};
use crate::cpu::gelu::{self, Scaled};
use crate::cpu::math::on_vectors;
use crate::cpu::reduce::add_chunks;
use crate::cpu::{Frame, Output, PerChunk, Rows};

/// Rows whose instructions are interleaved.
const ROWS: usize = 2;

/// A column of vectors: a block of rows of one group. Aligned, so that no vector crosses a cache
/// line.
#[repr(align(64))]
struct Block([Lanes; VECTORS]);

impl Block {
    fn zeros() -> Self {
        Self([[0.0; LANES]; VECTORS])
    }

    /// Pairs of rows, each row as the vectors of this processor.
    #[inline(always)]
    fn rows<S: Simd>(&self) -> std::slice::ChunksExact<'_, S::f32s> {
        S::as_simd_f32s(self.0.as_flattened())
            .0
            .chunks_exact(ROWS * per_row::<S>())
    }

    #[inline(always)]
    fn rows_mut<S: Simd>(&mut self) -> std::slice::ChunksExactMut<'_, S::f32s> {
        S::as_mut_simd_f32s(self.0.as_flattened_mut())
            .0
            .chunks_exact_mut(ROWS * per_row::<S>())
    }
}

/// Vectors of this processor in [`Lanes`].
#[inline(always)]
fn per_row<S: Simd>() -> usize {
    LANES / S::F32_LANES
}

/// The vector at index `at` of a group.
#[inline(always)]
fn vector<S: Simd>(lanes: &Lanes, at: usize) -> S::f32s {
    S::as_simd_f32s(lanes).0[at]
}

pub(super) fn forward(frame: &mut Frame<'_>) {
    let z = frame.output(0).values;
    let [a, w1, b1, w2, b2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c) = (frame.ty(0).rows(), frame.ty(0).columns());
    let tiling = Tiling::new(c, frame.ty(1).columns());
    let weights = frame.scratch();
    let unit = |u| {
        [
            gelu::ARGUMENT * w1[u],
            gelu::ARGUMENT * b1[u],
            gelu::VALUE * w2[u],
        ]
    };
    tiling.lay_out(weights, unit, |c| b2[c]);
    let weights = weights.as_chunks::<LANES>().0;
    frame
        .pool
        .run(rows, tiling.block_rows(), Rows(z, c), |range, z| {
            on_vectors(Forward {
                tiling,
                a: &a[range.start * c..range.end * c],
                weights,
                z: z.0,
            });
        });
}

/// A block of rows through all networks.
struct Forward<'a> {
    tiling: Tiling,
    a: &'a [f32],
    weights: &'a [Lanes],
    z: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            tiling,
            a,
            weights,
            z,
        } = self;
        let (mut x, mut total) = (Block::zeros(), Block::zeros());
        for (group, weights) in weights.chunks_exact(tiling.vectors()).enumerate() {
            let (units, bias) = weights.as_chunks::<3>();
            let count = tiling.load(a, group, &mut x.0);
            total.0 = [bias[0]; VECTORS];
            for unit in units {
                pass(simd, unit, &x, count, &mut total);
            }
            tiling.store(&total.0, group, false, z);
        }
    }
}

/// Adds the output of a hidden unit.
#[inline(always)]
fn pass<S: Simd>(simd: S, weights: &[Lanes; 3], x: &Block, count: usize, total: &mut Block) {
    for at in 0..per_row::<S>() {
        let [w1, b1, w2] = [0, 1, 2].map(|index| vector::<S>(&weights[index], at));
        let rows = x.rows::<S>().zip(total.rows_mut::<S>());
        for (x, total) in rows.take(count.div_ceil(ROWS)) {
            let places: [usize; ROWS] = [at, at + per_row::<S>()];
            let mut p = [w1; ROWS];
            for (p, place) in p.iter_mut().zip(places) {
                *p = simd.mul_add_f32s(w1, x[place], b1);
            }
            for (value, place) in Scaled(simd).values(p).into_iter().zip(places) {
                total[place] = simd.mul_add_f32s(w2, value, total[place]);
            }
        }
    }
}

pub(super) fn backward(frame: &mut Frame<'_>) {
    let [gradient, a, w1, b1, w2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c) = (frame.ty(1).rows(), frame.ty(1).columns());
    let tiling = Tiling::new(c, frame.ty(2).columns());
    let Output { values: ga, add } = frame.output(0);
    // The weights first, then the sums over all chunks, then the sums of each chunk.
    let (shared, partials) = frame.scratch().split_at_mut(tiling.len());
    let unit = |u| {
        [
            gelu::ARGUMENT * w1[u],
            gelu::ARGUMENT * b1[u],
            gelu::SLOPE * w1[u] * w2[u],
        ]
    };
    tiling.lay_out(shared, unit, |_| 0.0);
    let weights = shared.as_chunks::<LANES>().0;
    let parts = (Rows(ga, c), PerChunk(&mut *partials, tiling.len()));
    frame.pool.run(
        rows,
        tiling.chunk_rows(rows),
        parts,
        |range, (ga, partial)| {
            let at = range.start * c..range.end * c;
            on_vectors(Backward {
                tiling,
                a: &a[at.clone()],
                gradient: &gradient[at],
                weights,
                ga: Output { values: ga.0, add },
                sums: partial.0.as_chunks_mut::<LANES>().0,
            });
        },
    );
    add_chunks(frame.pool, Output::overwrite(&mut *shared), partials);
    let [of_w1, of_b1, of_w2, of_b2] = [1, 2, 3, 4].map(|index| {
        let Output { values: out, add } = frame.output(index);
        if !add {
            out.fill(0.0);
        }
        out
    });
    tiling.collect(
        shared,
        |unit, [gw1, gb1, gw2]| {
            of_w1[unit] += gelu::SLOPE * w2[unit] * gw1;
            of_b1[unit] += gelu::SLOPE * w2[unit] * gb1;
            of_w2[unit] += gelu::VALUE * gw2;
        },
        |component, sum| of_b2[component] += sum,
    );
}

/// A chunk of rows: the gradients of its activations, and its part of the gradients of the weights.
struct Backward<'a> {
    tiling: Tiling,
    a: &'a [f32],
    gradient: &'a [f32],
    weights: &'a [Lanes],
    ga: Output<&'a mut [f32]>,
    sums: &'a mut [Lanes],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            tiling,
            a,
            gradient,
            weights,
            ga: Output { values: ga, add },
            sums,
        } = self;
        sums.fill([0.0; LANES]);
        let [mut x, mut g, mut gx, mut total] = [(); 4].map(|()| Block::zeros());
        let block = tiling.block_rows() * tiling.columns();
        let blocks = a
            .chunks(block)
            .zip(gradient.chunks(block))
            .zip(ga.chunks_mut(block));
        for ((a, gradient), ga) in blocks {
            let groups = weights
                .chunks_exact(tiling.vectors())
                .zip(sums.chunks_exact_mut(tiling.vectors()));
            for (group, (weights, sums)) in groups.enumerate() {
                let (sums, of_bias) = sums.as_chunks_mut::<3>();
                let count = tiling.load(a, group, &mut x.0);
                tiling.load(gradient, group, &mut g.0);
                total.0 = [[0.0; LANES]; VECTORS];
                multiply(&g, &x, &mut gx, &mut of_bias[0]);
                for (unit, sums) in weights.as_chunks::<3>().0.iter().zip(sums) {
                    pass_back(simd, unit, [&x, &g, &gx], count, &mut total, sums);
                }
                for (total, g) in total.0.iter_mut().zip(&g.0) {
                    total.iter_mut().zip(g).for_each(|(total, g)| *total *= g);
                }
                tiling.store(&total.0, group, add, ga);
            }
        }
    }
}

/// `gx = g x`, and adds the sum of `g`.
#[inline(always)]
fn multiply(g: &Block, x: &Block, gx: &mut Block, sum: &mut Lanes) {
    for ((gx, g), x) in gx.0.iter_mut().zip(&g.0).zip(&x.0) {
        for lane in 0..LANES {
            gx[lane] = g[lane] * x[lane];
            sum[lane] += g[lane];
        }
    }
}

/// A hidden unit with weights `w1`, `b1` and `w1 w2`: adds its part of the slope of the network,
/// and the sums over rows of `gx gelu'(p)`, `g gelu'(p)` and `g gelu(p)`.
#[inline(always)]
fn pass_back<S: Simd>(
    simd: S,
    weights: &[Lanes; 3],
    [x, g, gx]: [&Block; 3],
    count: usize,
    total: &mut Block,
    sums: &mut [Lanes; 3],
) {
    for at in 0..per_row::<S>() {
        let [w1, b1, w1w2] = [0, 1, 2].map(|index| vector::<S>(&weights[index], at));
        let [mut of_w1, mut of_b1, mut of_w2] =
            [0, 1, 2].map(|index| vector::<S>(&sums[index], at));
        let rows = x
            .rows::<S>()
            .zip(g.rows::<S>())
            .zip(gx.rows::<S>())
            .zip(total.rows_mut::<S>());
        for (((x, g), gx), total) in rows.take(count.div_ceil(ROWS)) {
            let places: [usize; ROWS] = [at, at + per_row::<S>()];
            let mut p = [w1; ROWS];
            for (p, place) in p.iter_mut().zip(places) {
                *p = simd.mul_add_f32s(w1, x[place], b1);
            }
            let (values, slopes) = Scaled(simd).values_and_slopes(p);
            for (row, place) in places.into_iter().enumerate() {
                total[place] = simd.mul_add_f32s(w1w2, slopes[row], total[place]);
                of_w1 = simd.mul_add_f32s(gx[place], slopes[row], of_w1);
                of_b1 = simd.mul_add_f32s(g[place], slopes[row], of_b1);
                of_w2 = simd.mul_add_f32s(g[place], values[row], of_w2);
            }
        }
        for (sum, of) in sums.iter_mut().zip([of_w1, of_b1, of_w2]) {
            S::as_mut_simd_f32s(sum).0[at] = of;
        }
    }
}
