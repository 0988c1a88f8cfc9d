//! A logistic of a sum is `1 / (1 + e^-alpha e^-kappa)`: powers are made once for each query and
//! each key, and a pair costs a multiplication and a reciprocal. Sums whose powers could overflow
//! take the exponential of each pair.

use super::{AdditiveAttention, Sizes};
use crate::cpu::math::{dot, exp, logistic, tree, vectorised};
use crate::cpu::pool::rows_with_scratch;
use crate::cpu::reduce::{add_chunks, add_scaled, add_to, max};
use crate::cpu::tile::{Tile, Tiles, Window};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::grain_rows;

/// Columns of a vector: rows of the hidden layer are padded to multiples of it, with zeros.
const LANES: usize = 16;
/// Keys that are processed together: they, their gradients and their logistics stay in the nearest
/// cache.
const KEYS: usize = 8;
/// Largest magnitude of a sum whose power, times another, is far from the ends of f32.
const CLOSE: f32 = 43.0;

fn pitch(sizes: Sizes) -> usize {
    sizes.hidden.next_multiple_of(LANES)
}

/// f32s of scratch of a chunk: both sides, the weights, and the logistics of some keys.
pub(super) fn scratch(sizes: Sizes) -> usize {
    let pitch = pitch(sizes);
    sizes.positions * 2 * (2 * pitch + 1) + (1 + KEYS) * pitch
}

/// f32s of scratch of a chunk of the gradient: also the gradients of both sides and of the weights,
/// and a number for each query.
pub(super) fn gradient_scratch(sizes: Sizes) -> usize {
    let pitch = pitch(sizes);
    scratch(sizes) + sizes.positions * (2 * pitch + 1) + pitch
}

/// The first numbers of the scratch, which keeps the others.
fn take<'s>(scratch: &mut &'s mut [f32], len: usize) -> &'s mut [f32] {
    scratch.split_off_mut(..len).expect("it is long enough")
}

/// One head in one batch row.
#[derive(Clone, Copy)]
struct Unit {
    sizes: Sizes,
    batch_row: usize,
    head: usize,
}

impl Unit {
    fn new(sizes: Sizes, number: usize) -> Self {
        Self {
            sizes,
            batch_row: number / sizes.heads,
            head: number % sizes.heads,
        }
    }

    /// The head's columns at a position of `x`, `[b, t, heads, columns]`.
    #[inline(always)]
    fn row<'a>(&self, x: &'a [f32], columns: usize, position: usize) -> &'a [f32] {
        let row = self.batch_row * self.sizes.positions + position;
        &x[(row * self.sizes.heads + self.head) * columns..][..columns]
    }

    /// The columns at a position of `x`, `[b, t, columns]`.
    #[inline(always)]
    fn shared_row<'a>(&self, x: &'a [f32], columns: usize, position: usize) -> &'a [f32] {
        let row = self.batch_row * self.sizes.positions + position;
        &x[row * columns..][..columns]
    }
}

/// The queries or the keys of a unit, a padded row for each position.
struct Side<'s> {
    sums: &'s [f32],
    /// `e^-x` of each sum.
    powers: &'s [f32],
    /// The largest magnitude of a row.
    largest: &'s [f32],
    pitch: usize,
}

/// A row of a [`Side`].
#[derive(Clone, Copy)]
struct Row<'s> {
    sums: &'s [f32],
    powers: &'s [f32],
    largest: f32,
}

impl<'s> Side<'s> {
    /// The sums of the parts of a head, and of those that the heads share.
    #[inline(always)]
    fn new(unit: Unit, [by_head, shared]: [&[f32]; 2], scratch: &mut &'s mut [f32]) -> Self {
        let (positions, hidden) = (unit.sizes.positions, unit.sizes.hidden);
        let pitch = pitch(unit.sizes);
        let [sums, powers] = [0; 2].map(|_| take(scratch, positions * pitch));
        let largest = take(scratch, positions);
        let rows = sums
            .chunks_exact_mut(pitch)
            .zip(powers.chunks_exact_mut(pitch));
        for (position, ((sums, powers), largest)) in rows.zip(&mut *largest).enumerate() {
            let by_head = unit.row(by_head, hidden, position);
            let shared = unit.shared_row(shared, hidden, position);
            sums[hidden..].fill(0.0);
            for (sum, (a, b)) in sums.iter_mut().zip(by_head.iter().zip(shared)) {
                *sum = a + b;
            }
            for (magnitude, sum) in powers.iter_mut().zip(&*sums) {
                *magnitude = sum.abs();
            }
            *largest = max(powers);
            for (power, sum) in powers.iter_mut().zip(&*sums) {
                *power = exp(-sum);
            }
        }
        Self {
            sums,
            powers,
            largest,
            pitch,
        }
    }

