//! Products in f32 of a long matrix with a small one, and small products of two long ones: the
//! shapes of toy models, for which packing both operands costs more than multiplying them.
//!
//! ```text
//! narrow   out[i, j] = sum_l a[i, l] b[l, j]    a row by row, b small, packed once in panels
//! sums     out[i, j] = sum_l a[l, i] b[l, j]    both row by row, out small and kept in registers
//! ```
//!
//! A tile of the result, four rows by two vectors or eight by one, stays in registers for its whole
//! sum, which is made in order: a result does not depend on its neighbors.

use pulp::{Simd, WithSimd};

use super::output::Output;

/// Vectors of a row of a tile, at most.
const VECTORS: usize = 2;

/// Lanes of the longest vector.
const MOST_LANES: usize = 16;

/// f32s that hold the panels of `b`.
pub(super) fn panels_len(k: usize, n: usize) -> usize {
    k * (n + MOST_LANES)
}

/// Vectors in the panel that begins at column `start`.
#[inline(always)]
fn panel_vectors<S: Simd>(n: usize, start: usize) -> usize {
    (n - start).div_ceil(S::F32_LANES).min(VECTORS)
}

/// Packs `b`, `[k, n]` or stored transposed, so that a panel's rows follow each other; columns past
/// the end are zeros.
pub(super) struct Pack<'a> {
    pub(super) b: &'a [f32],
    pub(super) transposed: bool,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) panels: &'a mut [f32],
}

impl WithSimd for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self {
            b,
            transposed,
            k,
            n,
            panels,
        } = self;
        let (mut start, mut rest) = (0, panels);
        while start < n {
            let width = panel_vectors::<S>(n, start) * S::F32_LANES;
            let (panel, after) = rest.split_at_mut(k * width);
            for (l, row) in panel.chunks_exact_mut(width).enumerate() {
                for (j, to) in (start..).zip(row) {
                    *to = match (j < n, transposed) {
                        (false, _) => 0.0,
                        (true, false) => b[l * n + j],
                        (true, true) => b[j * k + l],
                    };
                }
            }
            (start, rest) = (start + width, after);
        }
    }
}

/// `out = [out +] alpha a b` for some rows of `a` and `out`.
pub(super) struct Narrow<'a> {
    pub(super) a: &'a [f32],
    pub(super) panels: &'a [f32],
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) alpha: f32,
    pub(super) out: &'a mut [f32],
    pub(super) add: bool,
}

impl WithSimd for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.out.len() / self.n;
        let has_one = self.n <= S::F32_LANES;
        let mut row = 0;
        while row < rows {
            row += match rows - row {
                8.. if has_one => self.rows::<S, 8>(simd, row),
                4.. => self.rows::<S, 4>(simd, row),
                2.. => self.rows::<S, 2>(simd, row),
                _ => self.rows::<S, 1>(simd, row),
            };
        }
    }
}

impl Narrow<'_> {
    /// `R` rows, panel by panel; returns `R`.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&mut self, simd: S, row: usize) -> usize {
        let (k, n) = (self.k, self.n);
        let mut a = [&[][..]; R];
        for (index, a) in a.iter_mut().enumerate() {
            *a = &self.a[(row + index) * k..][..k];
        }
        let (mut start, mut panels) = (0, self.panels);
        while start < n {
            let vectors = panel_vectors::<S>(n, start);
            let width = vectors * S::F32_LANES;
            let (panel, rest) = panels.split_at(k * width);
            // Eight rows have one vector.
            if vectors == VECTORS && R <= 4 {
                let tile = tile::<S, R, VECTORS>(simd, a, panel);
                self.write(simd, row, start, tile);
            } else {
                let tile = tile::<S, R, 1>(simd, a, panel);
                self.write(simd, row, start, tile);
            }
            (start, panels) = (start + width, rest);
        }
        R
    }

    /// Writes a tile. A vector may be longer than its row: it then reaches into the rows of the tile
    /// that follow, which are read before and written after.
    #[inline(always)]
    fn write<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        row: usize,
        start: usize,
        mut tile: [[S::f32s; V]; R],
    ) {
        let (n, add) = (self.n, self.add);
        let out = &mut self.out[row * n..(row + R) * n];
        let is_whole = |at: usize| n <= V * S::F32_LANES && at + V * S::F32_LANES <= R * n;
        for (index, values) in tile.iter_mut().enumerate() {
            let before = S::as_simd_f32s(&out[index * n..]).0.first_chunk::<V>();
            let before = before.filter(|_| add && is_whole(index * n));
            for (at, value) in values.iter_mut().enumerate() {
                *value = simd.mul_f32s(simd.splat_f32s(self.alpha), *value);
                if let Some(before) = before {
                    *value = simd.add_f32s(before[at], *value);
                }
            }
        }
        let end = (start + V * S::F32_LANES).min(n);
        for (index, values) in tile.into_iter().enumerate() {
            let at = index * n;
            if is_whole(at) {
                let (vectors, _) = S::as_mut_simd_f32s(&mut out[at..]);
                vectors[..V].copy_from_slice(&values);
            } else {
                write(simd, &mut out[at + start..at + end], values, add);
            }
        }
    }
}

