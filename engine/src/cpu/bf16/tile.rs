//! Tiles of packed factors, and how any processor fills one.

use std::ops::Range;

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
    /// Fills it on any processor.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        matrix: Strided<'_>,
        lines: Range<usize>,
        terms: Range<usize>,
        order: Order,
    ) {
        let values = matrix.values;
        if lines.len() < 16 || terms.len() < SIDE {
            self.0 = [[0; 16]; 16];
        }
        let natural = if matrix.column == 1 && terms.len() == SIDE {
            for (line, words) in lines.zip(&mut self.0) {
                let values = &values[line * matrix.row + terms.start..][..SIDE];
                // Halves of words one after the other: vectors can narrow in this order.
                let mut halves = [0u16; SIDE];
                for (half, value) in halves.iter_mut().zip(values) {
                    *half = (rounded(*value) >> 16) as u16;
                }
                *words = bytemuck::cast(halves);
            }
            Order::ByLine
        } else if matrix.row == 1 && lines.len() == 16 && terms.len().is_multiple_of(2) {
            for (term, words) in terms.step_by(2).zip(&mut self.0) {
                let [low, high] = [term, term + 1]
                    .map(|term| &values[term * matrix.column + lines.start..][..16]);
                for ((word, low), high) in words.iter_mut().zip(low).zip(high) {
                    *word = pair([*low, *high]);
                }
            }
            Order::ByTerm
        } else {
            self.fill_ends(matrix, lines, terms);
            Order::ByLine
        };
        if natural != order {
            self.transpose();
        }
    }

    /// Fills blocks at the end of lines or terms, one by one. A function of its own: inlined, wide
    /// vectors would turn it into gathers.
    #[inline(never)]
    fn fill_ends(&mut self, matrix: Strided<'_>, lines: Range<usize>, terms: Range<usize>) {
        for (line, words) in lines.zip(&mut self.0) {
            let at = |term| matrix.values[line * matrix.row + term * matrix.column];
            for (first, word) in terms.clone().step_by(2).zip(words) {
                let second = first + 1;
                let second = if second < terms.end { at(second) } else { 0.0 };
                *word = pair([at(first), second]);
            }
        }
    }

    #[inline(always)]
    fn transpose(&mut self) {
        let from = self.0;
        for (column, words) in self.0.iter_mut().enumerate() {
            for (word, from) in words.iter_mut().zip(&from) {
                *word = from[column];
            }
        }
    }
}

/// Two numbers in a word, each rounded to the nearest bf16, ties to even.
#[inline(always)]
fn pair([low, high]: [f32; 2]) -> u32 {
    rounded(low) >> 16 | rounded(high) & 0xffff_0000
}

/// The bits of the nearest bf16, in the upper half.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let even = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // A NaN whose last bits are cut off must not become an infinity, nor overflow into a zero.
    if x.is_nan() { bits | 0x0040_0000 } else { even }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rounding_agrees_with_the_half_crate() {
        let upper = [
            0, 1, 0x007f, 0x0080, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f, 0x7f80, 0x7f81, 0x7fff,
        ];
        let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        for bits in upper
            .into_iter()
            .flat_map(|u: u32| lower.map(|l: u32| u << 16 | l))
        {
            for bits in [bits, bits | 1 << 31] {
                let x = f32::from_bits(bits);
                let expected = u32::from(bf16::from_f32(x).to_bits());
                assert_eq!(pair([x, 1.0]), 0x3f80_0000 | expected, "{bits:08x}");
                assert_eq!(pair([1.0, x]), expected << 16 | 0x3f80, "{bits:08x}");
            }
        }
    }
}
