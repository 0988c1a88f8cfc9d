//! Products with a factor that is mostly zeros: data with few active features, or an activation
//! that is rarely positive.
//!
//! Only nonzero elements are multiplied. Each product tests whether that pays: it scans the factor
//! until it has seen too many nonzeros, which in a dense factor is soon. A zero times infinity
//! counts as zero, as in other libraries for sparse matrices.

use super::bf16::in_tiles;
use super::gemm;
use super::math::vectorised;
use super::output::Output;
use super::pool::{Pool, Rows};
use super::reduce::add_scaled;
use super::shape::Shape;
use crate::ops::grain_rows;

/// A factor is sparse if at most one in so many of its elements is nonzero.
const RARITY: usize = 16;
/// A factor is sparse if at most one in so many of its elements is nonzero, and dense ones are
/// multiplied [in tiles](super::bf16::in_tiles): those take less time.
const RARITY_IN_TILES: usize = 64;
/// Fewest columns of the other factor, and fewest elements of the sparse one, that are worth a
/// scan.
const FEWEST_COLUMNS: usize = 32;
const FEWEST_ELEMENTS: usize = 1 << 12;
/// Chunks of a transposed factor; each scans all of its rows.
const CHUNKS: usize = 8;
/// Elements that are tested together.
const BLOCK: usize = 16;
/// Elements that are counted together.
const AT_ONCE: usize = BLOCK * BLOCK;

/// Whether `a` is mostly zeros and `b` is stored `[k, n]`.
pub(crate) fn pays(product: &gemm::Product<'_>) -> bool {
    let gemm::Product { shape, a, b, .. } = *product;
    let Shape { m, n, k } = shape;
    let rarity = match in_tiles(product.precision) {
        true => RARITY_IN_TILES,
        false => RARITY,
    };
    let most = m * k / rarity;
    !b.transposed
        && n >= FEWEST_COLUMNS
        && m * k >= FEWEST_ELEMENTS
        && vectorised(
            #[inline(always)]
            || match a.listed {
                None => has_few(a.values.chunks(AT_ONCE), most),
                Some(listed) => {
                    let columns = if a.transposed { m } else { k };
                    let row =
                        |&row: &u32| a.values[row as usize * columns..][..columns].chunks(AT_ONCE);
                    has_few(listed.iter().flat_map(row), most)
                }
            },
        )
}

/// `out = [out +]` a product in f32, if that [pays]. Returns whether it did; otherwise `out` is
/// unchanged.
///
/// # Panics
///
/// When rows are listed.
pub(crate) fn product(
    pool: &Pool,
    product: &gemm::Product<'_>,
    Output { values, add }: Output<&mut [f32]>,
) -> bool {
    if !pays(product) {
        return false;
    }
    assert!(product.has_no_lists(), "adjacent rows");
    let gemm::Product {
        shape, alpha, a, b, ..
    } = *product;
    let Shape { m, n, k } = shape;
    let chunk = if a.transposed {
        m.div_ceil(CHUNKS).max(BLOCK)
    } else {
        grain_rows(m, n)
    };
    pool.run(m, chunk, Rows(values, n), |rows, out| {
        vectorised(
            #[inline(always)]
            || {
                if !add {
                    out.0.fill(0.0);
                }
                if a.transposed {
                    // A row of `a` `[k, m]` holds the weights of that row of `b` in all rows of the
                    // result.
                    for (a, b) in a.values.chunks_exact(m).zip(b.values.chunks_exact(n)) {
                        each(
                            &a[rows.clone()],
                            #[inline(always)]
                            |row, a| add_scaled(&mut out.0[row * n..][..n], alpha * a, b),
                        );
                    }
                } else {
                    let a = a.values[rows.start * k..rows.end * k].chunks_exact(k);
                    for (a, out) in a.zip(out.0.chunks_exact_mut(n)) {
                        each(
                            a,
                            #[inline(always)]
                            |i, a| add_scaled(out, alpha * a, &b.values[i * n..][..n]),
                        );
                    }
                }
            },
        );
    });
    true
}

/// Whether at most so many elements of parts of a matrix differ from zero.
#[inline(always)]
fn has_few<'a>(parts: impl Iterator<Item = &'a [f32]>, most: usize) -> bool {
    let mut found = 0;
    for part in parts {
        found += part.iter().map(|x| u32::from(*x != 0.0)).sum::<u32>() as usize;
        if found > most {
            return false;
        }
    }
    true
}