/// Rows of `a` times a panel.
#[inline(always)]
fn tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    a: [&[f32]; R],
    panel: &[f32],
) -> [[S::f32s; V]; R] {
    let mut tile = [[simd.splat_f32s(0.0); V]; R];
    let (panel, _) = S::as_simd_f32s(panel);
    for (l, b) in (0..a[0].len()).zip(panel.as_chunks::<V>().0) {
        for (row, a) in tile.iter_mut().zip(a) {
            let a = simd.splat_f32s(a[l]);
            for (total, b) in row.iter_mut().zip(b) {
                *total = simd.mul_add_e_f32s(a, *b, *total);
            }
        }
    }
    tile
}

/// `out = [out +] values`, for the length of `out`.
#[inline(always)]
fn write<S: Simd, const V: usize>(simd: S, out: &mut [f32], values: [S::f32s; V], add: bool) {
    if out.len() == V * S::F32_LANES {
        for (out, value) in S::as_mut_simd_f32s(out).0.iter_mut().zip(values) {
            *out = if add {
                simd.add_f32s(*out, value)
            } else {
                value
            };
        }
        return;
    }
    let mut row = [0.0; VECTORS * MOST_LANES];
    for (to, value) in S::as_mut_simd_f32s(&mut row).0.iter_mut().zip(values) {
        *to = value;
    }
    Output::new(out, add).put(row.into_iter());
}

/// `out = alpha a^T b` over some rows of `a` `[rows, m]` and `b` `[rows, n]`.
pub(super) struct Sums<'a> {
    pub(super) a: &'a [f32],
    pub(super) b: &'a [f32],
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) alpha: f32,
    pub(super) out: &'a mut [f32],
}

impl WithSimd for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        // The wider operand lies along the lanes. Its last vector may overlap the one before, and
        // computes those sums again.
        let (lanes, wide) = (S::F32_LANES, self.m.max(self.n));
        for start in (0..wide).step_by(VECTORS * lanes) {
            match wide - start {
                left if left > lanes => {
                    self.columns(simd, [start, (start + lanes).min(wide - lanes)]);
                }
                _ => self.columns(simd, [start.min(wide.saturating_sub(lanes))]),
            }
        }
    }
}

impl Sums<'_> {
    /// Vectors of columns of the wider operand, by where they start, with all of the narrower.
    #[inline(always)]
    fn columns<S: Simd, const V: usize>(&mut self, simd: S, starts: [usize; V]) {
        let narrow = self.m.min(self.n);
        let mut from = 0;
        while from < narrow {
            from += match narrow - from {
                1 => self.tile::<S, 1, V>(simd, starts, from),
                2 => self.tile::<S, 2, V>(simd, starts, from),
                3 => self.tile::<S, 3, V>(simd, starts, from),
                5 => self.tile::<S, 5, V>(simd, starts, from),
                6 => self.tile::<S, 6, V>(simd, starts, from),
                _ => self.tile::<S, 4, V>(simd, starts, from),
            };
        }
    }

    /// `R` columns of the narrower operand; returns `R`.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        starts: [usize; V],
        from: usize,
    ) -> usize {
        let swapped = self.m > self.n;
        let ((wide, narrow), (w, c)) = if swapped {
            ((self.a, self.b), (self.m, self.n))
        } else {
            ((self.b, self.a), (self.n, self.m))
        };
        let width = w.min(S::F32_LANES);
        let mut tile = [[simd.splat_f32s(0.0); V]; R];
        for (wide, narrow) in wide.chunks_exact(w).zip(narrow.chunks_exact(c)) {
            let factors: &[f32; R] = narrow[from..].first_chunk().expect("R columns are left");
            let mut vectors = [simd.splat_f32s(0.0); V];
            for (vector, start) in vectors.iter_mut().zip(starts) {
                let row = &wide[start..start + width];
                *vector = match S::as_simd_f32s(row).0.first() {
                    Some(whole) => *whole,
                    // A row shorter than a vector.
                    None => simd.partial_load_f32s(row),
                };
            }
            for (row, factor) in tile.iter_mut().zip(factors) {
                let factor = simd.splat_f32s(*factor);
                for (total, vector) in row.iter_mut().zip(vectors) {
                    *total = simd.mul_add_e_f32s(factor, vector, *total);
                }
            }
        }
        for (index, row) in tile.into_iter().enumerate() {
            for (start, sums) in starts.into_iter().zip(row) {
                let mut values = [0.0; MOST_LANES];
                let sums = simd.mul_f32s(simd.splat_f32s(self.alpha), sums);
                simd.partial_store_f32s(&mut values[..S::F32_LANES], sums);
                for (j, value) in (start..start + width).zip(values) {
                    let at = if swapped {
                        j * self.n + from + index
                    } else {
                        (from + index) * self.n + j
                    };
                    self.out[at] = value;
                }
            }
        }
        R
    }
}

