//! Tiles of a matrix that several threads write: rows and columns, each element with one writer.
#![expect(
    unsafe_code,
    reason = "tiles side by side interleave in memory, where slices cannot tell them apart"
)]

use std::marker::PhantomData;
use std::ops::Range;

use super::pool::Parts;

/// Some rows and columns of a matrix, with the right to write them.
pub(crate) struct Tile<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
    marker: PhantomData<&'a mut [f32]>,
}

impl<'a> Tile<'a> {
    /// A whole contiguous matrix.
    pub(crate) fn whole(values: &'a mut [f32], columns: usize) -> Self {
        Self::of(values, columns, columns)
    }

    /// The first columns of a matrix whose rows are `stride` apart.
    pub(crate) fn of(values: &'a mut [f32], columns: usize, stride: usize) -> Self {
        assert!(columns > 0 && columns <= stride, "{columns} of {stride}");
        let missing = stride - columns;
        Self {
            start: values.as_mut_ptr(),
            rows: (values.len() + missing) / stride,
            columns,
            stride,
            marker: PhantomData,
        }
    }

    /// Rows and columns of this tile.
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> Tile<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "{rows:?}");
        assert!(
            columns.start <= columns.end && columns.end <= self.columns,
            "{columns:?}"
        );
        Tile {
            start: self
                .start
                .wrapping_add(rows.start * self.stride + columns.start),
            rows: rows.len(),
            columns: columns.len(),
            stride: self.stride,
            marker: PhantomData,
        }
    }

    /// One row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the constructor guarantees the elements: they lie in live memory that is borrowed
        // mutably for `'a`, and are in no other tile. `&mut self` lends them once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// Sets every element.
    pub(crate) fn fill(&mut self, value: f32) {
        (0..self.rows).for_each(|row| self.row(row).fill(value));
    }

    /// Its address. Elements of `m` rows and `n` columns may be written.
    pub(super) fn raw(&mut self, m: usize, n: usize) -> RawTile<'_> {
        assert!(
            m <= self.rows && n <= self.columns,
            "[{m}, {n}] of [{}, {}]",
            self.rows,
            self.columns
        );
        RawTile {
            start: self.start,
            stride: self.stride,
            listed: None,
        }
    }
}

/// Address of a tile: element `(i, j)` is at `start + i * stride + j`, or in the `i`-th of the rows
/// that are listed. Chunks share its rows but not its elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawTile<'a> {
    pub(super) start: *mut f32,
    pub(super) stride: usize,
    pub(super) listed: Option<&'a [u32]>,
}

// SAFETY: who writes through the address vouches that no other thread accesses the same elements.
unsafe impl Send for RawTile<'_> {}

impl Parts for RawTile<'_> {
    fn split(self, _chunks: usize, _rows: usize) -> (Self, Self) {
        (self, self)
    }
}

impl RawTile<'_> {
    /// The tile from an element on.
    pub(super) fn at(self, row: usize, column: usize) -> Self {
        let (from, listed) = match self.listed {
            None => (row, None),
            Some(listed) => (0, Some(&listed[row..])),
        };
        Self {
            start: self.start.wrapping_add(from * self.stride + column),
            listed,
            ..self
        }
    }

    /// Address of a row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *mut f32 {
        let row = self.listed.map_or(row, |listed| listed[row] as usize);
        self.start.wrapping_add(row * self.stride)
    }
}

/// The columns of a matrix that one set of tiles covers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Window {
    /// First column of the first tile.
    pub(crate) first: usize,
    /// Columns of a tile.
    pub(crate) columns: usize,
    /// Columns from one tile to the next.
    pub(crate) step: usize,
}

impl Window {
    /// Tiles without columns between them.
    pub(crate) fn side_by_side(first: usize, columns: usize) -> Self {
        Self {
            first,
            columns,
            step: columns,
        }
    }

    /// The column after the last of `across` tiles.
    fn end(self, across: usize) -> usize {
        self.first + across.saturating_sub(1) * self.step + self.columns
    }
}

/// The tiles of a batch of matrices `[batch, rows, stride]`, numbered: in each matrix, `across`
/// tiles in a row.
pub(crate) struct Tiles<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
    across: usize,
    step: usize,
    numbers: Range<usize>,
    marker: PhantomData<&'a mut [f32]>,
}

// SAFETY: a range of tiles is held by one thread at a time, and tiles of different numbers share no
// element.
unsafe impl Send for Tiles<'_> {}

