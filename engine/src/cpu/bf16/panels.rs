//! Packed factors: rounded to bf16, two terms to a word, in tiles that fit the registers of AMX.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::packing;
use super::tile::{Block, Order, SIDE, Tile};
use crate::cpu::pool::{Pool, Rows};
use crate::cpu::shape::Strided;

/// Packed lines of a factor: strips of [`SIDE`] lines, each with enough blocks for all terms.
#[derive(Debug)]
pub(crate) struct Panel {
    blocks: Vec<Block>,
    /// Blocks of a strip.
    deep: usize,
}

impl Panel {
    /// No lines.
    pub(in crate::cpu) const fn none() -> Self {
        Self {
            blocks: Vec::new(),
            deep: 0,
        }
    }

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

    /// Packs lines and terms of a matrix `[lines, terms]` from a strip on; the rest of a block is 0.
    ///
    /// # Panics
    ///
    /// When there is no room for them, or the matrix is smaller.
    pub(super) fn fill(
        &mut self,
        strip: usize,
        matrix: Strided<'_>,
        lines: Range<usize>,
        terms: Range<usize>,
        order: Order,
    ) {
        self.deep = terms.len().div_ceil(SIDE);
        let strips = lines.len().div_ceil(SIDE);
        fill(
            &mut self.blocks[strip * self.deep..][..strips * self.deep],
            matrix,
            lines,
            terms,
            order,
        );
    }

    /// Packs so many lines and terms of a matrix, by all threads, and makes room for them.
    pub(in crate::cpu) fn pack(
        &mut self,
        pool: &Pool,
        matrix: Strided<'_>,
        lines: usize,
        terms: usize,
    ) {
        let (strips, deep) = (lines.div_ceil(SIDE), terms.div_ceil(SIDE));
        if self.blocks.len() < strips * deep {
            *self = Self::new(lines, terms);
        }
        self.deep = deep;
        let blocks = Rows(&mut self.blocks[..strips * deep], deep);
        pool.run(strips, STRIPS, blocks, |strips, blocks| {
            let of_strips = SIDE * strips.start..lines.min(SIDE * strips.end);
            fill(blocks.0, matrix, of_strips, 0..terms, Order::ByTerm);
        });
    }
}

/// Strips of lines that a thread packs at a time.
const STRIPS: usize = 2;

/// Fills strips of blocks with lines and terms of a matrix, in the order of memory.
fn fill(
    blocks: &mut [Block],
    matrix: Strided<'_>,
    lines: Range<usize>,
    terms: Range<usize>,
    order: Order,
) {
    let (strips, deep) = (lines.len().div_ceil(SIDE), terms.len().div_ceil(SIDE));
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
                #[cfg(target_arch = "x86_64")]
                if packing::fill(tile, matrix, [&of_tile, &of_block], order) {
                    continue;
                }
                tile.fill(matrix, of_tile, of_block.clone(), order);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                        panel.fill(0, matrix, from_line..lines, from_term..terms, order);
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
