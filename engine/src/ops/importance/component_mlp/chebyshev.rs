//! Networks as Chebyshev series. Each is a smooth function of one number: between the least and
//! the greatest activation of its component, it is a polynomial but for rounding.
//!
//! ```text
//! y = (a - middle) / half           f(a) = sum_m k_m T_m(y)
//! y_j = cos(pi (2j + 1) / 2n)       k_m = e_m sum_j f(a_j) T_m(y_j)      e_0 = 1/n, others 2/n
//! ```
//!
//! A sum over rows of `G f(a)` is linear in `f`: it equals `sum_j G_j f(a_j)` with
//! `G_j = sum_m e_m T_m(y_j) sum_rows G T_m(y)`. So hidden units are computed at `n` points, not at
//! all rows. A row costs two multiply-adds for each point (three in the backward pass), where it
//! costs 13 for each hidden unit (25).
//!
//! The arguments of GELU decide how many points are enough: see [`points`]. Groups whose arguments
//! reach too far, and batches with few rows, are computed unit by unit.

use std::f64::consts::PI;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::tiling::{LANES, Lanes, Tiling};
use super::units::{self, Block, per_row, vector};
use crate::cpu::gelu;
use crate::cpu::math::{on_vectors, vectorised};
use crate::cpu::pool::{PerChunk, Pool, chunks};
use crate::cpu::reduce::{add_scaled, rounded};

/// Rows whose instructions are interleaved: their numbers stay in registers.
const ROWS: usize = 4;

/// Rows of a group for each point, below which the points themselves take too long.
const ROWS_A_POINT: usize = 4;

/// Points that are enough for arguments of GELU at most `reach` from the middle of their range: the
/// values and slopes of its series are within 4e-7, or 1e-7 `reach` where that is more, as much as
/// rounding of the largest argument changes them.
fn points(reach: f32) -> f32 {
    reach.mul_add(5.0, 6.0).ceil()
}

/// A number of points.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a small whole number"
)]
fn whole(points: f32) -> usize {
    points as usize
}

/// Vectors before the coefficients: middles and halves of the ranges, and the number of points.
const HEAD: usize = 3;

impl Tiling {
    /// Vectors of a group's series.
    fn series_vectors(self) -> usize {
        HEAD + self.most_points()
    }

    /// f32s of the series of all groups.
    pub(super) fn series_len(self) -> usize {
        self.groups() * self.series_vectors() * LANES
    }
}

/// The series of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Series<'a> {
    middle: &'a Lanes,
    half: &'a Lanes,
    coefficients: &'a [Lanes],
}

impl<'a> Series<'a> {
    /// The series of a group, if it has one, among those of all groups.
    #[inline(always)]
    pub(super) fn of(tiling: Tiling, vectors: &'a [Lanes], group: usize) -> Option<Self> {
        let each = tiling.series_vectors();
        Self::in_vectors(&vectors[group * each..][..each])
    }

    #[inline(always)]
    fn in_vectors(vectors: &'a [Lanes]) -> Option<Self> {
        let ([middle, half, points], coefficients) = vectors.split_first_chunk::<HEAD>()?;
        let points = whole(points[0]);
        (points > 0).then(|| Self {
            middle,
            half,
            coefficients: &coefficients[..points],
        })
    }

    /// Sums of the series. With numbers `g` of the same rows, adds the sums over rows of
    /// `g T_m(y)`.
    #[inline(always)]
    pub(super) fn evaluate<S: Simd>(
        self,
        simd: S,
        x: &Block,
        count: usize,
        total: &mut Block,
        mut with: Option<(&Block, &mut [Lanes])>,
    ) {
        let scale = self.scale();
        for at in 0..per_row::<S>() {
            for first in (0..count).step_by(ROWS) {
                let [mut next, twice] =
                    self.places::<S>(simd, &scale, x.some::<S, ROWS>(first, at), at);
                let g = with.as_ref().map(|(g, _)| g.some::<S, ROWS>(first, at));
                let mut term = [simd.splat_f32s(1.0); ROWS];
                let mut sums = [simd.splat_f32s(0.0); ROWS];
                for (m, k) in self.coefficients.iter().enumerate() {
                    let k = vector::<S>(k, at);
                    for row in 0..ROWS {
                        sums[row] = simd.mul_add_f32s(k, term[row], sums[row]);
                    }
                    if let (Some(g), Some((_, moments))) = (g, &mut with) {
                        let moment = &mut S::as_mut_simd_f32s(&mut moments[m]).0[at];
                        for row in 0..ROWS {
                            *moment = simd.mul_add_f32s(g[row], term[row], *moment);
                        }
                    }
                    for row in 0..ROWS {
                        let after = simd.neg_f32s(term[row]);
                        term[row] = next[row];
                        next[row] = simd.mul_add_f32s(twice[row], next[row], after);
                    }
                }
                total.put::<S, ROWS>(first, at, sums);
            }
        }
    }