impl<'a> Tiles<'a> {
    /// Cuts `values`, f32 `[batch, rows, stride]`, into one set of tiles for each window. Windows
    /// follow each other, or their tiles alternate.
    ///
    /// # Panics
    ///
    /// When windows, of `across` tiles each, overlap or reach beyond the stride.
    pub(crate) fn cut<const N: usize>(
        values: &'a mut [f32],
        rows: usize,
        stride: usize,
        across: usize,
        windows: [Window; N],
    ) -> [Self; N] {
        let (start, end) = (windows[0].first, windows[N - 1].end(1));
        let pairs = || windows.iter().zip(&windows[1..]);
        let follow = pairs().all(|(one, next)| next.first >= one.end(across));
        // Alternating tiles: the first tiles of all windows lie within one step, which is the same
        // for all.
        let alternate = pairs()
            .all(|(one, next)| next.first >= one.end(1) && next.step == one.step)
            && end <= start + windows[0].step;
        assert!(
            windows.iter().all(|window| window.columns <= window.step) && (follow || alternate),
            "windows {windows:?} of {across} overlap"
        );
        assert!(
            windows.iter().all(|window| window.end(across) <= stride)
                && values.len().is_multiple_of(rows * stride),
            "windows {windows:?} of {across} in [.., {rows}, {stride}]"
        );
        let start = values.as_mut_ptr();
        let count = values.len() / (rows * stride) * across;
        windows.map(|window| Self {
            start: start.wrapping_add(window.first),
            rows,
            columns: window.columns,
            stride,
            across,
            step: window.step,
            numbers: 0..count,
            marker: PhantomData,
        })
    }

    /// The tile of a number, which must belong to the chunk.
    pub(crate) fn tile(&mut self, number: usize) -> Tile<'_> {
        assert!(self.numbers.contains(&number), "{number}");
        let (matrix, column) = (number / self.across, number % self.across);
        let offset = matrix * self.rows * self.stride + column * self.step;
        Tile {
            start: self.start.wrapping_add(offset),
            rows: self.rows,
            columns: self.columns,
            stride: self.stride,
            marker: PhantomData,
        }
    }
}

impl Parts for Tiles<'_> {
    fn split(self, _chunks: usize, rows: usize) -> (Self, Self) {
        let middle = self.numbers.start + rows;
        let (left, right) = (self.numbers.start..middle, middle..self.numbers.end);
        let right = Self {
            numbers: right,
            ..self
        };
        let left = Self {
            numbers: left,
            ..right
        };
        (left, right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Pool;

    #[test]
    fn each_element_is_in_one_tile() {
        // Two matrices of 3 rows and 7 columns: tiles of 2 and 1 columns, two of each, and a column
        // that is in none.
        let mut values = vec![0.0; 2 * 3 * 7];
        let windows = [Window::side_by_side(0, 2), Window::side_by_side(5, 1)];
        let [wide, narrow] = Tiles::cut(&mut values, 3, 7, 2, windows);
        let pool = Pool::new(2).unwrap();
        pool.enter(|| {
            pool.run(4, 1, (wide, narrow), |numbers, (mut wide, mut narrow)| {
                for number in numbers {
                    wide.tile(number).fill(1.0 + number as f32);
                    for row in 0..3 {
                        narrow.tile(number).row(row)[0] -= 1.0 + number as f32;
                    }
                }
            });
        });
        let row = |a: f32, b: f32| [a, a, b, b, 0.0, -a, -b];
        let expected = [[row(1.0, 2.0); 3], [row(3.0, 4.0); 3]];
        assert_eq!(values, expected.concat().concat());
    }

    #[test]
    fn a_part_of_a_tile_is_a_tile() {
        let mut values = vec![0.0; 11];
        let mut tile = Tile::of(&mut values, 3, 4);
        tile.part(1..3, 1..3).row(1).copy_from_slice(&[1.0, 2.0]);
        assert_eq!(
            values,
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]
        );
    }

    #[test]
    #[should_panic(expected = "of 2 overlap")]
    fn windows_that_overlap_are_refused() {
        let windows = [Window::side_by_side(0, 3), Window::side_by_side(5, 1)];
        Tiles::cut(&mut [0.0; 10], 1, 10, 2, windows);
    }

    #[test]
    fn tiles_of_several_windows_may_alternate() {
        let mut values = vec![0.0; 12];
        let window = |first, columns| Window {
            first,
            columns,
            step: 3,
        };
        let [mut wide, mut narrow] = Tiles::cut(&mut values, 1, 6, 2, [window(0, 2), window(2, 1)]);
        for number in 0..4 {
            wide.tile(number).fill(1.0 + number as f32);
            narrow.tile(number).fill(-1.0 - number as f32);
        }
        let expected = [
            1.0, 1.0, -1.0, 2.0, 2.0, -2.0, 3.0, 3.0, -3.0, 4.0, 4.0, -4.0,
        ];
        assert_eq!(values, expected);
    }

    #[test]
    #[should_panic(expected = "of 2 overlap")]
    fn tiles_that_alternate_and_overlap_are_refused() {
        let window = |first, columns| Window {
            first,
            columns,
            step: 3,
        };
        Tiles::cut(&mut [0.0; 6], 1, 6, 2, [window(0, 2), window(2, 2)]);
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_beyond_the_tile_panics() {
        Tile::whole(&mut [0.0; 6], 3).row(2);
    }
}
