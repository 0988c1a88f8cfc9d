use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::{CausalMixing, Sizes};
use crate::cpu::math::on_vectors;
use crate::cpu::{Frame, Output, Pool, Rows};

/// Results that are summed up together, in registers.
const ROWS: usize = 8;
/// Most results, and positions at a time, of which a vector's columns are copied to where they
/// follow each other: columns of rows are too far apart for the nearest cache.
const BLOCK: usize = 128;
/// Multiplications that are worth a chunk of their own: some 50 microseconds.
const CHUNK_WORK: usize = 1 << 20;

/// Rows of a chunk, for a number of multiplications of a row: whole tiles, two chunks or more for
/// each thread if they are worth it.
fn grain(pool: &Pool, rows: usize, work: usize) -> usize {
    let shared = rows.div_ceil(2 * pool.threads()).min(BLOCK);
    let worth = CHUNK_WORK.div_ceil(work.max(1));
    shared.max(worth).next_multiple_of(ROWS)
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
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            a, b, columns, out, ..
        } = self;
        let (lags, positions) = (a.len() / columns, b.len() / columns);
        let (mut terms, mut factors) = (
            [simd.splat_f32s(0.0); BLOCK],
            [simd.splat_f32s(0.0); 2 * BLOCK],
        );
        for (number, out) in out.chunks_mut(BLOCK * columns).enumerate() {
            let (first, rows) = (self.first + number * BLOCK, out.len() / columns);
            let last = first + rows - 1;
            // The positions that any of the results reads, and those of the last one, some of which
            // may not be there.
            let (any, reach) = if self.is_ahead {
                (first..positions.min(last + lags), last..last + lags)
            } else {
                let start = |row: usize| (row + 1).saturating_sub(lags);
                (start(first)..positions.min(last + 1), start(last)..last + 1)
            };
            for start in any.clone().step_by(BLOCK) {
                let block = start..any.end.min(start + BLOCK);
                // Factor `q` is that of `i` and `j` with `q = (j - start) + (last - i)`.
                let lag = |q: usize| match self.is_ahead {
                    true => (q + start).wrapping_sub(last),
                    false => last.wrapping_sub(q + start),
                };
                let place = |j: usize| j.saturating_sub(start).min(block.len() + rows - 1);
                let known = place(reach.start)..place(reach.end);
                for at in (0..columns).step_by(S::F32_LANES) {
                    let at = at..columns.min(at + S::F32_LANES);
                    for (term, j) in terms.iter_mut().zip(block.clone()) {
                        *term = load(simd, &b[j * columns..][at.clone()]);
                    }
                    for q in known.clone() {
                        factors[q] = load(simd, &a[lag(q) * columns..][at.clone()]);
                    }
                    let of = Block::<S> {
                        terms: &terms[..block.len()],
                        factors: &factors,
                        known: &known,
                        last: rows - 1,
                        columns,
                        at: &at,
                    };
                    let whole = rows - rows % ROWS;
                    for row in (0..whole).step_by(ROWS) {
                        of.rows::<ROWS>(simd, row, out);
                    }
                    for row in whole..rows {
                        of.rows::<1>(simd, row, out);
                    }
                }
            }
        }
    }
}

/// Some positions and a block of results, in the columns of a vector.
struct Block<'a, S: Simd> {
    /// `b_j` for each position.
    terms: &'a [S::f32s],
    /// `a` for each distance of a position from the last result, as far as they are known.
    factors: &'a [S::f32s],
    known: &'a Range<usize>,
    /// The last result.
    last: usize,
    columns: usize,
    at: &'a Range<usize>,
}

impl<S: Simd> Block<'_, S> {
    /// Some rows of `out`.
    #[inline(always)]
    fn rows<const R: usize>(&self, simd: S, row: usize, out: &mut [f32]) {
        let mut sums = [simd.splat_f32s(0.0); R];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = load(simd, &out[self.places(row + index)]);
        }
        // The positions that all rows read; each row reads others before and after.
        let start = self.read(row + R - 1).start;
        let all = start..self.read(row).end.max(start);
        for (index, sum) in sums.iter_mut().enumerate() {
            let read = self.read(row + index);
            let before = read.start..read.end.min(all.start);
            *sum = self.sum(simd, row + index, before, *sum);
        }
        let factors = &self.factors[all.start + self.last - (row + R - 1)..];
        for (term, factors) in self.terms[all.clone()].iter().zip(factors.windows(R)) {
            for (sum, factor) in sums.iter_mut().zip(factors.iter().rev()) {
                *sum = simd.mul_add_e_f32s(*factor, *term, *sum);
            }
        }
        for (index, sum) in sums.into_iter().enumerate() {
            let read = self.read(row + index);
            let after = read.start.max(all.end)..read.end;
            let sum = self.sum(simd, row + index, after, sum);
            let out = &mut out[self.places(row + index)];
            match S::as_mut_simd_f32s(out).0 {
                [out] => *out = sum,
                _ => simd.partial_store_f32s(out, sum),
            }
        }
    }

    /// A row's columns.
    #[inline(always)]
    fn places(&self, row: usize) -> Range<usize> {
        let start = row * self.columns;
        start + self.at.start..start + self.at.end
    }

    /// The positions that a row reads.
    #[inline(always)]
    fn read(&self, row: usize) -> Range<usize> {
        let at = |q: usize| q.saturating_sub(self.last - row).min(self.terms.len());
        at(self.known.start)..at(self.known.end)
    }

    /// A row's sum with what some positions add to it.
    #[inline(always)]
    fn sum(&self, simd: S, row: usize, positions: Range<usize>, mut sum: S::f32s) -> S::f32s {
        for j in positions {
            sum = simd.mul_add_e_f32s(self.factors[j + self.last - row], self.terms[j], sum);
        }
        sum
    }
}

/// A vector, or its first numbers and zeros.
#[inline(always)]
fn load<S: Simd>(simd: S, x: &[f32]) -> S::f32s {
    match S::as_simd_f32s(x).0 {
        [x] => *x,
        _ => simd.partial_load_f32s(x),
    }
}

pub(super) fn run(op: CausalMixing, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let [x, h] = [0, 1].map(|at| frame.input(at));
    let bias = (!op.is_ahead).then(|| frame.input(2));
    let sizes = Sizes::new(frame.ty(0), frame.ty(1).dims[0]);
    let (positions, columns) = (sizes.positions, sizes.columns);
    let rows = sizes.batch * positions;
    let grain = grain(frame.pool, rows, columns * sizes.lags.min(positions));
    let out = Rows(out, columns);
    frame.pool.run(rows, grain, out, |range, out| {
        if let Some(bias) = bias {
            let rows = out.0.chunks_exact_mut(columns);
            rows.for_each(|row| row.copy_from_slice(bias));
        } else if !add {
            out.0.fill(0.0);
        }
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
                is_ahead: op.is_ahead,
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
    let grain = grain(frame.pool, lags, sizes.batch * sizes.positions * columns);
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
