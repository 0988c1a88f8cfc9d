//! Matrix products by the `gemm-f32` crate, or as [`thin`](super::thin) ones, [cut](super::cut)
//! into parts for threads.
#![expect(unsafe_code, reason = "the gemm-f32 crate takes pointers and strides")]

use std::ops::Range;
use std::sync::Mutex;

use super::bf16::{self, Factor, PANELS, Packed, Panel, Unit};
use super::cut::{Cut, STEP_COLUMNS, STEP_ROWS, STEP_SUMS, part};
use super::math::on_vectors_of;
use super::output::Output;
use super::pool::{PerChunk, Pool, Rows, chunks};
use super::reduce::add_chunks;
use super::shape::{Matrix, Shape, Strided};
use super::thin::{self, Narrow, Pack};
use super::tile::{RawTile, Tile};
use crate::precision::Precision;

/// `alpha a b`, with `a` f32 `[m, k]` and `b` `[k, n]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'a> {
    /// Precision of the factors. In bf16 they are rounded if the product is cut into blocks; thin
    /// products stay in f32, unless they are multiplied [in tiles](bf16::in_tiles).
    pub(crate) precision: Precision,
    pub(crate) shape: Shape,
    pub(crate) alpha: f32,
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    /// `b` as it is [packed](bf16::pack) for bf16, if it is. Its values may then be missing.
    pub(crate) packed: Option<&'a Panel>,
    /// The different rows of `out` that it is written to, if those are not all.
    pub(crate) to: Option<&'a [u32]>,
}

/// The right factor of a bf16 product, packed for all of its blocks. A product that finds it taken
/// packs a part for each block, with the same bits.
static RIGHT: Mutex<Panel> = Mutex::new(Panel::none());

/// `out = [out +]` a product, with `out` f32 `[m, n]`. Rows may be listed if it
/// [takes lists](Product::takes_lists).
pub(crate) fn product(
    pool: &Pool,
    product: &Product<'_>,
    mut out: Output<&mut [f32]>,
    scratch: &mut [f32],
) {
    let Product {
        shape,
        alpha,
        a,
        b,
        packed,
        precision,
        to,
    } = *product;
    let Shape { m, n, k } = shape;
    let rows = out.values.len() / n;
    let fits = match to {
        None => rows == m,
        Some(to) => to.len() == m && to.iter().all(|&row| (row as usize) < rows),
    };
    assert!(
        a.holds(m, k) && out.values.len() == rows * n && fits,
        "{shape:?}: {} to {}",
        a.values.len(),
        out.values.len()
    );
    // A packed matrix need not be given unpacked too.
    assert!(
        b.holds(k, n) || packed.is_some(),
        "{shape:?}: {}",
        b.values.len()
    );
    let transposed = [a.transposed, b.transposed];
    let packs = precision == Precision::Bf16 && packed.is_none();
    let cut = shape.cut_for(pool.threads(), transposed, bf16::in_tiles(precision), packs);
    assert!(
        product.has_no_lists() || product.takes_lists(),
        "{shape:?} with lists: {cut:?}"
    );
    match cut {
        Cut::Blocks([down, across, along]) => {
            let partials = &mut scratch[..if along > 1 { along * m * n } else { 0 }];
            let whole = if along > 1 {
                Output::overwrite(&mut *partials)
            } else {
                out.reborrow()
            };
            let add = whole.add;
            let mut room = match down > 1 && product.packs_right() {
                true => RIGHT.try_lock().ok(),
                false => None,
            };
            let own = room.as_mut().map(|panel| {
                panel.pack(pool, product.right(0, 0).t(), n, k);
                &**panel
            });
            let product = Product {
                packed: packed.or(own),
                ..*product
            };
            let tiles = RawTile {
                start: whole.values.as_mut_ptr(),
                stride: n,
                listed: to,
            };
            pool.run(down * across * along, 1, tiles, |numbers, whole| {
                for number in numbers {
                    let (tile, number) = (number / along, number % along);
                    let rows = part(tile / across, down, m, STEP_ROWS);
                    let columns = part(tile % across, across, n, STEP_COLUMNS);
                    let sums = part(number, along, k, STEP_SUMS);
                    if rows.is_empty() || columns.is_empty() {
                        continue;
                    }
                    let out = Output::new(whole.at(number * m, 0), add);
                    // SAFETY: each chunk writes its own tile of its own result, whole and in
                    // bounds.
                    unsafe { product.write(rows, columns, sums, out) };
                }
            });
            if along > 1 {
                add_chunks(pool, out, partials);
            }
        }
        Cut::Narrow(each) => {
            let panels = &mut *scratch;
            let pack = Pack {
                b: b.values,
                transposed: b.transposed,
                k,
                n,
                panels: &mut *panels,
            };
            on_vectors_of(n, pack);
            let Output { values, add } = out;
            pool.run(m, each, Rows(values, n), |rows, out| {
                let rows = Narrow {
                    a: &a.values[rows.start * k..rows.end * k],
                    panels,
                    k,
                    n,
                    alpha,
                    out: out.0,
                    add,
                };
                on_vectors_of(n, rows);
            });
        }
        Cut::ThinSums(each) => {
            let partials = PerChunk(&mut scratch[..chunks(k, each) * m * n], m * n);
            pool.run(k, each, partials, |rows, out| {
                let sums = thin::Sums {
                    a: &a.values[rows.start * m..rows.end * m],
                    b: &b.values[rows.start * n..rows.end * n],
                    m,
                    n,
                    alpha,
                    out: out.0,
                };
                on_vectors_of(m.max(n), sums);
            });
            add_chunks(pool, out, &scratch[..chunks(k, each) * m * n]);
        }
    }
}

