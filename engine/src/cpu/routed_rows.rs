//! Routed rows, and compacted matrices, which hold only those.
//!
//! A route is a number for each row, zero if the row takes no part. A compacted matrix has room for
//! all rows; the routed ones come first, in order, and the rows behind them are undefined.

use std::ops::Range;

use super::output::Output;
use super::pool::{Parts, Pool, Rows};
use crate::ops::grain_rows;

/// Numbers of the rows whose route is not zero, in order, at the front of `room`.
pub(crate) fn routed<'a>(route: &[f32], room: &'a mut [f32]) -> &'a [u32] {
    let room: &mut [u32] = bytemuck::cast_slice_mut(&mut room[..route.len()]);
    let mut count = 0;
    for (row, route) in (0u32..).zip(route) {
        room[count] = row;
        count += usize::from(*route != 0.0);
    }
    &room[..count]
}

/// Rows that are in both of two lists of routed rows, as their positions in each list, written to
/// `in_first` and `in_second`. Each is at least as long as its list.
pub(crate) fn common<'a>(
    [first, second]: [&[u32]; 2],
    in_first: &'a mut [f32],
    in_second: &'a mut [f32],
) -> (&'a [u32], &'a [u32]) {
    let in_first: &mut [u32] = bytemuck::cast_slice_mut(in_first);
    let in_second: &mut [u32] = bytemuck::cast_slice_mut(in_second);
    let (mut count, mut of_second) = (0, (0u32..).zip(second).peekable());
    for (place, row) in (0u32..).zip(first) {
        while of_second.next_if(|(_, other)| *other < row).is_some() {}
        if let Some((other_place, _)) = of_second.next_if(|(_, other)| *other == row) {
            (in_first[count], in_second[count]) = (place, other_place);
            count += 1;
        }
    }
    (&in_first[..count], &in_second[..count])
}

/// Positions, in the list of routed rows, of those within `rows`.
pub(crate) fn among(routed: &[u32], rows: &Range<usize>) -> Range<usize> {
    let before = |border: usize| routed.partition_point(|&row| (row as usize) < border);
    before(rows.start)..before(rows.end)
}

/// Clears those of `rows` that are not routed in their part of a matrix.
pub(crate) fn clear_others(routed: &[u32], rows: &Range<usize>, part: &mut [f32], columns: usize) {
    let mut next = rows.start;
    let ends = routed[among(routed, rows)].iter().map(|&row| row as usize);
    for row in ends.chain([rows.end]) {
        part[(next - rows.start) * columns..(row - rows.start) * columns].fill(0.0);
        next = row + 1;
    }
}

/// A compacted matrix, cut by all rows; without a list of routed rows, a matrix of all rows.
pub(crate) struct Compacted<'a> {
    values: &'a mut [f32],
    columns: usize,
    routed: Option<&'a [u32]>,
    /// Number of the first row, among all rows.
    first: usize,
}

impl<'a> Compacted<'a> {
    pub(crate) fn new(values: &'a mut [f32], columns: usize, routed: Option<&'a [u32]>) -> Self {
        Self {
            values,
            columns,
            routed,
            first: 0,
        }
    }

    /// Elements of this part.
    #[inline(always)]
    pub(crate) fn part(&mut self, start: usize, len: usize) -> &mut [f32] {
        &mut self.values[start..start + len]
    }
}

impl Parts for Compacted<'_> {
    fn split(self, _chunks: usize, rows: usize) -> (Self, Self) {
        let Self {
            values,
            columns,
            routed,
            first,
        } = self;
        let border = first + rows;
        let held = routed.map_or(rows, |routed| among(routed, &(0..border)).end);
        let (left, right) = values.split_at_mut(held * columns);
        let lists = routed.map(|routed| routed.split_at(held));
        let part = |values, routed, first| Self {
            values,
            columns,
            routed,
            first,
        };
        (
            part(left, lists.map(|(left, _)| left), first),
            part(right, lists.map(|(_, right)| right), border),
        )
    }
}

/// Copies the routed `rows` out of `all` rows.
pub(crate) fn gather(
    pool: &Pool,
    all: usize,
    rows: &[u32],
    from: &[f32],
    to: &mut [f32],
    columns: usize,
) {
    let parts = Compacted::new(to, columns, Some(rows));
    pool.run(all, grain_rows(all, columns), parts, |range, mut to| {
        for (own, &row) in rows[among(rows, &range)].iter().enumerate() {
            to.part(own * columns, columns)
                .copy_from_slice(&from[row as usize * columns..][..columns]);
        }
    });
}

/// `out = [out +]` compacted `rows` at their positions among `all`, and 0 elsewhere.
pub(crate) fn scatter(
    pool: &Pool,
    all: usize,
    rows: &[u32],
    from: &[f32],
    out: Output<&mut [f32]>,
    columns: usize,
) {
    let Output { values, add } = out;
    pool.run(
        all,
        grain_rows(all, columns),
        Rows(values, columns),
        |range, out| {
            if !add {
                clear_others(rows, &range, out.0, columns);
            }
            let compacted = among(rows, &range);
            for (compacted, &row) in compacted.clone().zip(&rows[compacted]) {
                let from = &from[compacted * columns..][..columns];
                let out = &mut out.0[(row as usize - range.start) * columns..][..columns];
                Output::new(out, add).put(from.iter().copied());
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand.
    #[test]
    fn common_rows_are_found_in_both_lists() {
        let check = |first: &[u32], second: &[u32], expected: (&[u32], &[u32])| {
            let mut room = [[f32::NAN; 6]; 2];
            let [one, other] = &mut room;
            assert_eq!(common([first, second], one, other), expected);
        };
        check(&[1, 3, 4, 9], &[0, 3, 9], (&[1, 3], &[1, 2]));
        check(&[0, 3, 9], &[1, 3, 4, 9], (&[1, 2], &[1, 3]));
        check(&[2, 5], &[2, 5], (&[0, 1], &[0, 1]));
        check(&[2, 5], &[0, 3, 7], (&[], &[]));
        check(&[], &[1], (&[], &[]));
    }

    #[test]
    fn routed_rows_are_compacted_and_others_cleared_for_any_number_of_threads() {
        for route in [
            &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0][..],
            &[0.0; 7],
            &[1.0; 7],
        ] {
            let mut room = [f32::NAN; 9];
            let rows = routed(route, &mut room);
            let expected: Vec<u32> = (0u32..)
                .zip(route)
                .filter(|(_, route)| **route > 0.0)
                .map(|(row, _)| row)
                .collect();
            assert_eq!(rows, expected);
            for threads in [1, 3] {
                let (mut compacted, mut all) = (vec![-1.0; 14], vec![-1.0; 14]);
                let parts = (
                    Compacted::new(&mut compacted, 2, Some(rows)),
                    Rows(&mut all, 2),
                );
                Pool::new(threads)
                    .unwrap()
                    .run(7, 2, parts, |range, (mut compacted, all)| {
                        clear_others(rows, &range, all.0, 2);
                        for (own, &row) in rows[among(rows, &range)].iter().enumerate() {
                            compacted.part(2 * own, 2).fill(row as f32);
                        }
                    });
                for (index, pair) in compacted.chunks(2).enumerate() {
                    let value = rows.get(index).map_or(-1.0, |&row| row as f32);
                    assert_eq!(pair, [value; 2]);
                }
                for (pair, route) in all.chunks(2).zip(route) {
                    assert_eq!(pair, if *route > 0.0 { [-1.0; 2] } else { [0.0; 2] });
                }
            }
        }
    }
}
