//! Sums of products with AVX512_BF16: `vdpbf16ps` adds two products to each of 16 sums.
#![expect(unsafe_code, reason = "instructions that not every processor has")]

use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_load_si512,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_store_ps,
};
use std::mem::transmute;

use super::Sums;
use super::tile::{Block, SIDE};

/// Rows whose sums are held in registers: two vectors of 16 columns each.
const ROWS: usize = 8;

/// Pairs of terms in a block.
const PAIRS: usize = SIDE / 2;

/// Whether this processor has the instruction.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// Sums over so many terms for the first rows and columns; the other sums are not computed. It
/// fetches the second set of columns meanwhile: a factor that was packed in advance is not in a
/// cache yet.
///
/// # Panics
///
/// When the processor does not have the instruction.
pub(super) fn multiply(
    rows: &[Block],
    columns: [&[Block]; 2],
    size: [usize; 2],
    terms: usize,
    sums: &mut Sums,
) {
    assert!(is_there(), "AVX512_BF16");
    for first in (0..size[0]).step_by(ROWS) {
        // SAFETY: the processor has the instructions.
        unsafe {
            match size[1] {
                ..=16 => some_rows::<1>(first, rows, columns, terms, sums),
                _ => some_rows::<2>(first, rows, columns, terms, sums),
            }
        }
    }
}

/// Rows from `first` on, and the columns of so many tiles.
///
/// # Safety
///
/// The processor must have the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn some_rows<const TILES: usize>(
    first: usize,
    rows: &[Block],
    [columns, next]: [&[Block]; 2],
    terms: usize,
    sums: &mut Sums,
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
    for (held, sums) in held.into_iter().zip(&mut sums.0[first..]) {
        for (held, sums) in held.into_iter().zip(sums.as_chunks_mut::<16>().0) {
            // SAFETY: 16 sums, aligned like all sums.
            unsafe { _mm512_store_ps(sums.as_mut_ptr(), held) };
        }
    }
}