    #[inline(always)]
    fn row(&self, position: usize) -> Row<'s> {
        let first = position * self.pitch;
        Row {
            sums: &self.sums[first..][..self.pitch],
            powers: &self.powers[first..][..self.pitch],
            largest: self.largest[position],
        }
    }
}

/// `1 / x` for `x` in `[1, 3e37]`, relative error below 7e-8, from multiplications: the difference
/// of exponents and mantissas is within an eighth of it, a step of Newton's with the factor that
/// makes its errors of either sign equal within 1.6e-3, and a cubic step does the rest.
#[inline(always)]
fn reciprocal(x: f32) -> f32 {
    let y = f32::from_bits(0x7ef2_2c00_u32.wrapping_sub(x.to_bits()));
    let y = y * (-x).mul_add(y, 2.0015);
    let rest = (-x).mul_add(y, 1.0);
    y.mul_add(rest.mul_add(rest, rest), y)
}

/// The scores of a query and some keys, and what their gradient needs.
struct Scores<'s> {
    w: &'s [f32],
    beta: f32,
    scale: f32,
    /// Logistics of the sums of the query and each key, `[KEYS, pitch]`.
    logistics: &'s mut [f32],
    /// `tanh(x / 2)`.
    links: [f32; KEYS],
    /// `e^(scale tanh(x / 2))`.
    powers: [f32; KEYS],
}

impl<'s> Scores<'s> {
    #[inline(always)]
    fn new(sizes: Sizes, [w, beta, scale]: [&[f32]; 3], scratch: &mut &'s mut [f32]) -> Self {
        let pitch = pitch(sizes);
        let padded = take(scratch, pitch);
        padded.fill(0.0);
        padded[..sizes.hidden].copy_from_slice(w);
        Self {
            w: padded,
            beta: beta[0],
            scale: scale[0],
            logistics: take(scratch, KEYS * pitch),
            links: [0.0; KEYS],
            powers: [0.0; KEYS],
        }
    }

    /// Of a query and `count` keys from `first` on. Each depends on its own key alone.
    #[inline(always)]
    fn set(&mut self, query: Row<'_>, keys: &Side<'_>, first: usize, count: usize) {
        let rows = self.logistics.chunks_exact_mut(keys.pitch);
        for ((at, link), logistics) in self.links[..count].iter_mut().enumerate().zip(rows) {
            let key = keys.row(first + at);
            let sum = if query.largest <= CLOSE && key.largest <= CLOSE {
                weighted_silus(query, key, self.w, logistics, |_, [a, b]| {
                    reciprocal(a.mul_add(b, 1.0))
                })
            } else {
                weighted_silus(query, key, self.w, logistics, |sum, _| logistic(sum))
            };
            *link = sum + self.beta;
        }
        for (link, power) in self.links.iter_mut().zip(&mut self.powers) {
            *link = 2.0f32.mul_add(logistic(*link), -1.0);
            *power = exp(self.scale * *link);
        }
    }
}

