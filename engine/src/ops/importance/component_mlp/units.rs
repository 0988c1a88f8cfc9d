//! Hidden units on a block of rows. A unit's weights stay in registers while it processes the
//! block.

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
        let own = S::as_mut_simd_f32s(self.0.as_flattened_mut()).0;
        for (own, by) in own.iter_mut().zip(S::as_simd_f32s(by.0.as_flattened()).0) {
            *own = simd.mul_f32s(*own, *by);
        }
    }

    /// Vectors at index `at` of some rows.
    #[inline(always)]
    pub(super) fn some<S: Simd, const N: usize>(&self, first: usize, at: usize) -> [S::f32s; N] {
        let vectors = S::as_simd_f32s(self.0[first..first + N].as_flattened()).0;
        let mut some = [vectors[at]; N];
        for (row, vector) in some.iter_mut().enumerate() {
            *vector = vectors[row * per_row::<S>() + at];
        }
        some
    }

    /// Writes what [`Block::some`] reads.
    #[inline(always)]
    pub(super) fn put<S: Simd, const N: usize>(
        &mut self,
        first: usize,
        at: usize,
        some: [S::f32s; N],
    ) {
        let vectors = S::as_mut_simd_f32s(self.0[first..first + N].as_flattened_mut()).0;
        for (row, vector) in some.into_iter().enumerate() {
            vectors[row * per_row::<S>() + at] = vector;
        }
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
            for first in (0..count).step_by(ROWS) {
                let mut p = x.some::<S, ROWS>(first, at);
                for p in &mut p {
                    *p = simd.mul_add_f32s(w1, *p, b1);
                }
                let mut sums = total.some::<S, ROWS>(first, at);
                for (sum, value) in sums.iter_mut().zip(Scaled(simd).values(p)) {
                    *sum = simd.mul_add_f32s(w2, value, *sum);
                }
                total.put::<S, ROWS>(first, at, sums);
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
        for first in (0..count).step_by(ROWS) {
            let mut p = x.some::<S, ROWS>(first, at);
            for p in &mut p {
                *p = simd.mul_add_f32s(w1, *p, b1);
            }
            let (values, slopes) = Scaled(simd).values_and_slopes(p);
            let [g, gx] = [g.some::<S, ROWS>(first, at), gx.some::<S, ROWS>(first, at)];
            let mut sums = total.some::<S, ROWS>(first, at);
            for row in 0..ROWS {
                sums[row] = simd.mul_add_f32s(w1w2, slopes[row], sums[row]);
                of_w1 = simd.mul_add_f32s(gx[row], slopes[row], of_w1);
                of_b1 = simd.mul_add_f32s(g[row], slopes[row], of_b1);
                of_w2 = simd.mul_add_f32s(g[row], values[row], of_w2);
            }
            total.put::<S, ROWS>(first, at, sums);
        }
        for (sum, of) in sums.iter_mut().zip([of_w1, of_b1, of_w2]) {
            S::as_mut_simd_f32s(sum).0[at] = of;
        }
    }
}
