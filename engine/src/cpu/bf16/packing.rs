//! Packs tiles with AVX512_BF16, which rounds 32 numbers by one instruction.
#![expect(unsafe_code, reason = "instructions that not every processor has")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_cvtne2ps_pbh, _mm512_loadu_si512,
    _mm512_maskz_loadu_ps, _mm512_permutexvar_epi16, _mm512_setzero_si512, _mm512_shuffle_i32x4,
    _mm512_storeu_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};
use std::mem::transmute;
use std::ops::Range;

use super::avx512::{self, lanes};
use super::tile::{Order, SIDE, Tile};
use crate::cpu::shape::Strided;

/// Words of two vectors of bf16, the first of them in the lower halves.
const INTERLEAVED: [u16; 32] = {
    let mut places = [0; 32];
    let mut word = 0u16;
    while word < 16 {
        places[2 * word as usize] = word;
        places[2 * word as usize + 1] = 16 + word;
        word += 1;
    }
    places
};

/// Fills a tile with up to 16 lines and [`SIDE`] terms of a matrix; all else of it is 0. `false`, and
/// nothing is done, if the processor does not have the instructions, or neither lines nor terms of
/// the matrix are contiguous. Numbers below 2^-126 become 0, as they are in products.
///
/// # Panics
///
/// When the matrix is smaller, or there are more lines or terms than in a tile.
pub(super) fn fill(
    tile: &mut Tile,
    matrix: Strided<'_>,
    of_tile: [&Range<usize>; 2],
    order: Order,
) -> bool {
    let is_there = avx512::is_there() && is_x86_feature_detected!("avx512bw");
    let fills = is_there && (matrix.column == 1 || matrix.row == 1);
    if fills {
        // SAFETY: the processor has the instructions.
        unsafe { words(&mut tile.0, matrix, of_tile, order) };
    }
    fills
}

/// Fills the words of a tile.
///
/// # Safety
///
/// The processor must have the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn words(
    tile: &mut [[u32; 16]; 16],
    matrix: Strided<'_>,
    [lines, terms]: [&Range<usize>; 2],
    order: Order,
) {
    let [of_lines, of_terms] = [lines.len(), terms.len()];
    assert!(of_lines <= 16 && of_terms <= SIDE, "at most a tile");
    if of_lines == 0 || of_terms == 0 {
        *tile = [[0; 16]; 16];
        return;
    }
    let by_line = matrix.column == 1;
    let (apart, stride, adjacent) = match by_line {
        true => (lines, matrix.row, terms),
        false => (terms, matrix.column, lines),
    };
    let place = |line: usize| matrix.line(line, stride) + adjacent.start;
    let last = match matrix.listed {
        None => apart.end - 1,
        Some(listed) => listed[apart.clone()]
            .iter()
            .fold(0, |last, &line| last.max(line)) as usize,
    };
    assert!(
        stride * last + adjacent.end <= matrix.values.len(),
        "{last} times {stride} and {adjacent:?} of {}",
        matrix.values.len()
    );
    let start = matrix.values.as_ptr();
    let load = |at: usize, count: usize| {
        // SAFETY: the lanes of the mask are elements up to the last one, and no other is read.
        unsafe { _mm512_maskz_loadu_ps(lanes(count), start.wrapping_add(at)) }
    };
    let (natural, filled) = if by_line {
        for (line, words) in lines.clone().zip(&mut *tile) {
            let at = place(line);
            prefetch(start.wrapping_add(at + AHEAD[0]));
            prefetch(start.wrapping_add(at + AHEAD[0] + 16));
            let low = load(at, of_terms);
            let high = load(at + 16, of_terms.saturating_sub(16));
            store(words, rounded(low, high));
        }
        (Order::ByLine, of_lines)
    } else {
        assert_eq!(matrix.row, 1, "contiguous lines or terms");
        // SAFETY: 32 numbers of 16 bits.
        let places = unsafe { _mm512_loadu_si512(INTERLEAVED.as_ptr().cast()) };
        for (term, words) in terms.clone().step_by(2).zip(&mut *tile) {
            let is_there = term + 1 < terms.end;
            let [first, second] = [term, term + usize::from(is_there)].map(place);
            prefetch(start.wrapping_add(first + AHEAD[1]));
            prefetch(start.wrapping_add(second + AHEAD[1]));
            let low = load(first, of_lines);
            let high = load(second, if is_there { of_lines } else { 0 });
            store(words, _mm512_permutexvar_epi16(places, rounded(low, high)));
        }
        (Order::ByTerm, of_terms.div_ceil(2))
    };
    tile[filled..].fill([0; 16]);
    if natural != order {
        // A closure of `map` would be a call.
        let mut rows = [_mm512_setzero_si512(); 16];
        for (row, words) in rows.iter_mut().zip(&*tile) {
            // SAFETY: both are 16 words.
            *row = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
        }
        for (tile, words) in tile.iter_mut().zip(transposed(rows)) {
            store(tile, words);
        }
    }
}

