//! Products of listed rows, written to listed rows.
//!
//! A bf16 product reads a row once, to pack it, and does so where the row is. Other products take
//! factors whose rows are adjacent: rows are copied for them, which costs little next to a product
//! of many columns.

use super::gemm::{self, Product};
use super::output::Output;
use super::pool::{Pool, Rows};
use super::routed_rows::{clear_others, gather, scatter};
use super::shape::{Matrix, Shape};
use super::sparse;
use crate::ops::grain_rows;

/// `out = [out +]` a product of any number of rows and terms, including none. Rows of `out` that it
/// is not written to are 0, or stay as they are if it is added.
///
/// - `out`: all rows, f32 `[.., n]`
/// - `scratch`: room for copies of all listed rows, and for the product
pub(crate) fn product(
    pool: &Pool,
    product: &Product<'_>,
    mut out: Output<&mut [f32]>,
    scratch: &mut [f32],
) {
    let &Product { a, b, to, .. } = product;
    let Shape { m, n, k } = product.shape;
    if m == 0 || k == 0 {
        if !out.add {
            out.values.fill(0.0);
        }
        return;
    }
    if !product.has_no_lists() && product.takes_lists() && !sparse::pays(product) {
        if let Some(to) = to.filter(|_| !out.add) {
            let (rows, values) = (out.values.len() / n, Rows(&mut *out.values, n));
            pool.run(rows, grain_rows(rows, n), values, |range, part| {
                clear_others(to, &range, part.0, n);
            });
        }
        return gemm::product(pool, product, out, scratch);
    }
    let (a, scratch) = adjacent(pool, a, if a.transposed { m } else { k }, scratch);
    let (b, scratch) = adjacent(pool, b, if b.transposed { k } else { n }, scratch);
    let of_all = Product {
        a,
        b,
        to: None,
        ..*product
    };
    let (own, scratch) = scratch.split_at_mut(to.map_or(0, |to| to.len() * n));
    let mut whole = match to {
        Some(_) => Output::overwrite(&mut *own),
        None => out.reborrow(),
    };
    if !sparse::product(pool, &of_all, whole.reborrow()) {
        gemm::product(pool, &of_all, whole, scratch);
    }
    if let Some(to) = to {
        scatter(pool, out.values.len() / n, to, own, out, n);
    }
}

/// A matrix without a list, which `room` holds if it has one, and the rest of `room`.
fn adjacent<'a>(
    pool: &Pool,
    matrix: Matrix<'a>,
    columns: usize,
    room: &'a mut [f32],
) -> (Matrix<'a>, &'a mut [f32]) {
    let Some(listed) = matrix.listed else {
        return (matrix, room);
    };
    let (copy, room) = room.split_at_mut(listed.len() * columns);
    let rows = matrix.values.len() / columns;
    gather(pool, rows, listed, matrix.values, &mut *copy, columns);
    (Matrix::of(copy, matrix.transposed), room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::Precision;

    /// Small whole numbers: every product and sum is exact, in bf16 too.
    fn numbers(len: usize, times: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * times) % 7) as f32 - 3.0).collect()
    }

    /// The listed rows of a matrix of so many columns.
    fn rows(values: &[f32], listed: &[u32], columns: usize) -> Vec<f32> {
        let row = |&row: &u32| &values[row as usize * columns..][..columns];
        listed.iter().flat_map(row).copied().collect()
    }

    fn listed<'a>(values: &'a [f32], listed: &'a [u32], transposed: bool) -> Matrix<'a> {
        Matrix {
            listed: Some(listed),
            ..Matrix::of(values, transposed)
        }
    }

    /// `before`, overwritten by a product or with one added to it.
    fn multiplied(of: &Product<'_>, before: &[f32], add: bool) -> Vec<f32> {
        let Shape { m, n, k } = of.shape;
        let stored = [of.a.transposed, of.b.transposed];
        let room = m * k + k * n + m * n + of.shape.most_scratch(stored);
        let (mut out, mut scratch) = (before.to_vec(), vec![f32::NAN; room]);
        let of_out = Output::new(&mut out[..], add);
        product(&Pool::single(), of, of_out, &mut scratch);
        out
    }

    // Products of copies of the rows, for long, thin and sparse factors, and for those of one column.
    #[test]
    fn listed_rows_are_multiplied_where_they_are() {
        for (all, n, k) in [
            (200, 70, 90),
            (150, 40, 700),
            (300, 30, 9),
            (130, 1, 40),
            (90, 50, 1),
            (1, 20, 20),
        ] {
            let [even, odd] = [0, 1].map(|first| (first..all).step_by(2).collect::<Vec<u32>>());
            let len = |columns| all as usize * columns;
            let (x, y, b) = (numbers(len(k), 3), numbers(len(n), 5), numbers(k * n, 2));
            let mut sparse = vec![0.0; x.len()];
            sparse
                .iter_mut()
                .zip(&x)
                .step_by(100)
                .for_each(|(to, x)| *to = *x);
            for (precision, add, x) in [
                (Precision::F32, false, &x),
                (Precision::Bf16, false, &x),
                (Precision::Bf16, true, &x),
                (Precision::Bf16, true, &sparse),
            ] {
                let of = |[m, n, k]: [usize; 3], a, b, to| Product {
                    precision,
                    shape: Shape { m, n, k },
                    alpha: 0.5,
                    a,
                    b,
                    packed: None,
                    to,
                };
                let (b, few) = (Matrix::plain(&b), all as usize / 2);
                let (own_x, own_y) = (rows(x, &even[..few], k), rows(&y, &odd, n));
                let shape = [few, n, k];
                let product = of(shape, listed(x, &even[..few], false), b, Some(&odd[..]));
                let found = multiplied(&product, &y, add);
                let expected = multiplied(&of(shape, Matrix::plain(&own_x), b, None), &own_y, add);
                assert!(
                    rows(&found, &odd, n) == expected,
                    "{shape:?} {precision:?} {add}"
                );
                let others = if add {
                    rows(&y, &even, n)
                } else {
                    vec![0.0; even.len() * n]
                };
                assert!(
                    rows(&found, &even, n) == others,
                    "{shape:?} {precision:?} {add}"
                );
                let shape = [k, n, few];
                let sums = |a, b| multiplied(&of(shape, a, b, None), &numbers(k * n, 4), add);
                let found = sums(listed(x, &even[..few], true), listed(&y, &odd, false));
                let expected = sums(Matrix::of(&own_x, true), Matrix::plain(&own_y));
                assert!(found == expected, "{shape:?} {precision:?} {add}");
            }
        }
    }
}