impl<'a> Product<'a> {
    /// Whether its right factor is packed before the product, once for all blocks.
    fn packs_right(&self) -> bool {
        let Shape { n, k, .. } = self.shape;
        let own = self.precision == Precision::Bf16 && self.packed.is_none();
        own && Panel::bytes(n, k) <= PANELS
    }

    /// The right factor from a row and a column on.
    fn right(&self, from_row: usize, from_column: usize) -> Strided<'a> {
        let Shape { n, k, .. } = self.shape;
        let columns = if self.b.transposed { k } else { n };
        self.b.elements(columns).part(from_row, from_column)
    }

    /// Whether no rows are listed.
    pub(super) fn has_no_lists(&self) -> bool {
        let lists = [self.a.listed, self.b.listed, self.to];
        lists.iter().all(Option::is_none)
    }

    /// Whether it is multiplied from and to listed rows where they are: those of bf16 products are
    /// packed.
    pub(super) fn takes_lists(&self) -> bool {
        let Shape { m, n, k } = self.shape;
        let stored = [self.a.transposed, self.b.transposed];
        let cut = self.shape.cut(stored, bf16::in_tiles(self.precision));
        let has_partials = |along| along > 1 && self.to.is_some();
        // Rows of one column are adjacent.
        self.precision == Precision::Bf16
            && m.min(n).min(k) > 1
            && matches!(cut, Cut::Blocks([.., along]) if !has_partials(along))
    }

    /// # Safety
    ///
    /// `out` must be writable for every row and column of the block, and not be accessed by others
    /// meanwhile.
    unsafe fn write(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        sums: Range<usize>,
        mut out: Output<RawTile<'_>>,
    ) {
        let Shape { m, k, .. } = self.shape;
        let columns_of_a = if self.a.transposed { m } else { k };
        let a = self.a.elements(columns_of_a).part(rows.start, sums.start);
        let shape = Shape {
            m: rows.len(),
            n: columns.len(),
            k: sums.len(),
        };
        out.values = out.values.at(rows.start, columns.start);
        let b = if let Some(panel) = self.packed {
            Factor::Packed(Packed {
                panel,
                column: columns.start,
                term: sums.start,
            })
        } else {
            Factor::Matrix(self.right(sums.start, columns.start))
        };
        // SAFETY: `product` checked that the operands have m*k and k*n elements, and the ranges lie
        // inside the shape; the caller vouches for `out`.
        unsafe { multiply(self.precision, shape, self.alpha, a, b, out) };
    }
}

/// `out = [out +] alpha a b` on the caller's thread, in the first rows and columns of `out`. A packed
/// factor is multiplied in bf16.
pub(crate) fn block(
    precision: Precision,
    shape: Shape,
    alpha: f32,
    a: Strided<'_>,
    b: Factor<'_>,
    mut out: Output<Tile<'_>>,
) {
    let Shape { m, n, k } = shape;
    assert!(m > 0 && n > 0 && k > 0, "{shape:?}");
    assert!(a.holds(m, k) && b.holds(k, n), "{shape:?}");
    let out = Output::new(out.values.raw(m, n), out.add);
    // SAFETY: the factors lie inside their slices, and the product inside its tile.
    unsafe { multiply(precision, shape, alpha, a, b, out) };
}

