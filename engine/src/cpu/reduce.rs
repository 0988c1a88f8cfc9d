//! Reductions over the columns of a row, to be called inside [`vectorised`], in an order that
//! depends only on the length of the row; and over the chunks of a kernel.

use super::math::{LANES, exp, ln, tree, vectorised};
use super::output::Output;
use super::pool::{Pool, Rows};

/// Blocks of [`LANES`] columns that a pass over the partial results takes together.
const BLOCKS: usize = 4;

/// [`LANES`], but no constant to the compiler: it unrolls loops of constant length before it looks
/// for vectors, and may then add single numbers (measured in a norm: 8 times slower).
#[inline(always)]
fn lanes() -> usize {
    std::hint::black_box(LANES).min(LANES)
}

/// Sum of `term([a_i, b_i, ..])` over the columns of rows of one length.
#[inline(always)]
pub(crate) fn sum_over<const N: usize>(rows: [&[f32]; N], term: impl Fn([f32; N]) -> f32) -> f32 {
    let mut partial = [0f32; LANES];
    let (len, lanes) = (rows[0].len(), lanes());
    let rows = rows.map(|row| &row[..len]);
    let mut start = 0;
    while start + BLOCKS * LANES <= len {
        let blocks = rows.map(|row| {
            let blocks = row[start..].first_chunk::<{ BLOCKS * LANES }>();
            blocks.expect("so many are left")
        });
        for lane in 0..lanes {
            let mut total = partial[lane];
            for block in 0..BLOCKS {
                total += term(blocks.map(|row| row[block * LANES + lane]));
            }
            partial[lane] = total;
        }
        start += BLOCKS * LANES;
    }
    while start < len {
        let end = len.min(start + LANES);
        let block = rows.map(|row| &row[start..end]);
        for lane in 0..lanes.min(end - start) {
            partial[lane] += term(block.map(|row| row[lane]));
        }
        start = end;
    }
    tree(partial)
}

/// Replaces each `x_i` by the first of `term(x_i, t_i)`, and returns the sum of the second.
#[inline(always)]
pub(crate) fn replace_and_sum(
    x: &mut [f32],
    t: &[f32],
    term: impl Fn(f32, f32) -> (f32, f32),
) -> f32 {
    let mut partial = [0f32; LANES];
    let lanes = lanes();
    for (x, t) in x.chunks_mut(LANES).zip(t.chunks(LANES)) {
        let count = lanes.min(x.len());
        for ((x, t), total) in x[..count].iter_mut().zip(t).zip(&mut partial) {
            let (new, y) = term(*x, *t);
            *x = new;
            *total += y;
        }
    }
    tree(partial)
}

/// Largest element; negative infinity for an empty row. NaN is ignored.
#[inline(always)]
pub(crate) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], block[lane]);
        }
    }
    let rest = rest.iter().copied().fold(f32::NEG_INFINITY, larger);
    lanes.into_iter().fold(rest, larger)
}

/// `ln sum_i e^(x_i)`, relative to the largest element, so that nothing overflows. NaN if any
/// element is NaN.
#[inline(always)]
pub(crate) fn log_sum_exp(row: &[f32]) -> f32 {
    let largest = max(row);
    let total = sum_over(
        [row],
        #[inline(always)]
        |[x]| exp(x - largest),
    );
    if total.is_nan() {
        return total;
    }
    // The sum holds e^0 and is at least 1.
    largest + ln(total)
}

/// `out = [out +]` the sum of the partial results of all chunks, each as long as `out`, in order.
pub(crate) fn add_chunks(pool: &Pool, out: Output<&mut [f32]>, partials: &[f32]) {
    /// Elements of the result that are worth a chunk of their own.
    const EACH: usize = 1 << 11;
    let Output { values, add } = out;
    let len = values.len();
    pool.run(len, EACH, Rows(values, 1), |range, out| {
        vectorised(
            #[inline(always)]
            || {
                if !add {
                    out.0.fill(0.0);
                }
                for partial in partials.chunks_exact(len) {
                    add_to(out.0, &partial[range.clone()]);
                }
            },
        );
    });
}

/// Adds a row to another.
#[inline(always)]
pub(crate) fn add_to(total: &mut [f32], row: &[f32]) {
    for (total, x) in total.iter_mut().zip(row) {
        *total += x;
    }
}

