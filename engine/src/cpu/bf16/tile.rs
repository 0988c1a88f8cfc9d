//! Tiles of packed factors, and how any processor fills one.

use std::ops::Range;

use half::bf16;

use crate::cpu::shape::Strided;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "the earlier of two terms is the lower half of a word"
);

/// Lines of a strip, and terms of a block.
pub(super) const SIDE: usize = 32;

/// 16 lines of 32 terms, or 16 pairs of terms of 16 lines: see [`Order`].
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [[u32; 16]; 16]);

/// [`SIDE`] lines of as many terms.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Block(pub(super) [Tile; 2]);

impl Block {
    /// Some rows of a block, counted over both tiles: as many lines, packed by line.
    #[inline(always)]
    pub(super) fn rows<const N: usize>(&self, first: usize) -> &[[u32; 16]; N] {
        let rows = self.0[first / 16].0[first % 16..].first_chunk();
        rows.expect("rows of one tile")
    }
}

/// Meaning of a row of a tile. A word holds two terms of one line, the earlier one in its lower
/// half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// One line.
    ByLine,
    /// Two terms, of all lines.
    ByTerm,
}

impl Tile {
    /// Fills it on any processor, one by one: a processor that is fast at bf16 products has
    /// instructions for it (`packing`).
    pub(super) fn fill(
        &mut self,
        matrix: Strided<'_>,
        lines: Range<usize>,
        terms: Range<usize>,
        order: Order,
    ) {
        self.0 = [[0; 16]; 16];
        for (line, of_line) in lines.enumerate() {
            for (term, of_term) in terms.clone().enumerate() {
                let at = match matrix.column {
                    1 => matrix.line(of_line, matrix.row) + of_term,
                    stride => of_line * matrix.row + matrix.line(of_term, stride),
                };
                let value = matrix.values[at];
                let (row, word) = match order {
                    Order::ByLine => (line, term / 2),
                    Order::ByTerm => (term / 2, line),
                };
                let bits = u32::from(bf16::from_f32(value).to_bits());
                self.0[row][word] |= bits << (16 * (term % 2));
            }
        }
    }
}