#[cfg(test)]
mod tests {
    use pulp::{Scalar, Scalar128b, Scalar256b, Scalar512b};

    use super::*;

    /// Small whole numbers: every product and sum is exact.
    fn numbers(len: usize, times: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * times) % 7) as f32 - 3.0).collect()
    }

    /// A product, and one added to ones.
    fn narrow<S: Simd>(simd: S, [m, n, k]: [usize; 3], (a, b): (&[f32], &[f32])) -> [Vec<f32>; 2] {
        let mut panels = vec![f32::NAN; panels_len(k, n)];
        let pack = Pack {
            b,
            transposed: true,
            k,
            n,
            panels: &mut panels,
        };
        pack.with_simd(simd);
        [(f32::NAN, false), (1.0, true)].map(|(before, add)| {
            let mut out = vec![before; m * n];
            let product = Narrow {
                a,
                panels: &panels,
                k,
                n,
                alpha: 2.0,
                out: &mut out,
                add,
            };
            product.with_simd(simd);
            out
        })
    }

    fn sums<S: Simd>(simd: S, [m, n]: [usize; 2], (a, b): (&[f32], &[f32])) -> Vec<f32> {
        let mut out = vec![f32::NAN; m * n];
        let product = Sums {
            a,
            b,
            m,
            n,
            alpha: 2.0,
            out: &mut out,
        };
        product.with_simd(simd);
        out
    }

    #[test]
    fn all_vector_widths_give_the_product() {
        for [m, n, k] in [
            [13, 3, 5],
            [27, 1, 6],
            [23, 8, 3],
            [7, 20, 2],
            [11, 32, 4],
            [6, 70, 9],
            [20, 45, 8],
            [45, 3, 8],
        ] {
            let (a, b) = (numbers(m * k, 3), numbers(n * k, 5));
            // Both stored [.., k].
            let sum = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum::<f32>();
            let expected = [0.0, 1.0].map(|before| {
                let elements = (0..m * n).map(|at| before + 2.0 * sum(at / n, at % n));
                elements.collect::<Vec<f32>>()
            });
            let operands = (&a[..], &b[..]);
            assert_eq!(narrow(Scalar, [m, n, k], operands), expected);
            assert_eq!(narrow(Scalar128b, [m, n, k], operands), expected);
            assert_eq!(narrow(Scalar256b, [m, n, k], operands), expected);
            assert_eq!(narrow(Scalar512b, [m, n, k], operands), expected);
            // Both stored [k, ..].
            let sum = |i: usize, j: usize| (0..k).map(|l| a[l * m + i] * b[l * n + j]).sum::<f32>();
            let expected: Vec<f32> = (0..m * n).map(|at| 2.0 * sum(at / n, at % n)).collect();
            assert_eq!(sums(Scalar, [m, n], operands), expected);
            assert_eq!(sums(Scalar128b, [m, n], operands), expected);
            assert_eq!(sums(Scalar256b, [m, n], operands), expected);
            assert_eq!(sums(Scalar512b, [m, n], operands), expected);
        }
    }
}
