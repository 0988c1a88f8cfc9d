use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::Sizes;
use crate::cpu::math::on_vectors;
use crate::cpu::{Frame, Output, Rows};

/// Results that are summed up together, in registers.
const ROWS: usize = 8;
/// Most rows of a chunk for the sake of a cache, where they share the columns that they read.
const MOST_ROWS: usize = 64;
/// Multiplications that are worth a chunk of their own: some 50 microseconds.
const CHUNK_WORK: usize = 1 << 20;

/// Rows of a chunk, for a number of multiplications of a row.
fn grain(rows: usize, work: usize) -> usize {
    let shared = (rows / 16).clamp(ROWS, MOST_ROWS);
    shared.max(CHUNK_WORK / work.max(1))
}

/// Adds `sum_j a_|i - j| b_j` to some results, for each column.
struct Correlation<'a> {
    /// `[lags, columns]`.
    a: &'a [f32],
    /// `[positions, columns]`.
    b: &'a [f32],
    columns: usize,
    /// Whether `j >= i`, rather than `j <= i`.
    is_ahead: bool,
    /// The first result.
    first: usize,
    /// A row for each result.
    out: &'a mut [f32],
}

impl WithSimd for Correlation<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.out.len() / self.columns;
        let whole = rows - rows % ROWS;
        for start in (0..self.columns).step_by(S::F32_LANES) {
            let at = start..self.columns.min(start + S::F32_LANES);
            for row in (0..whole).step_by(ROWS) {
                self.rows::<S, ROWS>(simd, row, &at);
            }
            for row in whole..rows {
                self.rows::<S, 1>(simd, row, &at);
            }
        }
    }
}

impl Correlation<'_> {
    /// Some rows, in the columns of a vector.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&mut self, simd: S, row: usize, at: &Range<usize>) {
        let (columns, first) = (self.columns, self.first + row);
        let (lags, positions) = (self.a.len() / columns, self.b.len() / columns);
        // The positions that any of the results reads, and those that all of them do.
        let (any, all) = if self.is_ahead {
            let end = (first + R - 1 + lags).min(positions);
            let all = first + R - 1..(first + lags).min(positions);
            (first.min(end)..end, all)
        } else {
            let start = (first + 1).saturating_sub(lags);
            let all = (first + R).saturating_sub(lags)..first + 1;
            (start..(first + R).min(positions), all)
        };
        let mut sums = [simd.splat_f32s(0.0); R];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = load(simd, row_of(self.out, columns, row + index, at));
        }
        for j in any {
            let b = load(simd, row_of(self.b, columns, j, at));
            let is_whole = all.contains(&j);
            for (index, sum) in sums.iter_mut().enumerate() {
                // Beyond all lags where it would be negative.
                let lag = if self.is_ahead {
                    j.wrapping_sub(first + index)
                } else {
                    (first + index).wrapping_sub(j)
                };
                if is_whole || lag < lags {
                    let a = load(simd, row_of(self.a, columns, lag, at));
                    *sum = simd.mul_add_e_f32s(a, b, *sum);
                }
            }
        }
        for (index, sum) in sums.into_iter().enumerate() {
            let first = (row + index) * columns;
            let out = &mut self.out[first + at.start..first + at.end];
            match S::as_mut_simd_f32s(out).0 {
                [out] => *out = sum,
                _ => simd.partial_store_f32s(out, sum),
            }
        }
    }
}

/// Some columns of a row.
#[inline(always)]
fn row_of<'a>(x: &'a [f32], columns: usize, row: usize, at: &Range<usize>) -> &'a [f32] {
    &x[row * columns..][at.clone()]
}

/// A vector, or its first numbers and zeros.
#[inline(always)]
fn load<S: Simd>(simd: S, x: &[f32]) -> S::f32s {
    match S::as_simd_f32s(x).0 {
        [x] => *x,
        _ => simd.partial_load_f32s(x),
    }
}

pub(super) fn run(frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let [x, h, bias] = [0, 1, 2].map(|at| frame.input(at));
    let sizes = Sizes::new(frame.ty(0), frame.ty(1).dims[0]);
    let begin = |row: &mut [f32]| row.copy_from_slice(bias);
    mix(frame, sizes, [h, x], false, y, begin);
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let [g, h] = [0, 1].map(|at| frame.input(at));
    let sizes = Sizes::new(frame.ty(0), frame.ty(1).dims[0]);
    mix(frame, sizes, [h, g], true, out, |row| {
        if !add {
            row.fill(0.0);
        }
    });
}

/// The sums of `h` and the rows of each batch row of `x`, from what `begin` makes of a row.
fn mix(
    frame: &Frame<'_>,
    sizes: Sizes,
    [h, x]: [&[f32]; 2],
    is_ahead: bool,
    out: &mut [f32],
    begin: impl Fn(&mut [f32]) + Sync,
) {
    let Sizes {
        batch,
        positions,
        lags,
        columns,
    } = sizes;
    let rows = batch * positions;
    let grain = grain(rows, columns * lags.min(positions));
    let out = Rows(out, columns);
    frame.pool.run(rows, grain, out, |range, out| {
        out.0.chunks_exact_mut(columns).for_each(&begin);
        let (mut row, mut left) = (range.start, out.0);
        // Rows of one batch row at a time.
        while row < range.end {
            let first = row % positions;
            let count = (positions - first).min(range.end - row);
            let (out, later) = left.split_at_mut(count * columns);
            on_vectors(Correlation {
                a: h,
                b: of_batch_row(x, sizes, row / positions),
                columns,
                is_ahead,
                first,
                out,
            });
            (row, left) = (row + count, later);
        }
    });
}

pub(super) fn run_kernel_gradient(lags: usize, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let [x, g] = [0, 1].map(|at| frame.input(at));
    let sizes = Sizes::new(frame.ty(0), lags);
    let columns = sizes.columns;
    let grain = grain(lags, sizes.batch * sizes.positions * columns);
    let out = Rows(out, columns);
    frame.pool.run(lags, grain, out, |range, out| {
        if !add {
            out.0.fill(0.0);
        }
        for batch_row in 0..sizes.batch {
            on_vectors(Correlation {
                a: of_batch_row(x, sizes, batch_row),
                b: of_batch_row(g, sizes, batch_row),
                columns,
                is_ahead: true,
                first: range.start,
                out: &mut *out.0,
            });
        }
    });
}

/// `[t, d]` of `x`, `[b, t, d]`.
fn of_batch_row(x: &[f32], sizes: Sizes, batch_row: usize) -> &[f32] {
    let len = sizes.positions * sizes.columns;
    &x[batch_row * len..][..len]
}
