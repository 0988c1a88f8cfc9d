//! Packed factors: rounded to bf16, two terms to a word, in tiles that fit the registers of AMX.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::packing;
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

/// Packed lines of a factor: strips of [`SIDE`] lines, each with enough blocks for all terms.
#[derive(Debug)]
pub(crate) struct Panel {
    blocks: Vec<Block>,
    /// Blocks of a strip.
    deep: usize,
}

impl Panel {
    /// Room for so many lines and terms.
    pub(super) fn new(lines: usize, terms: usize) -> Self {
        let (strips, deep) = (lines.div_ceil(SIDE), terms.div_ceil(SIDE));
        let none = Block([Tile([[0; 16]; 16]); 2]);
        Self {
            blocks: vec![none; strips * deep],
            deep,
        }
    }

    /// Bytes of so many lines and terms.
    pub(crate) fn bytes(lines: usize, terms: usize) -> usize {
        lines.div_ceil(SIDE) * terms.div_ceil(SIDE) * size_of::<Block>()
    }

    /// The blocks of a strip, from its last [`fill`](Self::fill).
    pub(super) fn strip(&self, index: usize) -> &[Block] {
        &self.blocks[index * self.deep..][..self.deep]
    }

    /// Packs lines and terms of a matrix `[lines, terms]`; the rest of a block is 0.
    ///
    /// # Panics
    ///
    /// When there is no room for them, or the matrix is smaller.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        matrix: Strided<'_>,
        lines: Range<usize>,
        terms: Range<usize>,
        order: Order,
    ) {
        self.deep = terms.len().div_ceil(SIDE);
        let (strips, deep) = (lines.len().div_ceil(SIDE), self.deep);
        let blocks = &mut self.blocks[..strips * deep];
        // In the order of memory.
        let (outer, inner) = match matrix.column {
            1 => (strips, deep),
            _ => (deep, strips),
        };
        for one in 0..outer {
            for other in 0..inner {
                let (strip, at) = match matrix.column {
                    1 => (one, other),
                    _ => (other, one),
                };
                let (line, term) = (lines.start + SIDE * strip, terms.start + SIDE * at);
                let of_block = term..terms.end.min(term + SIDE);
                for (half, tile) in blocks[strip * deep + at].0.iter_mut().enumerate() {
                    let first = line + 16 * half;
                    let of_tile = first.min(lines.end)..lines.end.min(first + 16);
                    tile.fill(matrix, of_tile, of_block.clone(), order);
                }
            }
        }
    }
}

impl Tile {
    #[inline(always)]
    fn fill(
        &mut self,
        matrix: Strided<'_>,
        lines: Range<usize>,
        terms: Range<usize>,
        order: Order,
    ) {
        #[cfg(target_arch = "x86_64")]
        if packing::fill(self, matrix, [&lines, &terms], order) {
            return;
        }
        self.fill_plainly(matrix, lines, terms, order);
    }

    /// Fills it on any processor.
    #[inline(always)]
    pub(super) fn fill_plainly(
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

    // The place of every element, by definition: the matrix holds integers that bf16 represents.
    #[test]
    fn lines_and_terms_have_their_places() {
        let value = |line: usize, term: usize| ((line * 37 + term * 11) % 251) as f32;
        for (lines, terms) in [(64, 64), (40, 70), (3, 5), (17, 33), (32, 31), (1, 1)] {
            let by_line: Vec<f32> = (0..lines * terms)
                .map(|i| value(i / terms, i % terms))
                .collect();
            let by_term: Vec<f32> = (0..lines * terms)
                .map(|i| value(i % lines, i / lines))
                .collect();
            for matrix in [
                Strided::rows(&by_line, terms),
                Strided::rows(&by_term, lines).t(),
            ] {
                for order in [Order::ByLine, Order::ByTerm] {
                    for (from_line, from_term) in [(0, 0), (lines / 2, terms / 2)] {
                        let mut panel = Panel::new(64, 96);
                        panel.fill(matrix, from_line..lines, from_term..terms, order);
                        for line in 0..(lines - from_line).next_multiple_of(SIDE) {
                            let strip = panel.strip(line / SIDE);
                            assert_eq!(strip.len(), (terms - from_term).div_ceil(SIDE));
                            for term in 0..strip.len() * SIDE {
                                let tile = &strip[term / SIDE].0[line % SIDE / 16].0;
                                let (row, pair) = (line % 16, term % SIDE / 2);
                                let word = match order {
                                    Order::ByLine => tile[row][pair],
                                    Order::ByTerm => tile[pair][row],
                                };
                                let found = f32::from_bits(word >> (16 * (term % 2)) << 16);
                                let (line, term) = (from_line + line, from_term + term);
                                let is_there = line < lines && term < terms;
                                let expected = if is_there { value(line, term) } else { 0.0 };
                                assert!(
                                    found.to_bits() == expected.to_bits(),
                                    "{line} {term} of {lines} {terms}, {order:?}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