/// Writes a row of a tile.
#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [u32; 16], words: __m512i) {
    // SAFETY: both are 16 words.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
}

/// Elements between a load and the prefetch beside it: along terms, and along lines.
const AHEAD: [usize; 2] = [64, 32];

#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(at: *const f32) {
    _mm_prefetch::<_MM_HINT_T0>(at.cast());
}

/// The numbers of `low`, then those of `high`, to the nearest bf16, ties to even.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rounded(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both are 512 bits.
    unsafe { transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rows become columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Pairs of rows, then of pairs: blocks of 4 by 4 within each quarter.
    let mut pairs = rows;
    for (pairs, rows) in pairs
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .zip(rows.as_chunks::<2>().0)
    {
        *pairs = [
            _mm512_unpacklo_epi32(rows[0], rows[1]),
            _mm512_unpackhi_epi32(rows[0], rows[1]),
        ];
    }
    let mut fours = pairs;
    for (fours, pairs) in fours
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(pairs.as_chunks::<4>().0)
    {
        *fours = [
            _mm512_unpacklo_epi64(pairs[0], pairs[2]),
            _mm512_unpackhi_epi64(pairs[0], pairs[2]),
            _mm512_unpacklo_epi64(pairs[1], pairs[3]),
            _mm512_unpackhi_epi64(pairs[1], pairs[3]),
        ];
    }
    // `fours[4 b + i]` has, in quarter `q`, column `4 q + i` of rows `4 b` to `4 b + 3`.
    let mut columns = fours;
    for i in 0..4 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|block| fours[4 * block + i]);
        let [low_ab, high_ab] = [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
        ];
        let [low_cd, high_cd] = [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d),
        ];
        columns[i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low_ab, low_cd);
        columns[8 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low_ab, low_cd);
        columns[4 + i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(high_ab, high_cd);
        columns[12 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(high_ab, high_cd);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::random;

    // The same words, of every layout, whole tiles and parts of one, and of numbers that are not
    // finite.
    #[test]
    fn tiles_are_those_of_any_processor() {
        let mut values = random(&[40 * 70], 1).values;
        values[3] = f32::NAN;
        values[75] = f32::INFINITY;
        values[142] = -f32::MAX;
        let none = Tile([[u32::MAX; 16]; 16]);
        let matrices = [Strided::rows(&values, 70), Strided::rows(&values, 40).t()];
        let [lines, terms] = [40, 70].map(|len| (0..len).map(|i| 7 * i % 39).collect::<Vec<u32>>());
        let listed = matrices.into_iter().zip([&lines[..], &terms]);
        let listed = listed.map(|(matrix, listed)| Strided {
            listed: Some(listed),
            ..matrix
        });
        for matrix in matrices.into_iter().chain(listed) {
            for (lines, terms) in [
                (0..16, 0..32),
                (1..17, 2..34),
                (3..3, 0..32),
                (20..33, 39..70),
            ] {
                for order in [Order::ByLine, Order::ByTerm] {
                    let (mut found, mut expected) = (none, none);
                    if !fill(&mut found, matrix, [&lines, &terms], order) {
                        return spd_testing::skip("a machine with AVX512_BF16");
                    }
                    expected.fill(matrix, lines.clone(), terms.clone(), order);
                    assert_eq!(found.0, expected.0, "{lines:?} {terms:?} {order:?}");
                }
            }
        }
        let both = Strided {
            values: &values,
            row: 2,
            column: 80,
            listed: None,
        };
        assert!(!fill(
            &mut none.clone(),
            both,
            [&(0..2), &(0..2)],
            Order::ByLine
        ));
    }
}