/// `w . silu(query + key)`. A logistic, which is kept, is computed from a sum and two powers.
#[inline(always)]
fn weighted_silus(
    query: Row<'_>,
    key: Row<'_>,
    w: &[f32],
    logistics: &mut [f32],
    logistic: impl Fn(f32, [f32; 2]) -> f32,
) -> f32 {
    let (logistics, _) = logistics.as_chunks_mut::<LANES>();
    let rows = [query.sums, query.powers, key.sums, key.powers, w];
    let rows = rows.map(|row| &row.as_chunks::<LANES>().0[..logistics.len()]);
    let mut totals = [0f32; LANES];
    for (at, kept) in logistics.iter_mut().enumerate() {
        // Copies, which overlap nothing that is written: registers then hold all of them.
        let [a, a_power, b, b_power, w] = rows.map(|row| row[at]);
        let mut shares = [0f32; LANES];
        for lane in 0..LANES {
            let sum = a[lane] + b[lane];
            let share = logistic(sum, [a_power[lane], b_power[lane]]);
            shares[lane] = share;
            totals[lane] = w[lane].mul_add(sum * share, totals[lane]);
        }
        *kept = shares;
    }
    tree(totals)
}

/// The queries that attend to any of the keys from `first` on, and for each the number of those
/// keys, of [`KEYS`] at most.
#[inline(always)]
fn pairs(
    op: AdditiveAttention,
    positions: usize,
    first: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let most = KEYS.min(positions - first);
    let queries = if op.causal { first } else { 0 }..positions;
    queries.map(move |query| {
        let seen = if op.causal { query + 1 - first } else { most };
        (query, seen.min(most))
    })
}

/// Tiles of the heads of `x`, `[b, t, heads, columns]`.
fn heads(x: &mut [f32], sizes: Sizes, columns: usize) -> Tiles<'_> {
    let window = Window::side_by_side(0, columns);
    let stride = sizes.heads * columns;
    let [tiles] = Tiles::cut(x, sizes.positions, stride, sizes.heads, [window]);
    tiles
}

pub(super) fn run(op: AdditiveAttention, frame: &mut Frame<'_>) {
    let (y, sums) = (frame.output(0).values, frame.output(1).values);
    let scratch = frame.scratch();
    let sizes = Sizes::new(frame.ty(0), frame.ty(4));
    let [q, k, c, d, v, w, beta, scale] = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| frame.input(at));
    let (positions, size) = (sizes.positions, sizes.size);
    let parts = (
        heads(y, sizes, size),
        Rows(sums, positions),
        PerChunk(scratch, self::scratch(sizes)),
    );
    let units = sizes.units();
    let chunk = rows_with_scratch(units);
    frame
        .pool
        .run(units, chunk, parts, |range, (mut y, sums, scratch)| {
            for (number, sums) in range.zip(sums.0.chunks_exact_mut(positions)) {
                let unit = Unit::new(sizes, number);
                let mut y = y.tile(number);
                let mut scratch = &mut *scratch.0;
                vectorised(
                    #[inline(always)]
                    || {
                        let queries = Side::new(unit, [q, c], &mut scratch);
                        let keys = Side::new(unit, [k, d], &mut scratch);
                        let mut scores = Scores::new(sizes, [w, beta, scale], &mut scratch);
                        sums.fill(0.0);
                        y.fill(0.0);
                        for first in (0..positions).step_by(KEYS) {
                            for (query, seen) in pairs(op, positions, first) {
                                scores.set(queries.row(query), &keys, first, seen);
                                let y = y.row(query);
                                for (at, &power) in scores.powers[..seen].iter().enumerate() {
                                    sums[query] += power;
                                    add_scaled(y, power, unit.row(v, size, first + at));
                                }
                            }
                        }
                        for (query, sum) in sums.iter().enumerate() {
                            let share = 1.0 / sum;
                            y.row(query).iter_mut().for_each(|y| *y *= share);
                        }
                    },
                );
            }
        });
}

