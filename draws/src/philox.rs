//! Philox 4x32-10: ten rounds of two multiplications that turn a counter and a key into four words.

/// Factors of words 0 and 2 of a counter in each round.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Number of rounds.
pub const ROUNDS: usize = 10;

/// The four words of one counter.
#[inline(always)]
pub fn block(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut words = counter;
    for [key0, key1] in keys(seed) {
        let [w0, w1, w2, w3] = words;
        let (low0, high0) = product(w0, MULTIPLIERS[0]);
        let (low1, high1) = product(w2, MULTIPLIERS[1]);
        words = [high1 ^ w1 ^ key0, low1, high0 ^ w3 ^ key1, low0];
    }
    words
}

/// Lower and upper half.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the halves of the product")]
fn product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    (product as u32, (product >> 32) as u32)
}

/// The key of each round.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves of the seed"
)]
pub fn keys(seed: u64) -> [[u32; 2]; ROUNDS] {
    let mut next = [seed as u32, (seed >> 32) as u32];
    let mut keys = [next; ROUNDS];
    for key in &mut keys {
        *key = next;
        next = [
            next[0].wrapping_add(KEY_STEPS[0]),
            next[1].wrapping_add(KEY_STEPS[1]),
        ];
    }
    keys
}

/// A word as a number in `[0, 1)`: its upper 24 bits, the most that an f32 can hold at an even
/// spacing.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    // The signed conversion is exact for 24 bits; it is one instruction, the unsigned one is
    // several.
    (word >> 8).cast_signed() as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Known answers of the authors' Random123 library, `kat_vectors`, philox4x32 with 10 rounds.
    #[test]
    fn published_test_vectors_agree() {
        let key = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        assert_eq!(
            block(0, [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            block(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            block(
                key(0xa409_3822, 0x299f_31d0),
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn the_largest_word_stays_below_one() {
        assert!(uniform(u32::MAX) < 1.0);
        assert_eq!(uniform(0).to_bits(), 0f32.to_bits());
    }
}
