//! Sums of products with AVX512_BF16: `vdpbf16ps` adds two products to each of 16 sums.
#![expect(unsafe_code, reason = "instructions that not every processor has")]

use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_dpbf16_ps,
    _mm512_load_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};
use std::mem::transmute;

use super::ahead::Ahead;
use super::tile::{Block, SIDE};
use crate::cpu::output::Output;
use crate::cpu::tile::RawTile;

/// Rows whose sums are held in registers: two vectors of 16 columns each.
const ROWS: usize = 8;

/// Pairs of terms in a block.
const PAIRS: usize = SIDE / 2;

/// Whether this processor has the instruction.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// The first `count` lanes, at most all.
pub(super) fn lanes(count: usize) -> u16 {
    if count < 16 {
        (1 << count) - 1
    } else {
        u16::MAX
    }
}

/// `out = [out +] alpha sums` for so many rows and columns, of sums over so many terms. It fetches
/// the second set of columns meanwhile: a factor that was packed in advance is not in a cache yet.
///
/// # Safety
///
/// `out` must be writable for all rows and columns, and not be accessed by others meanwhile.
///
/// # Panics
///
/// When the processor does not have the instruction.
pub(super) unsafe fn multiply(
    rows: &[Block],
    columns: [&[Block]; 2],
    (size, terms): ([usize; 2], usize),
    to: (f32, Output<RawTile<'_>>),
    ahead: &mut Ahead<'_>,
) {
    assert!(is_there(), "AVX512_BF16");
    for first in (0..size[0]).step_by(ROWS) {
        // SAFETY: the processor has the instructions; the caller vouches for `out`.
        unsafe {
            match size[1] {
                ..=16 => some_rows::<1>(first, rows, columns, (size, terms), to, ahead),
                _ => some_rows::<2>(first, rows, columns, (size, terms), to, ahead),
            }
        }
    }
}

/// Rows from `first` on, and the columns of so many tiles.
///
/// # Safety
///
/// The processor must have the instructions, and `out` be as for [`multiply`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn some_rows<const TILES: usize>(
    first: usize,
    rows: &[Block],
    [columns, next]: [&[Block]; 2],
    (size, terms): ([usize; 2], usize),
    (alpha, out): (f32, Output<RawTile<'_>>),
    ahead: &mut Ahead<'_>,
) {
    let mut held = [[_mm512_setzero_ps(); TILES]; ROWS];
    let mut left = terms.div_ceil(2);
    for ((rows, columns), next) in rows.iter().zip(columns).zip(next) {
        let rows = rows.rows::<ROWS>(first);
        let to_fetch = next.rows::<ROWS>(first);
        let pairs = left.min(PAIRS);
        left -= pairs;
        for pair in 0..pairs {
            if pair % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(to_fetch[pair / 2].as_ptr().cast());
            }
            ahead.fetch();
            let mut of_tiles = [_mm512_setzero_si512(); TILES];
            for (words, tile) in of_tiles.iter_mut().zip(&columns.0) {
                // SAFETY: 16 words, aligned like a tile.
                *words = unsafe { _mm512_load_si512(tile.0[pair].as_ptr().cast()) };
            }
            for (held, row) in held.iter_mut().zip(rows) {
                let both = _mm512_set1_epi32(row[pair].cast_signed());
                for (held, words) in held.iter_mut().zip(of_tiles) {
                    // SAFETY: all are 512 bits.
                    let [both, words] =
                        unsafe { transmute::<[__m512i; 2], [__m512bh; 2]>([both, words]) };
                    *held = _mm512_dpbf16_ps(*held, both, words);
                }
            }
        }
    }
    let alpha = _mm512_set1_ps(alpha);
    for (row, held) in (first..size[0]).zip(held) {
        for (tile, held) in held.into_iter().enumerate() {
            let to = out.values.row(row).wrapping_add(16 * tile);
            let lanes = lanes(size[1] - 16 * tile);
            let mut values = _mm512_mul_ps(alpha, held);
            // SAFETY: the lanes are columns of `out`.
            unsafe {
                if out.add {
                    values = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), values);
                }
                _mm512_mask_storeu_ps(to, lanes, values);
            }
        }
    }
}
