//! Sums of products with AVX512_BF16: `vdpbf16ps` adds two products to each of 16 sums.
#![expect(unsafe_code, reason = "instructions that not every processor has")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_load_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_store_ps,
};
use std::mem::transmute;

use super::Sums;
use super::tile::{Block, SIDE};

/// Rows whose sums are held in registers: two vectors of 16 columns each.
const ROWS: usize = 8;

/// Whether this processor has the instruction.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// # Panics
///
/// When the processor does not have the instruction.
pub(super) fn multiply(rows: &[Block], columns: &[Block], sums: &mut Sums) {
    assert!(is_there(), "AVX512_BF16");
    for first in (0..SIDE).step_by(ROWS) {
        // SAFETY: the processor has the instructions.
        unsafe { some_rows(first, rows, columns, sums) };
    }
}

/// # Safety
///
/// The processor must have the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn some_rows(first: usize, rows: &[Block], columns: &[Block], sums: &mut Sums) {
    let mut held = [[_mm512_setzero_ps(); 2]; ROWS];
    for (rows, columns) in rows.iter().zip(columns) {
        let rows = rows.rows::<ROWS>(first);
        for pair in 0..16 {
            let columns = [0, 1].map(|half| {
                let words = &columns.0[half].0[pair];
                // SAFETY: 16 words, aligned like a tile.
                let words = unsafe { _mm512_load_si512(words.as_ptr().cast()) };
                // SAFETY: both are 512 bits.
                unsafe { transmute::<__m512i, __m512bh>(words) }
            });
            for (held, row) in held.iter_mut().zip(rows) {
                let both = _mm512_set1_epi32(row[pair].cast_signed());
                // SAFETY: both are 512 bits.
                let both = unsafe { transmute::<__m512i, __m512bh>(both) };
                for (held, columns) in held.iter_mut().zip(columns) {
                    *held = _mm512_dpbf16_ps(*held, both, columns);
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
