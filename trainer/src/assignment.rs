//! Matches one to one.

use pathfinding::prelude::{Matrix, kuhn_munkres};

/// Entries are not counted beyond this, so that the sum of 2^13 rows does not overflow.
const MOST: f32 = 1024.0;

/// One of the columns for each row, or a row for each column where those are fewer, so that the sum
/// of the entries is largest: rows, columns.
///
/// - `entries`: f32 `[rows, columns]`, about 0 to 1; beyond [`MOST`] all are alike
pub(crate) fn assignment(entries: &[f32], rows: usize, columns: usize) -> Vec<(usize, usize)> {
    // Whole numbers are added up exactly.
    const ONE: f32 = (1_u64 << 40) as f32;
    let number = |entry: f32| ONE * entry.clamp(-MOST, MOST);
    if rows == 0 || columns == 0 {
        return Vec::new();
    }
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^50; NaN is 0")]
    let weight = |row: usize, column: usize| number(entries[row * columns + column]) as i64;
    if rows <= columns {
        let weights = Matrix::from_fn(rows, columns, |(row, column)| weight(row, column));
        kuhn_munkres(&weights).1.into_iter().enumerate().collect()
    } else {
        let weights = Matrix::from_fn(columns, rows, |(column, row)| weight(row, column));
        let found = kuhn_munkres(&weights).1.into_iter().enumerate();
        found.map(|(column, row)| (row, column)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Row by row, the largest first, would give 0.9 + 0.1.
    #[test]
    fn the_sum_of_the_cosines_is_largest_and_the_longer_side_keeps_components() {
        let cosines = [0.9, 0.8, 0.0, 0.8, 0.1, 0.0];
        assert_eq!(assignment(&cosines, 2, 3), [(0, 1), (1, 0)]);
        let turned = [0.9, 0.8, 0.8, 0.1, 0.0, 0.0];
        assert_eq!(assignment(&turned, 3, 2), [(1, 0), (0, 1)]);
        assert!(assignment(&[], 0, 3).is_empty());
        // Importances of a run that diverges.
        let wild = [f32::INFINITY, f32::MAX, f32::NAN, -f32::INFINITY];
        assert_eq!(assignment(&wild, 2, 2), [(0, 1), (1, 0)]);
    }
}