/// Operands of the gradient.
#[derive(Clone, Copy)]
struct Operands<'a> {
    /// The parts of queries, and of keys.
    sides: [[&'a [f32]; 2]; 2],
    v: &'a [f32],
    y: &'a [f32],
    g: &'a [f32],
    w: &'a [f32],
    beta: &'a [f32],
    scale: &'a [f32],
    sums: &'a [f32],
}

pub(super) fn run_gradient(op: AdditiveAttention, frame: &mut Frame<'_>) {
    let [q, k, c, d, v, w, beta, scale] =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|at| frame.output(at).values);
    let scratch = frame.scratch();
    let sizes = Sizes::new(frame.ty(0), frame.ty(4));
    let of = Operands {
        sides: [[0, 2], [1, 3]].map(|side| side.map(|at| frame.input(at))),
        v: frame.input(4),
        y: frame.input(5),
        g: frame.input(6),
        w: frame.input(7),
        beta: frame.input(8),
        scale: frame.input(9),
        sums: frame.input(10),
    };
    let Sizes { hidden, size, .. } = sizes;
    let units = sizes.units();
    let (of_w, scratch) = scratch.split_at_mut(units * hidden);
    let (of_scalars, scratch) = scratch.split_at_mut(units * 2);
    let parts = (
        (heads(q, sizes, hidden), heads(k, sizes, hidden)),
        (heads(v, sizes, size), Rows(of_w, hidden)),
        (
            Rows(of_scalars, 2),
            PerChunk(scratch, gradient_scratch(sizes)),
        ),
    );
    frame.pool.run(
        units,
        rows_with_scratch(units),
        parts,
        |range, ((mut q, mut k), (mut v, of_w), (of_scalars, scratch))| {
            let rows = of_w.0.chunks_exact_mut(hidden);
            let rows = rows.zip(of_scalars.0.as_chunks_mut::<2>().0);
            for (number, (of_w, of_scalars)) in range.zip(rows) {
                let tiles = [q.tile(number), k.tile(number), v.tile(number)];
                let unit = Unit::new(sizes, number);
                backward(op, unit, of, tiles, (of_w, of_scalars), scratch.0);
            }
        },
    );
    add_chunks(frame.pool, Output::overwrite(w), of_w);
    for (at, to) in [beta, scale].into_iter().enumerate() {
        to[0] = of_scalars.iter().skip(at).step_by(2).sum();
    }
    for (to, from) in [(c, &*q), (d, &*k)] {
        add_heads(frame, sizes, from, to);
    }
}

/// The sum over the heads of `x`, `[b, t, heads, e]` to `[b, t, e]`.
fn add_heads(frame: &Frame<'_>, sizes: Sizes, x: &[f32], to: &mut [f32]) {
    let Sizes { heads, hidden, .. } = sizes;
    let (rows, columns) = (sizes.batch * sizes.positions, heads * hidden);
    let grain = grain_rows(rows, columns);
    frame.pool.run(rows, grain, Rows(to, hidden), |range, to| {
        let rows = x[range.start * columns..].chunks_exact(columns);
        for (to, row) in to.0.chunks_exact_mut(hidden).zip(rows) {
            to.fill(0.0);
            row.chunks_exact(hidden).for_each(|head| add_to(to, head));
        }
    });
}

