//! Sums of products on vectors of f32, on every processor: the other units are tested against it.

use pulp::{Simd, WithSimd};

use super::tile::{Block, SIDE};
use super::{SUMS, Sums};
use crate::cpu::math::on_vectors;

/// Rows whose sums are held in registers: a vector each.
const ROWS: usize = 8;
/// Columns of a tile.
const COLUMNS: usize = 16;

/// For each half of the columns, all packed terms.
type Terms = [[[f32; COLUMNS]; SUMS]; 2];

pub(super) fn multiply(rows: &[Block], columns: &[Block], sums: &mut Sums) {
    assert!(rows.len() <= SUMS / SIDE, "at most one panel of terms");
    let mut terms: Terms = [[[0.0; COLUMNS]; SUMS]; 2];
    for (half, terms) in terms.iter_mut().enumerate() {
        let pairs = columns.iter().flat_map(|block| &block.0[half].0);
        for (pair, terms) in pairs.zip(terms.as_chunks_mut::<2>().0) {
            for (column, word) in pair.iter().enumerate() {
                (terms[0][column], terms[1][column]) = of_word(*word);
            }
        }
    }
    on_vectors(Multiply {
        rows,
        terms: &terms,
        sums,
    });
}

/// The two terms of a word.
#[inline(always)]
fn of_word(word: u32) -> (f32, f32) {
    let [first, second] = [word << 16, word & 0xffff_0000].map(f32::from_bits);
    (first, second)
}

struct Multiply<'a> {
    rows: &'a [Block],
    terms: &'a Terms,
    sums: &'a mut Sums,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for first in (0..SIDE).step_by(ROWS) {
            for (half, terms) in self.terms.iter().enumerate() {
                for vector in 0..COLUMNS / S::F32_LANES {
                    let mut held = [simd.splat_f32s(0.0); ROWS];
                    for (block, terms) in self.rows.iter().zip(terms.chunks_exact(SIDE)) {
                        let rows = block.rows::<ROWS>(first);
                        for (pair, terms) in terms.as_chunks::<2>().0.iter().enumerate() {
                            let [y, next_y] =
                                [0, 1].map(|term| S::as_simd_f32s(&terms[term]).0[vector]);
                            for (held, row) in held.iter_mut().zip(rows) {
                                let (x, next_x) = of_word(row[pair]);
                                *held = simd.mul_add_e_f32s(simd.splat_f32s(x), y, *held);
                                *held = simd.mul_add_e_f32s(simd.splat_f32s(next_x), next_y, *held);
                            }
                        }
                    }
                    for (held, sums) in held.into_iter().zip(&mut self.sums.0[first..]) {
                        let sums = &mut sums[COLUMNS * half..][..COLUMNS];
                        S::as_mut_simd_f32s(sums).0[vector] = held;
                    }
                }
            }
        }
    }
}
