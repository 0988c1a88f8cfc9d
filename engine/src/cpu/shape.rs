//! Operands of products: shapes and layouts.

/// A matrix in memory: its values, and whether it is stored transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A matrix that is stored transposed or not.
    pub(crate) fn of(values: &'a [f32], transposed: bool) -> Self {
        Self { values, transposed }
    }

    /// A matrix that is not transposed.
    pub(crate) fn plain(values: &'a [f32]) -> Self {
        Self::of(values, false)
    }
}

/// Rows, columns, and length of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Shape {
    /// The shape of `m` rows, `n` columns and sums of length `k`.
    pub(crate) fn of([m, n, k]: [usize; 3]) -> Self {
        Self { m, n, k }
    }
}

/// A matrix inside a larger one: element `(i, j)` is `values[i * row + j * column]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) column: usize,
}

impl<'a> Strided<'a> {
    /// Consecutive columns of a matrix, whose first element `values` starts with and whose rows are
    /// `row` apart.
    pub(crate) fn rows(values: &'a [f32], row: usize) -> Self {
        Self {
            values,
            row,
            column: 1,
        }
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        Self {
            values: self.values,
            row: self.column,
            column: self.row,
        }
    }

    /// The rows from `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        Self {
            values: &self.values[row * self.row..],
            ..self
        }
    }

    /// The first `len` numbers of a row, of a matrix whose columns are consecutive.
    pub(crate) fn numbers(self, row: usize, len: usize) -> &'a [f32] {
        &self.values[row * self.row..][..len]
    }

    pub(super) fn holds(&self, rows: usize, columns: usize) -> bool {
        (rows - 1) * self.row + (columns - 1) * self.column < self.values.len()
    }
}
