//! A matrix as a figure shows it: small enough to be looked at.

use serde::Serialize;

/// Most rows or columns of a matrix of which most is 0, and of one that is full: an SVG names each
/// cell that is not white.
pub(super) const MOST_SPARSE: usize = 160;
pub(super) const MOST_DENSE: usize = 64;

/// A matrix with a name, components in its columns.
#[derive(Debug, Serialize)]
pub(super) struct Matrix {
    /// Site, or site and part.
    pub(super) site: String,
    /// Numbers of the components, in the order of the columns.
    pub(super) order: Vec<usize>,
    /// Rows and columns that a value below stands for: it is the one of largest magnitude.
    pub(super) each: [usize; 2],
    /// Values, row by row.
    pub(super) rows: Vec<Vec<f32>>,
}

impl Matrix {
    /// `rows` rows of `value(row, component)`; where there are more than `most` rows or columns,
    /// neighbours share a value.
    pub(super) fn new(
        site: String,
        order: &[usize],
        rows: usize,
        most: usize,
        value: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let each = [rows, order.len()].map(|count| count.div_ceil(most).max(1));
        let larger = |a: f32, b: f32| if b.abs() > a.abs() { b } else { a };
        let shared = |row: usize, components: &[usize]| {
            let of_rows = row..rows.min(row + each[0]);
            let values = of_rows.flat_map(|row| components.iter().map(move |&c| (row, c)));
            values.fold(0.0, |a, (row, c)| larger(a, value(row, c)))
        };
        let shared_row = |row| order.chunks(each[1]).map(|c| shared(row, c)).collect();
        Self {
            rows: (0..rows).step_by(each[0]).map(shared_row).collect(),
            order: order.to_vec(),
            site,
            each,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_and_columns_share_the_value_of_largest_magnitude() {
        let value = |row: usize, component: usize| match (row, component) {
            (5, 1) => -2.0,
            (5, 2) => 1.0,
            _ => 0.0,
        };
        let found = Matrix::new("a".into(), &[2, 1, 0], 7, 3, value);
        assert_eq!((found.each, found.rows.len()), ([3, 1], 3));
        assert_eq!(found.rows[1], [1.0, -2.0, 0.0]);
        let found = Matrix::new("a".into(), &[2, 1, 0], 7, 2, value);
        assert_eq!(
            (found.each, found.rows.len(), found.rows[0].len()),
            ([4, 2], 2, 2)
        );
        assert_eq!(found.rows[1], [-2.0, 0.0]);
    }
}