    /// Makes the sums over all rows that [`units::gradients`] makes from those of
    /// [`Series::evaluate`].
    #[inline(always)]
    pub(super) fn spread<S: Simd>(self, simd: S, weights: &[Lanes], sums: &mut [Lanes]) {
        let [mut x, mut g, mut slopes] = [(); 3].map(|()| Block::zeros());
        let points = self.places_of_points(&mut x);
        for_each_term(
            points,
            #[inline(always)]
            |j, m, term| add_scaled(&mut g.0[j], term, &sums[m]),
        );
        let of_bias = sums[0];
        sums[..weights.len()].fill([0.0; LANES]);
        units::gradients(simd, weights, [&x, &g], points, &mut slopes, sums);
        // The same sum, but for rounding.
        sums[weights.len() - 1] = of_bias;
    }

    /// The number of points.
    #[inline(always)]
    pub(super) fn points(self) -> usize {
        self.coefficients.len()
    }

    /// Reciprocals of the halves; 0 where all activations are equal.
    #[inline(always)]
    fn scale(&self) -> Lanes {
        std::array::from_fn(|lane| {
            let (middle, half) = (self.middle[lane], self.half[lane]);
            let equal = half < f32::MIN_POSITIVE || half < 0.125 * f32::EPSILON * middle.abs();
            if equal { 0.0 } else { 1.0 / half }
        })
    }

    /// `y` and `2 y` of some rows. Zeros after the last row are outside of the range: the second is
    /// clamped for them, so that the terms stay finite.
    #[inline(always)]
    fn places<S: Simd>(
        &self,
        simd: S,
        scale: &Lanes,
        x: [S::f32s; ROWS],
        at: usize,
    ) -> [[S::f32s; ROWS]; 2] {
        let (middle, scale) = (vector::<S>(self.middle, at), vector::<S>(scale, at));
        let [mut y, mut twice] = [x; 2];
        for row in 0..ROWS {
            y[row] = simd.mul_f32s(simd.sub_f32s(x[row], middle), scale);
            let most = simd.min_f32s(simd.add_f32s(y[row], y[row]), simd.splat_f32s(2.0));
            twice[row] = simd.max_f32s(most, simd.splat_f32s(-2.0));
        }
        [y, twice]
    }

    /// The activations of the points.
    #[inline(always)]
    fn places_of_points(&self, x: &mut Block) -> usize {
        let count = self.coefficients.len();
        for (j, x) in x.0[..count].iter_mut().enumerate() {
            let y = rounded(place(j, count));
            *x = std::array::from_fn(|lane| self.half[lane].mul_add(y, self.middle[lane]));
        }
        count
    }
}

/// `y_j`.
fn place(j: usize, points: usize) -> f64 {
    (PI * (2 * j + 1) as f64 / (2 * points) as f64).cos()
}

/// Calls `work(j, m, e_m T_m(y_j))` for all points and terms.
#[inline(always)]
fn for_each_term(points: usize, mut work: impl FnMut(usize, usize, f32)) {
    for j in 0..points {
        let y = place(j, points);
        let (mut before, mut term) = (y, 1.0);
        for m in 0..points {
            let factor = if m == 0 { 1.0 } else { 2.0 } / points as f64;
            work(j, m, rounded(factor * term));
            (before, term) = (term, 2.0 * y * term - before);
        }
    }
}

/// The networks of all groups, and a batch of activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Networks<'a> {
    pub(super) tiling: Tiling,
    pub(super) weights: &'a [Lanes],
    pub(super) a: &'a [f32],
}

impl Networks<'_> {
    /// The same networks, and some rows of the batch.
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        let c = self.tiling.columns();
        Self {
            a: &self.a[rows.start * c..rows.end * c],
            ..self
        }
    }

    /// Makes the series of all groups: of the networks' values, or of their slopes where there is
    /// room for the sums that [`units::gradients`] makes beside slopes. `ranges` is scratch.
    pub(super) fn fit(
        self,
        pool: &Pool,
        ranges: &mut [f32],
        sums: Option<PerChunk<'_>>,
        out: &mut [f32],
    ) {
        let Self { tiling, weights, a } = self;
        let (c, lanes) = (tiling.columns(), tiling.groups() * LANES);
        let rows = a.len() / c;
        let each = tiling.chunk_rows(rows);
        let ranges = &mut ranges[..2 * lanes * chunks(rows, each)];
        let parts = PerChunk(&mut *ranges, 2 * lanes);
        pool.run(rows, each, parts, |range, part| {
            let (low, high) = part.0.split_at_mut(lanes);
            vectorised(
                #[inline(always)]
                || extremes(&a[range.start * c..range.end * c], low, high),
            );
        });
        let ranges = &*ranges;
        let most = rows / tiling.rows() / ROWS_A_POINT;
        let out = PerChunk(out, tiling.series_vectors() * LANES);
        pool.run(tiling.groups(), 1, (out, sums), |group, (out, sums)| {
            on_vectors(Fit {
                weights: tiling.of(weights, group.start),
                ranges,
                lanes,
                at: group.start * LANES,
                most: most.min(tiling.most_points()) as f32,
                sums: sums.map(|sums| sums.0.as_chunks_mut().0),
                out: out.0.as_chunks_mut().0,
            });
        });
    }
}