/// Calls `work` with the index and value of every nonzero element, in order.
#[inline(always)]
fn each(values: &[f32], mut work: impl FnMut(usize, f32)) {
    for (block, values) in values.chunks(BLOCK).enumerate() {
        // The shift drops the sign, so that -0 counts as zero.
        let bits = values.iter().fold(0, |bits, x| bits | (x.to_bits() << 1));
        if bits != 0 {
            for (at, &value) in values.iter().enumerate() {
                if value != 0.0 {
                    work(block * BLOCK + at, value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::shape::Matrix;
    use crate::precision::Precision;

    /// Integers between -2 and 2, of which one in `rarity` is not zero.
    fn numbers(len: usize, rarity: usize) -> Vec<f32> {
        let value = |i: usize| match (i * 7919) % rarity {
            0 => [1.0, -2.0, 2.0, -1.0][i % 4],
            _ => 0.0,
        };
        (0..len).map(value).collect()
    }

    fn check(shape: Shape, rarity: usize, transposed: bool, add: bool) -> bool {
        check_in(Precision::F32, shape, rarity, transposed, add)
    }

    /// Whether the sparse product was made. Integers: any order of sums gives the same bits.
    fn check_in(
        precision: Precision,
        shape: Shape,
        rarity: usize,
        transposed: bool,
        add: bool,
    ) -> bool {
        let Shape { m, n, k } = shape;
        let (a, b) = (numbers(m * k, rarity), numbers(k * n, 2));
        let at = |i: usize, j: usize| {
            if transposed {
                a[j * m + i]
            } else {
                a[i * k + j]
            }
        };
        let before = if add { 1.0 } else { 0.0 };
        let expected: Vec<f32> = (0..m * n)
            .map(|i| before + 2.0 * (0..k).map(|l| at(i / n, l) * b[l * n + i % n]).sum::<f32>())
            .collect();
        let done = [1, 2, 3].map(|threads| {
            let pool = Pool::new(threads).unwrap();
            let mut out = vec![1.0; m * n];
            let of = gemm::Product {
                precision,
                shape,
                alpha: 2.0,
                a: Matrix::of(&a, transposed),
                b: Matrix::plain(&b),
                packed: None,
                to: None,
            };
            let done = pool.enter(|| {
                product(
                    &pool,
                    &of,
                    Output {
                        values: &mut out[..],
                        add,
                    },
                )
            });
            let untouched = out.iter().all(|x| x.to_bits() == 1f32.to_bits());
            assert!(if done { out == expected } else { untouched }, "{shape:?}");
            done
        });
        assert!(done.iter().all(|&other| other == done[0]));
        done[0]
    }

    #[test]
    fn sparse_factors_give_the_dense_product() {
        for (m, n, k) in [
            (1000, 70, 33),
            (33, 70, 1000),
            (64, 2000, 64),
            (100, 400, 300),
        ] {
            for (transposed, add) in [(false, false), (false, true), (true, false), (true, true)] {
                assert!(check(Shape { m, n, k }, 17, transposed, add));
            }
        }
    }

    #[test]
    fn dense_and_small_factors_are_not_multiplied() {
        let shape = Shape {
            m: 100,
            n: 40,
            k: 100,
        };
        assert!(!check(shape, 15, false, true));
        assert!(!check(shape, 3, true, false));
        assert!(!check(Shape { n: 31, ..shape }, 17, false, true));
        assert!(!check(Shape { m: 10, ..shape }, 17, true, true));
    }

    #[test]
    fn a_factor_multiplied_in_tiles_is_sparse_with_fewer_numbers() {
        let shape = Shape::of([1000, 70, 33]);
        let made = |rarity| check_in(Precision::Bf16, shape, rarity, false, true);
        assert_eq!([17, 65].map(made), [!in_tiles(Precision::Bf16), true]);
    }

    #[test]
    fn nan_and_the_smallest_numbers_count_as_nonzero() {
        let mut values = vec![0.0; 100];
        values[3] = -0.0;
        for (place, value) in [(15, f32::NAN), (16, 1e-45), (99, f32::NEG_INFINITY)] {
            values[place] = value;
        }
        let mut found = Vec::new();
        each(&values, |place, value| found.push((place, value.to_bits())));
        let expected = [15, 16, 99].map(|place: usize| (place, values[place].to_bits()));
        assert_eq!(found, expected);
    }
}
