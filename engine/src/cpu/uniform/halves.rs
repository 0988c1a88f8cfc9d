//! Philox with AVX-512, on lanes of 64 bits of which the lower halves count. The lower half of a
//! product is a word as it is: even and odd lanes of 32 bits are joined once, after all rounds, and
//! not after each product.

use std::any::Any;
use std::arch::x86_64::__m512i;

use pulp::Simd;
use pulp::core_arch::x86::Avx512f;
use pulp::x86::V4;
use spd_draws::{MULTIPLIERS, ROUNDS};

use super::{VECTORS, Word};

/// [`rounds`](super::rounds) on vectors of AVX-512; `None` on others.
#[inline(always)]
pub(super) fn rounds<S: Simd>(
    simd: S,
    words: [Word<S>; 4],
    keys: &[[u32; 2]; ROUNDS],
) -> Option<[Word<S>; 4]> {
    let simd = (&simd as &dyn Any).downcast_ref::<V4>()?.avx512f;
    let mut words: [[__m512i; VECTORS]; 4] = bytemuck::cast(words);
    let [m0, m1] = MULTIPLIERS;
    let [m0, m1] = [splat(simd, m0), splat(simd, m1)];
    let mut halves = [[m0; 2 * VECTORS]; 4];
    for (halves, [first, second]) in halves.iter_mut().zip(words) {
        *halves = [first, upper(simd, first), second, upper(simd, second)];
    }
    for [k0, k1] in keys {
        let [k0, k1] = [splat(simd, *k0), splat(simd, *k1)];
        let [w0, w1, w2, w3] = halves;
        for at in 0..2 * VECTORS {
            let product0 = simd._mm512_mul_epu32(m0, w0[at]);
            let product1 = simd._mm512_mul_epu32(m1, w2[at]);
            let [high0, high1] = [upper(simd, product0), upper(simd, product1)];
            halves[0][at] = simd._mm512_xor_si512(simd._mm512_xor_si512(high1, w1[at]), k0);
            halves[1][at] = product1;
            halves[2][at] = simd._mm512_xor_si512(simd._mm512_xor_si512(high0, w3[at]), k1);
            halves[3][at] = product0;
        }
    }
    for (word, halves) in words.iter_mut().zip(halves) {
        for (word, [even, odd]) in word.iter_mut().zip(halves.as_chunks().0) {
            // LLVM merges a shift with the multiplication, into a slower one.
            let odd = simd._mm512_shuffle_epi32::<0b10_10_00_00>(*odd);
            *word = simd._mm512_mask_blend_epi32(0xaaaa, *even, odd);
        }
    }
    Some(bytemuck::cast(words))
}

/// The odd lanes of 32 bits in the place of the even ones.
#[inline(always)]
fn upper(simd: Avx512f, lanes: __m512i) -> __m512i {
    simd._mm512_shuffle_epi32::<0b11_11_01_01>(lanes)
}

#[inline(always)]
fn splat(simd: Avx512f, word: u32) -> __m512i {
    simd._mm512_set1_epi32(word.cast_signed())
}