/// Adds a row times a number to another.
#[inline(always)]
pub(crate) fn add_scaled(total: &mut [f32], factor: f32, row: &[f32]) {
    for (total, x) in total.iter_mut().zip(row) {
        *total = factor.mul_add(*x, *total);
    }
}

/// Sum of the parts, in order and in f64.
pub(crate) fn total(parts: &[f32]) -> f64 {
    parts.iter().map(|&part| f64::from(part)).sum()
}

/// A number of f64, rounded once.
#[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
pub(crate) fn rounded(number: f64) -> f32 {
    number as f32
}

/// [`total`] over a count.
pub(crate) fn mean(parts: &[f32], count: usize) -> f32 {
    rounded(total(parts) / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::vectorised;

    #[test]
    fn every_column_counts_once() {
        for len in [0, 1, 31, 32, 33, 100, 128, 161, 300] {
            let row: Vec<f32> = (0..len).map(|i| i as f32).collect();
            // Whole numbers: exact.
            let expected = row.iter().fold(0.0, |total, x| total + 3.0 * x);
            let total = vectorised(|| sum_over([&row, &row], |[a, b]| 2.0 * a + b));
            assert_eq!(total.to_bits(), expected.to_bits(), "{len}");
            let mut doubled = row.clone();
            let total =
                vectorised(|| replace_and_sum(&mut doubled, &row, |a, b| (a + b, 2.0 * a + b)));
            assert_eq!(total.to_bits(), expected.to_bits(), "{len}");
            assert!(
                doubled
                    .iter()
                    .zip(&row)
                    .all(|(a, b)| a.to_bits() == (2.0 * b).to_bits())
            );
            let last = row.last().copied().unwrap_or(f32::NEG_INFINITY);
            assert_eq!(max(&row).to_bits(), last.to_bits(), "{len}");
        }
    }

    /// Each of 32 lanes has every 32nd column.
    fn sum(row: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        for (column, x) in row.iter().enumerate() {
            lanes[column % LANES] += x;
        }
        tree(lanes)
    }

    #[test]
    fn sums_do_not_depend_on_vectors() {
        let values: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.01).collect();
        for len in [0, 1, 31, 32, 33, 1000] {
            let plain = sum_over([&values[..len]], |[x]| x);
            let wide = vectorised(|| sum_over([&values[..len]], |[x]| x));
            assert_eq!(plain.to_bits(), wide.to_bits());
            let exact: f64 = values[..len].iter().map(|&x| f64::from(x)).sum();
            assert!((f64::from(plain) - exact).abs() <= 1e-6 * exact);
        }
    }

    #[test]
    fn columns_are_added_in_the_order_of_other_sums() {
        for len in [1, 31, 100, 128, 161, 1000] {
            let row: Vec<f32> = (0..len).map(|i| ((i * 37) % 101) as f32 * 0.01).collect();
            let expected = sum(&row);
            let total = vectorised(|| sum_over([&row], |[x]| x));
            assert_eq!(total.to_bits(), expected.to_bits(), "{len}");
            let kept = &mut row.clone();
            let total = vectorised(|| replace_and_sum(kept, &row, |x, _| (x, x)));
            assert_eq!(total.to_bits(), expected.to_bits(), "{len}");
        }
    }

    #[test]
    fn chunks_are_added_in_order() {
        // The last chunk is partial. Neighbors of 1e8 are 8 apart, so adding 3 is lost and adding 5
        // is not: the order shows.
        let len = 5000;
        let partials: Vec<f32> = [3.0, 1e8, 3.0].iter().flat_map(|&x| vec![x; len]).collect();
        for (add, expected) in [(false, 1e8f32), (true, 1e8 + 8.0)] {
            let mut out = vec![2.0; len];
            let to = Output::new(&mut out[..], add);
            add_chunks(&Pool::new(2).unwrap(), to, &partials);
            assert!(out.iter().all(|x| x.to_bits() == expected.to_bits()));
        }
        let mut out = [2.0];
        add_chunks(&Pool::single(), Output::add_to(&mut out), &[1.0, 0.5]);
        assert_eq!(out[0].to_bits(), 3.5f32.to_bits());
    }

    #[test]
    fn large_exponents_do_not_overflow() {
        // By hand: ln(2 e^1000) and ln(1).
        for (row, expected) in [(&[1000.0, 1000.0][..], 1_000.693_1), (&[0.0], 0.0)] {
            let found = log_sum_exp(row);
            // The last place of 1000.
            assert!((found - expected).abs() <= 6.2e-5, "{found} {expected}");
        }
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
    }
}
