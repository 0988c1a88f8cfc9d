//! Hidden units on a block of rows. A unit's weights stay in registers while it processes the block.

use pulp::Simd;

use super::tiling::{LANES, Lanes, VECTORS};
use crate::cpu::gelu::Scaled;

/// Rows whose instructions are interleaved.
const ROWS: usize = 2;

/// A column of vectors: a block of rows of one group. Aligned, so that no vector crosses a cache
/// line.
#[repr(align(64))]
pub(super) struct Block(pub(super) [Lanes; VECTORS]);

impl Block {
    pub(super) fn zeros() -> Self {
        Self([[0.0; LANES]; VECTORS])
    }

    /// Multiplies each number by that of another block.
    #[inline(always)]
    pub(super) fn multiply<S: Simd>(&mut self, simd: S, by: &Self) {
        for (own, by) in self.rows_mut::<S, 1>().zip(by.rows::<S, 1>()) {
            for at in 0..per_row::<S>() {
                own[at] = simd.mul_f32s(own[at], by[at]);
            }
        }
    }

    /// So many rows at a time, each row as the vectors of this processor.
    #[inline(always)]
    pub(super) fn rows<S: Simd, const N: usize>(&self) -> std::slice::ChunksExact<'_, S::f32s> {
        S::as_simd_f32s(self.0.as_flattened())
            .0
            .chunks_exact(N * per_row::<S>())
    }

    #[inline(always)]
    pub(super) fn rows_mut<S: Simd, const N: usize>(
        &mut self,
    ) -> std::slice::ChunksExactMut<'_, S::f32s> {
        S::as_mut_simd_f32s(self.0.as_flattened_mut())
            .0
            .chunks_exact_mut(N * per_row::<S>())
    }
}

/// Vectors of this processor in [`Lanes`].
#[inline(always)]
pub(super) fn per_row<S: Simd>() -> usize {
    LANES / S::F32_LANES
}

/// The vector at index `at` of a group.
#[inline(always)]
pub(super) fn vector<S: Simd>(lanes: &Lanes, at: usize) -> S::f32s {
    S::as_simd_f32s(lanes).0[at]
}

/// Networks of a group with weights `w1`, `b1`, `w2` of each unit, and `b2`.
#[inline(always)]
pub(super) fn values<S: Simd>(
    simd: S,
    weights: &[Lanes],
    x: &Block,
    count: usize,
    total: &mut Block,
) {
    let (units, bias) = weights.as_chunks::<3>();
    total.0 = [bias[0]; VECTORS];
    for weights in units {
        for at in 0..per_row::<S>() {
            let [w1, b1, w2] = [0, 1, 2].map(|index| vector::<S>(&weights[index], at));
            let rows = x.rows::<S, ROWS>().zip(total.rows_mut::<S, ROWS>());
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
}

/// Slopes of the networks of a group with weights `w1`, `b1` and `w1 w2` of each unit. Adds the
/// sums over rows of `g x gelu'(p)`, `g gelu'(p)` and `g gelu(p)` of each unit, and of `g`.
#[inline(always)]
pub(super) fn gradients<S: Simd>(
    simd: S,
    weights: &[Lanes],
    [x, g]: [&Block; 2],
    count: usize,
    total: &mut Block,
    sums: &mut [Lanes],
) {
    let (sums, of_bias) = sums[..weights.len()].as_chunks_mut::<3>();
    let mut gx = Block::zeros();
    multiply(g, x, &mut gx, &mut of_bias[0]);
    total.0 = [[0.0; LANES]; VECTORS];
    for (unit, sums) in weights.as_chunks::<3>().0.iter().zip(sums) {
        add_unit(simd, unit, [x, g, &gx], count, total, sums);
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

/// The part of one unit in [`gradients`].
#[inline(always)]
fn add_unit<S: Simd>(
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
            .rows::<S, ROWS>()
            .zip(g.rows::<S, ROWS>())
            .zip(gx.rows::<S, ROWS>())
            .zip(total.rows_mut::<S, ROWS>());
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
