//! Matrix products as cublasLt wants them.
//!
//! Our matrices are row-major, cublasLt's are column-major: what we call `Y = A B` it calls `Y^T = B^T A^T`, on the same
//! memory. So its first factor is our second one, and a matrix that we store as it is is one that it reads as it is.
//!
//! Factors are both f32 or both bf16, and the result is either; sums are f32.

use super::lowering::Operand;
use crate::value::DType;

/// A factor or the result, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) operand: Operand,
    /// First element.
    pub(crate) first: usize,
    /// Elements from a row to the next.
    pub(crate) pitch: usize,
    pub(crate) transposed: bool,
    /// Elements from a product of the batch to the next.
    pub(crate) step: usize,
}

/// `out = [out +] alpha a b [+ bias]`, `[m, k]` by `[k, n]`, as often as `batch` says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) alpha: f32,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) out: Matrix,
    pub(crate) add: bool,
    /// A row that is added to every row.
    pub(crate) bias: Option<Operand>,
    pub(crate) batch: usize,
}

/// A column-major matrix as cublasLt describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from a column to the next.
    pub(crate) pitch: usize,
    pub(crate) step: usize,
}

/// Everything that the choice of an algorithm depends on: products with one key share a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    /// cublasLt's A, which is our second factor, and whether it is to be read transposed.
    pub(crate) a: (Layout, bool),
    /// cublasLt's B, our first factor.
    pub(crate) b: (Layout, bool),
    pub(crate) c: Layout,
    /// Of both factors, and of the result, what it is added to and the bias.
    pub(crate) types: [DType; 2],
    pub(crate) bias: bool,
    /// Whether there is something to add to.
    pub(crate) add: bool,
    pub(crate) batch: usize,
    /// Largest power of two, up to 16 bytes, that all addresses are multiples of.
    pub(crate) alignment: usize,
}

impl Product {
    /// As cublasLt is to be asked. `alignment` is that of the addresses.
    pub(crate) fn key(&self, alignment: usize) -> Key {
        // A row-major [r, c] is a column-major [c, r].
        let layout = |matrix: &Matrix, rows: usize, columns: usize| {
            let (rows, columns) = if matrix.transposed {
                (rows, columns)
            } else {
                (columns, rows)
            };
            let layout = Layout {
                rows,
                columns,
                pitch: matrix.pitch,
                step: matrix.step,
            };
            (layout, matrix.transposed)
        };
        Key {
            a: layout(&self.b, self.k, self.n),
            b: layout(&self.a, self.m, self.k),
            c: layout(&self.out, self.m, self.n).0,
            types: [self.a.operand.dtype, self.out.operand.dtype],
            bias: self.bias.is_some(),
            add: self.add,
            batch: self.batch,
            alignment,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::lowering::At;

    fn matrix(pitch: usize, transposed: bool) -> Matrix {
        Matrix {
            operand: Operand {
                at: At::Input(0),
                dtype: DType::F32,
                first: 0,
                len: 1,
                written: false,
            },
            first: 0,
            pitch,
            transposed,
            step: 0,
        }
    }

    // By hand: [2, 3] by [3, 5], each stored as it is and transposed.
    #[test]
    fn a_row_major_product_is_a_column_major_one_of_exchanged_factors() {
        for (a_transposed, b_transposed) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let product = Product {
                m: 2,
                n: 5,
                k: 3,
                alpha: 1.0,
                a: matrix(if a_transposed { 2 } else { 3 }, a_transposed),
                b: matrix(if b_transposed { 3 } else { 5 }, b_transposed),
                out: matrix(5, false),
                add: false,
                bias: None,
                batch: 1,
            };
            let key = product.key(16);
            let layout = |rows, columns| Layout {
                rows,
                columns,
                pitch: rows,
                step: 0,
            };
            let a = if b_transposed {
                layout(3, 5)
            } else {
                layout(5, 3)
            };
            let b = if a_transposed {
                layout(2, 3)
            } else {
                layout(3, 2)
            };
            assert_eq!(key.a, (a, b_transposed));
            assert_eq!(key.b, (b, a_transposed));
            assert_eq!(key.c, layout(5, 2));
        }
    }
}
