//! Philox 4x32-10: ten rounds of two multiplications that turn a counter and a key into four words.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Counters that [`uniform_lanes`] turns at once: a vector register of 32-bit words, or half of one.
pub const LANES: usize = 8;

/// The four words of one counter.
#[inline(always)]
pub fn block(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut words = Words::new(counter);
    for key in keys(seed) {
        words.turn(key);
    }
    words.get()
}

/// A word as a number in `[0, 1)`: its upper 24 bits, all that an f32 in that range can hold evenly.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    // The signed conversion is exact for 24 bits, and is one instruction where the unsigned one is not.
    (word >> 8).cast_signed() as f32 * (1.0 / 16_777_216.0)
}

/// Draws of `LANES` consecutive blocks of one row: columns `4 * first_block` and on, in order.
///
/// The same numbers as [`block`]; written lane by lane so that it compiles to vector instructions when
/// it is inlined into a function that may use them (on AVX2 a nanosecond a number, four when it does not).
#[inline(always)]
pub fn uniform_lanes(
    seed: u64,
    first_block: u32,
    row: u32,
    what: u32,
    step: u32,
    out: &mut [f32; 4 * LANES],
) {
    let (columns, _) = out.as_chunks_mut::<4>();
    for (lane, four) in (0..).zip(columns) {
        *four = block(seed, [first_block.wrapping_add(lane), row, what, step]).map(uniform);
    }
}

/// The state of one counter in 64-bit lanes, whose upper halves hold anything: what a vector multiplication reads
/// and what it makes. Words 0 and 2 are multiplied, 1 and 3 are not.
#[derive(Clone, Copy)]
struct Words {
    even: [u64; 2],
    odd: [u64; 2],
}

impl Words {
    #[inline(always)]
    fn new(counter: [u32; 4]) -> Self {
        let [w0, w1, w2, w3] = counter.map(u64::from);
        Self {
            even: [w0, w2],
            odd: [w1, w3],
        }
    }

    /// One round.
    #[inline(always)]
    fn turn(&mut self, key: [u32; 2]) {
        let product = |word: usize| low(self.even[word]) * u64::from(MULTIPLIERS[word]);
        // The upper half of each product goes to the other word.
        let products = [product(1), product(0)];
        for word in 0..2 {
            self.even[word] = (products[word] >> 32) ^ self.odd[word] ^ u64::from(key[word]);
        }
        self.odd = products;
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the upper halves are left behind"
    )]
    fn get(&self) -> [u32; 4] {
        let Self { even, odd } = self;
        [even[0], odd[0], even[1], odd[1]].map(|word| word as u32)
    }
}

#[inline(always)]
fn low(word: u64) -> u64 {
    word & u64::from(u32::MAX)
}

/// The key of each round.
#[inline(always)]
fn keys(seed: u64) -> impl Iterator<Item = [u32; 2]> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the two halves of the seed"
    )]
    let mut next = [seed as u32, (seed >> 32) as u32];
    (0..ROUNDS).map(move |_| {
        let key = next;
        next = [
            next[0].wrapping_add(KEY_STEPS[0]),
            next[1].wrapping_add(KEY_STEPS[1]),
        ];
        key
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Known answers of the authors' Random123 library, `kat_vectors`, philox4x32 with 10 rounds.
    #[test]
    fn published_vectors() {
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
    fn lanes_are_blocks() {
        let mut out = [0.0; 4 * LANES];
        uniform_lanes(77, 5, 6, 7, 8, &mut out);
        for (index, four) in (0u32..).zip(out.chunks(4)) {
            let words = block(77, [5 + index, 6, 7, 8]).map(uniform);
            assert_eq!(
                four.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                words.map(f32::to_bits)
            );
        }
    }

    #[test]
    fn the_largest_word_stays_below_one() {
        assert!(uniform(u32::MAX) < 1.0);
        assert_eq!(uniform(0).to_bits(), 0f32.to_bits());
    }
}
