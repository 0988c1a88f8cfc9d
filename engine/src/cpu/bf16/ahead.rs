//! Numbers that are packed next, to be fetched while others are multiplied.

use std::ops::Range;

use crate::cpu::shape::Strided;

/// Numbers of a cache line.
const CACHED: usize = 16;

/// Lines and terms of a matrix, in the order of memory, of which some are fetched.
#[derive(Debug)]
pub(super) struct Ahead<'a> {
    matrix: Strided<'a>,
    /// The lines that are left, each from an offset on, and of so many numbers.
    lines: Range<usize>,
    offset: usize,
    len: usize,
    /// The numbers that are left of the line before.
    line: Range<usize>,
}

impl<'a> Ahead<'a> {
    /// So many lines and terms of a matrix, which may be none.
    pub(super) fn of(matrix: Strided<'a>, lines: Range<usize>, terms: Range<usize>) -> Self {
        let (lines, adjacent) = match matrix.column {
            1 => (lines, terms),
            _ if lines.is_empty() => (0..0, lines),
            _ => (terms, lines),
        };
        Self {
            matrix,
            lines,
            offset: adjacent.start,
            len: adjacent.len(),
            line: 0..0,
        }
    }

    /// Fetches the next of them into a near cache.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "sse")]
    pub(super) fn fetch(&mut self) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        if let Some(at) = self.next() {
            let at = self.matrix.values.as_ptr().wrapping_add(at);
            _mm_prefetch::<_MM_HINT_T1>(at.cast());
        }
    }
}

/// Places of numbers in the matrix, one of each cache line.
impl Iterator for Ahead<'_> {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.line.is_empty() {
            let stride = self.matrix.row.max(self.matrix.column);
            let start = self.matrix.line(self.lines.next()?, stride) + self.offset;
            self.line = start..start + self.len;
        }
        let at = self.line.start;
        self.line.start += CACHED;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand: matrices of 4 lines that are 50 apart, of which some are listed.
    #[test]
    fn lines_and_terms_are_fetched_in_the_order_of_memory() {
        let values = [0.0; 200];
        let by_line = Strided::rows(&values, 50);
        let places = |matrix, lines, terms| Ahead::of(matrix, lines, terms).collect::<Vec<_>>();
        assert_eq!(places(by_line, 1..3, 10..30), [60, 76, 110, 126]);
        assert_eq!(places(by_line.t(), 10..30, 1..3), [60, 76, 110, 126]);
        let listed = Strided {
            listed: Some(&[3, 0]),
            ..by_line
        };
        assert_eq!(places(listed, 0..2, 0..16), [150, 0]);
        assert_eq!(places(listed.t(), 20..37, 1..2), [20, 36]);
        for matrix in [listed, listed.t()] {
            assert!(places(matrix, 2..2, 0..2).is_empty());
        }
    }
}