#[expect(clippy::cast_possible_truncation, reason = "sums in f64, rounded once")]
fn backward(
    op: AdditiveAttention,
    unit: Unit,
    of: Operands<'_>,
    [mut q, mut k, mut v]: [Tile<'_>; 3],
    (w, beta_and_scale): (&mut [f32], &mut [f32; 2]),
    mut scratch: &mut [f32],
) {
    let sizes = unit.sizes;
    let (positions, hidden, size) = (sizes.positions, sizes.hidden, sizes.size);
    let pitch = pitch(sizes);
    let first_sum = (unit.batch_row * sizes.heads + unit.head) * positions;
    let row_sums = &of.sums[first_sum..][..positions];
    vectorised(
        #[inline(always)]
        || {
            let [queries, keys] = of.sides.map(|side| Side::new(unit, side, &mut scratch));
            let mut scores = Scores::new(sizes, [of.w, of.beta, of.scale], &mut scratch);
            let [of_queries, of_keys] = [0; 2].map(|_| take(&mut scratch, positions * pitch));
            let (dots, of_w) = (take(&mut scratch, positions), take(&mut scratch, pitch));
            let (mut of_beta, mut of_scale) = (0f64, 0f64);
            for sums in [&mut *of_queries, of_keys, of_w] {
                sums.fill(0.0);
            }
            v.fill(0.0);
            for (query, to) in dots.iter_mut().enumerate() {
                *to = dot(unit.row(of.g, size, query), unit.row(of.y, size, query));
            }
            for first in (0..positions).step_by(KEYS) {
                for (query, seen) in pairs(op, positions, first) {
                    let row = queries.row(query);
                    scores.set(row, &keys, first, seen);
                    let g = unit.row(of.g, size, query);
                    let share = 1.0 / row_sums[query];
                    let mut slopes = [0f32; KEYS];
                    for (at, to) in slopes[..seen].iter_mut().enumerate() {
                        let (p, link) = (share * scores.powers[at], scores.links[at]);
                        let value = unit.row(of.v, size, first + at);
                        let slope = p * (dot(g, value) - dots[query]);
                        of_scale += f64::from(slope * link);
                        *to = slope * scores.scale * 0.5 * (-link).mul_add(link, 1.0);
                        of_beta += f64::from(*to);
                        add_scaled(v.row(first + at), p, g);
                    }
                    let of_pairs = Pairs {
                        query: row.sums,
                        keys: &keys.sums[first * pitch..][..seen * pitch],
                        logistics: scores.logistics,
                        slopes: &slopes[..seen],
                    };
                    of_pairs.pass_back(
                        &mut of_queries[query * pitch..][..pitch],
                        &mut of_keys[first * pitch..][..seen * pitch],
                        of_w,
                    );
                }
            }
            for (to, from) in [(&mut q, of_queries), (&mut k, of_keys)] {
                for (position, from) in from.chunks_exact(pitch).enumerate() {
                    for (to, (x, w)) in to.row(position).iter_mut().zip(from.iter().zip(of.w)) {
                        *to = x * w;
                    }
                }
            }
            w.copy_from_slice(&of_w[..hidden]);
            *beta_and_scale = [of_beta as f32, of_scale as f32];
        },
    );
}

/// A query with some keys, and the gradients of their scores.
struct Pairs<'a> {
    query: &'a [f32],
    /// A row for each key.
    keys: &'a [f32],
    logistics: &'a [f32],
    slopes: &'a [f32],
}

impl Pairs<'_> {
    /// Adds to the gradients of the query and of the keys, both without the weights, and of the
    /// weights.
    #[inline(always)]
    fn pass_back(&self, of_query: &mut [f32], of_keys: &mut [f32], of_w: &mut [f32]) {
        let vectors = self.query.len() / LANES;
        let [query, keys, logistics] =
            [self.query, self.keys, self.logistics].map(|row| row.as_chunks::<LANES>().0);
        let of_keys = of_keys.as_chunks_mut::<LANES>().0;
        let sums = of_query.as_chunks_mut::<LANES>().0.iter_mut();
        let sums = sums.zip(of_w.as_chunks_mut::<LANES>().0).zip(query);
        for (at, ((of_query, of_w), query)) in sums.enumerate() {
            // Copies, as above.
            let (query, mut total, mut total_w) = (*query, *of_query, *of_w);
            for (key, &slope) in self.slopes.iter().enumerate() {
                let at = key * vectors + at;
                let (key, logistic, mut of_key) = (keys[at], logistics[at], of_keys[at]);
                for lane in 0..LANES {
                    let share = logistic[lane];
                    let silu = (query[lane] + key[lane]) * share;
                    let rise = share + (-silu).mul_add(share, silu);
                    total[lane] = slope.mul_add(rise, total[lane]);
                    of_key[lane] = slope.mul_add(rise, of_key[lane]);
                    total_w[lane] = slope.mul_add(silu, total_w[lane]);
                }
                of_keys[at] = of_key;
            }
            (*of_query, *of_w) = (total, total_w);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::tests::{grid, worst};

    #[test]
    fn a_reciprocal_is_within_its_error() {
        for (low, high) in [(1.0, 2.0), (2.0, 1e3), (1e3, 1e7), (1e30, 3e37)] {
            let (error, x) = worst(grid(low, high), |x| {
                (f64::from(reciprocal(x)) * f64::from(x) - 1.0).abs()
            });
            assert!(error < 7e-8, "{error} at {x}");
        }
        assert!(reciprocal(f32::NAN).is_nan());
    }
}
