//! Sums of products on vectors of f32, on every processor: the other units are tested against it.

use super::Sums;
use super::tile::{Block, SIDE};
use crate::cpu::math::vectorised;

/// Rows whose sums are held in registers.
const ROWS: usize = 8;
/// Columns of a tile.
const COLUMNS: usize = 16;

pub(super) fn multiply(rows: &[Block], columns: &[Block], sums: &mut Sums) {
    vectorised(
        #[inline(always)]
        || {
            for first in (0..SIDE).step_by(ROWS) {
                for half in 0..2 {
                    let mut held = [[0.0; COLUMNS]; ROWS];
                    for (rows, columns) in rows.iter().zip(columns) {
                        let rows = rows.rows::<ROWS>(first);
                        for (pair, columns) in columns.0[half].0.iter().enumerate() {
                            for (held, row) in held.iter_mut().zip(rows) {
                                let (x, next_x) = of_word(row[pair]);
                                for (held, word) in held.iter_mut().zip(columns) {
                                    let (y, next_y) = of_word(*word);
                                    *held = next_x.mul_add(next_y, x.mul_add(y, *held));
                                }
                            }
                        }
                    }
                    for (held, sums) in held.iter().zip(&mut sums.0[first..]) {
                        sums[COLUMNS * half..][..COLUMNS].copy_from_slice(held);
                    }
                }
            }
        },
    );
}

/// The two terms of a word.
#[inline(always)]
fn of_word(word: u32) -> (f32, f32) {
    let [first, second] = [word << 16, word & 0xffff_0000].map(f32::from_bits);
    (first, second)
}