/// The least and the greatest number of each lane; NaN is ignored.
#[inline(always)]
fn extremes(a: &[f32], low: &mut [f32], high: &mut [f32]) {
    low.fill(f32::INFINITY);
    high.fill(f32::NEG_INFINITY);
    for a in a.chunks(low.len()) {
        for ((x, low), high) in a.iter().zip(&mut *low).zip(&mut *high) {
            *low = if *x < *low { *x } else { *low };
            *high = if *x > *high { *x } else { *high };
        }
    }
}

/// Makes the series of one group, or none where it needs too many points.
struct Fit<'a> {
    weights: &'a [Lanes],
    /// Least and greatest numbers of all lanes, for each chunk.
    ranges: &'a [f32],
    lanes: usize,
    /// The group's first lane.
    at: usize,
    most: f32,
    sums: Option<&'a mut [Lanes]>,
    out: &'a mut [Lanes],
}

impl WithSimd for Fit<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { weights, out, .. } = self;
        let (mut enough, mut fits) = (0.0_f32, true);
        for lane in 0..LANES {
            let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
            for chunk in self.ranges.chunks_exact(2 * self.lanes) {
                low = low.min(chunk[self.at + lane]);
                high = high.max(chunk[self.lanes + self.at + lane]);
            }
            let half = 0.5 * high - 0.5 * low;
            let units = weights.as_chunks::<3>().0.iter();
            let steepest = units.fold(0.0, |most: f32, unit| most.max(unit[0][lane].abs()));
            let points = points(steepest / gelu::ARGUMENT * half);
            // NaN and infinity need more than the most.
            fits &= points <= self.most;
            enough = enough.max(points);
            out[0][lane] = 0.5 * high + 0.5 * low;
            out[1][lane] = half;
        }
        out[2] = [if fits { enough } else { 0.0 }; LANES];
        let Some(series) = Series::in_vectors(out) else {
            return;
        };
        let [mut x, mut f] = [(); 2].map(|()| Block::zeros());
        let count = series.places_of_points(&mut x);
        match self.sums {
            None => units::values(simd, weights, &x, count, &mut f),
            Some(sums) => {
                units::gradients(simd, weights, [&x, &Block::zeros()], count, &mut f, sums)
            }
        }
        let coefficients = &mut out[HEAD..][..count];
        coefficients.fill([0.0; LANES]);
        for_each_term(
            count,
            #[inline(always)]
            |j, m, term| add_scaled(&mut coefficients[m], term, &f.0[j]),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gelu::tests::exact;

    // The coefficients are summed in f64, so that only their number matters, and the rounding of
    // cosines.
    #[test]
    fn points_are_enough() {
        for reach in [
            0.01, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0, 10.0, 11.4,
        ] {
            let points = whole(points(reach));
            let reach = f64::from(reach);
            // The other sign is the mirror image, plus a straight line.
            for step in 0..=40 {
                let middle = f64::from(step) / 40.0 * -(reach + 5.0);
                let f = |y: f64| <[f64; 2]>::from(exact(reach.mul_add(y, middle)));
                let mut series = vec![[0.0; 2]; points];
                for_each_term(points, |j, m, term| {
                    let at = f(place(j, points));
                    (0..2).for_each(|of| series[m][of] += f64::from(term) * at[of]);
                });
                for angle in (0..500).map(|step| f64::from(step) / 499.0 * PI) {
                    let exact = f(angle.cos());
                    for of in 0..2 {
                        let terms = series.iter().enumerate();
                        let terms = terms.map(|(m, k)| k[of] * (m as f64 * angle).cos());
                        let error = (terms.sum::<f64>() - exact[of]).abs();
                        assert!(
                            error < 4e-7_f64.max(1e-7 * reach),
                            "{reach} {middle}: {error}"
                        );
                    }
                }
            }
        }
    }
}
