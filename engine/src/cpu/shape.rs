//! Operands of products: shapes and layouts.

/// A matrix in memory: its values, and whether it is stored transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) transposed: bool,
    /// The stored rows that it consists of, if those are not all.
    pub(crate) listed: Option<&'a [u32]>,
}

impl<'a> Matrix<'a> {
    /// A matrix that is stored transposed or not.
    pub(crate) fn of(values: &'a [f32], transposed: bool) -> Self {
        Self {
            values,
            transposed,
            listed: None,
        }
    }

    /// A matrix that is not transposed.
    pub(crate) fn plain(values: &'a [f32]) -> Self {
        Self::of(values, false)
    }

    /// Whether it has so many rows and columns.
    pub(super) fn holds(self, rows: usize, columns: usize) -> bool {
        let [rows, columns] = [[rows, columns], [columns, rows]][usize::from(self.transposed)];
        let held = self.values.len();
        self.listed.map_or(held == rows * columns, |listed| {
            listed.len() == rows && held.is_multiple_of(columns)
        })
    }

    /// Its elements, with so many columns in memory.
    pub(super) fn elements(self, columns: usize) -> Strided<'a> {
        let stored = Strided {
            listed: self.listed,
            ..Strided::rows(self.values, columns)
        };
        if self.transposed { stored.t() } else { stored }
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

/// A matrix inside a larger one: element `(i, j)` is `values[i * row + j * column]`. If rows of the
/// larger one are listed, the index that is not adjacent in memory is a position in the list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) column: usize,
    pub(crate) listed: Option<&'a [u32]>,
}

impl<'a> Strided<'a> {
    /// Consecutive columns of a matrix, whose first element `values` starts with and whose rows are
    /// `row` apart.
    pub(crate) fn rows(values: &'a [f32], row: usize) -> Self {
        Self {
            values,
            row,
            column: 1,
            listed: None,
        }
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        Self {
            values: self.values,
            row: self.column,
            column: self.row,
            listed: self.listed,
        }
    }

    /// The rows from `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        self.part(row, 0)
    }

    /// The matrix from an element on.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        let (place, listed) = match self.listed {
            None => ([row, column], None),
            Some(rows) if self.column == 1 => ([0, column], Some(&rows[row..])),
            Some(rows) => ([row, 0], Some(&rows[column..])),
        };
        Self {
            values: &self.values[place[0] * self.row + place[1] * self.column..],
            listed,
            ..self
        }
    }

    /// Offset of a line; lines are `stride` apart, and may be listed.
    #[inline(always)]
    pub(super) fn line(&self, line: usize, stride: usize) -> usize {
        stride * self.listed.map_or(line, |listed| listed[line] as usize)
    }

    /// The first `len` numbers of a row, of a matrix whose columns are consecutive.
    pub(crate) fn numbers(self, row: usize, len: usize) -> &'a [f32] {
        &self.values[row * self.row..][..len]
    }

    /// Whether it has so many rows and columns, none of them listed.
    pub(super) fn holds(&self, rows: usize, columns: usize) -> bool {
        self.listed.is_none()
            && (rows - 1) * self.row + (columns - 1) * self.column < self.values.len()
    }
}