/// # Safety
///
/// The operands must hold `m x k` and `k x n` elements, and `out` must be writable for all `m x n`
/// elements, each at an address of its own that nothing else accesses meanwhile.
unsafe fn multiply(
    precision: Precision,
    shape: Shape,
    alpha: f32,
    a: Strided<'_>,
    b: Factor<'_>,
    out: Output<RawTile<'_>>,
) {
    let b = match b {
        Factor::Matrix(b) if precision != Precision::Bf16 => b,
        // SAFETY: the caller's promise.
        b => return unsafe { bf16::multiply(Unit::best(), shape, alpha, a, b, out) },
    };
    let Shape { m, n, k } = shape;
    // `product` and `block` checked that no rows are listed.
    let RawTile { start, stride, .. } = out.values;
    let signed = |stride: usize| isize::try_from(stride).expect("a matrix fits in memory");
    // The crate writes a result by columns: rows of `out` are columns of the transposed product.
    // A left and a right factor that are both stored transposed are read in their own order.
    let both_transposed = a.column > 1 && b.column > 1;
    let ((m, n), (a, b), (out_row, out_column)) = if stride > 1 && !both_transposed {
        ((n, m), (b.t(), a.t()), (1, stride))
    } else {
        ((m, n), (a, b), (stride, 1))
    };
    #[cfg(test)]
    let _inside = tests::Inside::enter();
    // SAFETY: the caller's promise.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            start,
            signed(out_column),
            signed(out_row),
            out.add,
            a.values.as_ptr(),
            signed(a.column),
            signed(a.row),
            b.values.as_ptr(),
            signed(b.column),
            signed(b.row),
            1.0,
            alpha,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::ops::oracle::random;

    thread_local! {
        /// Whether this thread is inside the gemm-f32 crate, which allocates its own packing
        /// buffers.
        pub(crate) static INSIDE: Cell<bool> = const { Cell::new(false) };
    }

    pub(crate) struct Inside;

    impl Inside {
        pub(crate) fn enter() -> Self {
            INSIDE.set(true);
            Self
        }
    }

    impl Drop for Inside {
        fn drop(&mut self) {
            INSIDE.set(false);
        }
    }

    fn check(shape: Shape, a_transposed: bool, b_transposed: bool) {
        let Shape { m, n, k } = shape;
        // Small integers: every product and sum is exact, so any order of sums gives the same bits.
        let a: Vec<f32> = (0..m * k).map(|i| ((i * 7) % 5) as f32 - 2.0).collect();
        let b: Vec<f32> = (0..k * n).map(|i| ((i * 11) % 7) as f32 - 3.0).collect();
        let at = |i: usize, j: usize| {
            if a_transposed {
                a[j * m + i]
            } else {
                a[i * k + j]
            }
        };
        let bt = |i: usize, j: usize| {
            if b_transposed {
                b[j * k + i]
            } else {
                b[i * n + j]
            }
        };
        let expected: Vec<f32> = (0..m * n)
            .map(|i| 1.0 + 2.0 * (0..k).map(|l| at(i / n, l) * bt(l, i % n)).sum::<f32>())
            .collect();
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let mut out = vec![1.0; m * n];
            let mut scratch = vec![f32::NAN; shape.scratch([a_transposed, b_transposed])];
            let of = Product {
                precision: Precision::F32,
                shape,
                alpha: 2.0,
                a: Matrix::of(&a, a_transposed),
                b: Matrix::of(&b, b_transposed),
                packed: None,
                to: None,
            };
            pool.enter(|| product(&pool, &of, Output::add_to(&mut out), &mut scratch));
            assert!(
                out == expected,
                "{shape:?} {a_transposed} {b_transposed} {threads}"
            );
        }
    }

    #[test]
    fn blocks_leave_their_surroundings_alone() {
        // By hand: columns 1 and 2 of 3 of `left`, times the transpose of [[1, 2], [3, 4]].
        let left = [9.0, 1.0, 2.0, 9.0, 3.0, 4.0];
        let right = [1.0, 2.0, 3.0, 4.0];
        let shape = Shape { m: 2, n: 2, k: 2 };
        let a = Strided::rows(&left[1..], 3);
        let b = Factor::Matrix(Strided::rows(&right, 2).t());
        let mut out = [1.0; 8];
        let tile = Tile::of(&mut out[1..], 2, 4);
        block(Precision::F32, shape, 1.0, a, b, Output::overwrite(tile));
        assert_eq!(out.to_vec(), [1.0, 5.0, 11.0, 1.0, 1.0, 11.0, 25.0, 1.0]);
        let tile = Tile::of(&mut out[1..], 2, 4);
        block(Precision::F32, shape, -1.0, a, b, Output::add_to(tile));
        assert_eq!(out.to_vec(), [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    #[should_panic(expected = "Shape { m: 2, n: 2, k: 2 }")]
    fn a_block_beyond_its_matrix_panics() {
        let [a, b] = [&[1.0; 4][..], &[1.0; 3]].map(|values| Strided::rows(values, 2));
        block(
            Precision::F32,
            Shape { m: 2, n: 2, k: 2 },
            1.0,
            a,
            Factor::Matrix(b),
            Output::overwrite(Tile::whole(&mut [0.0; 4], 2)),
        );
    }

    #[test]
    #[should_panic(expected = "[2, 2] of [2, 1]")]
    fn a_product_beyond_its_tile_panics() {
        let [a, b] = [Strided::rows(&[1.0; 4], 2); 2];
        let shape = Shape { m: 2, n: 2, k: 2 };
        block(
            Precision::F32,
            shape,
            1.0,
            a,
            Factor::Matrix(b),
            Output::overwrite(Tile::of(&mut [0.0; 4], 1, 2)),
        );
    }

    // Sums longer than 512 terms, which have several parts.
    #[test]
    fn no_bit_of_a_product_depends_on_the_threads() {
        let shapes = [
            (2048, 400, 256),
            (700, 1100, 1300),
            (200, 260, 1030),
            (96, 1200, 600),
            (1500, 40, 2000),
            (2000, 70, 40),
            (60, 60, 9000),
        ];
        let layouts = [[false, false], [false, true], [true, false], [true, true]];
        let precisions = [Precision::F32, Precision::Bf16];
        for (m, n, k) in shapes {
            let [a, b] = [random(&[m, k], 1), random(&[k, n], 2)];
            for (transposed, precision) in layouts
                .into_iter()
                .flat_map(|layout| precisions.map(|precision| (layout, precision)))
            {
                let product_by = |threads| {
                    let shape = Shape { m, n, k };
                    let [a, b] = [(&a, transposed[0]), (&b, transposed[1])]
                        .map(|(x, transposed)| Matrix::of(&x.values, transposed));
                    let mut out = vec![0.0; m * n];
                    let mut scratch = vec![f32::NAN; shape.scratch(transposed)];
                    let of = Product {
                        precision,
                        shape,
                        alpha: 1.0,
                        a,
                        b,
                        packed: None,
                        to: None,
                    };
                    let pool = Pool::planned(threads);
                    product(&pool, &of, Output::overwrite(&mut out), &mut scratch);
                    out
                };
                let alone = product_by(1);
                // Another product has the room where the right factor is packed at once.
                let taken = RIGHT.lock().unwrap();
                assert!(product_by(1) == alone, "{m} {n} {k} {transposed:?}");
                drop(taken);
                for threads in [6, 16, 64, 1000] {
                    let same = product_by(threads) == alone;
                    assert!(same, "{m} {n} {k} {transposed:?} {precision:?} {threads}");
                }
            }
        }
    }

    #[test]
    fn all_cuts_give_the_product() {
        let shapes = [
            (3, 4, 5),
            (1000, 700, 40),
            (300, 200, 900),
            (40, 1000, 70),
            (12, 20, 9000),
            (1000, 70, 40),
            (250, 19, 3),
            (5, 28, 700),
            (1, 7, 3),
            (7, 1, 300),
        ];
        for (m, n, k) in shapes {
            for (a, b) in [(false, false), (true, false), (false, true), (true, true)] {
                check(Shape { m, n, k }, a, b);
            }
        }
    }
}
