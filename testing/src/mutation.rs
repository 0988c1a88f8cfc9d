//! Corrupted bytes, for readers of foreign files.
//!
//! The suite tries some in seconds. With `SPD_FUZZ_MINUTES=10` each test runs for ten minutes.

use std::env;
use std::time::{Duration, Instant};

/// The rounds of a test: `in_suite` of them, or as many as start within `SPD_FUZZ_MINUTES`.
///
/// # Panics
///
/// When `SPD_FUZZ_MINUTES` is not a number.
pub fn rounds(in_suite: u64) -> impl Iterator<Item = u64> {
    let minutes = env::var("SPD_FUZZ_MINUTES").ok();
    let minutes = minutes.map(|minutes| {
        let minutes = minutes.parse::<f64>().ok();
        let limit = minutes.and_then(|minutes| Duration::try_from_secs_f64(60.0 * minutes).ok());
        limit.expect("SPD_FUZZ_MINUTES is a number of minutes")
    });
    let started = Instant::now();
    (0..).take_while(move |round| match minutes {
        Some(limit) => started.elapsed() < limit,
        None => *round < in_suite,
    })
}

/// Random numbers for corruption, the same in every run: xorshift.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Seeds the generator.
    pub fn new(seed: u64) -> Self {
        // A state of zeros would stay one.
        Self(seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap_or_default()
    }

    /// An element of a slice that is not empty.
    pub fn one<'t, T>(&mut self, of: &'t [T]) -> &'t T {
        &of[self.below(of.len())]
    }

    /// The bytes with a few changed, removed or repeated.
    pub fn mutated(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..=self.below(4) {
            if bytes.is_empty() {
                break;
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes[at] = *self.one(&[0, 0xff, b'9', b'.', b'R', b'"', b'-']),
                2 => bytes[at] ^= 1 << self.below(8),
                3 => {
                    let end = (at + self.below(20)).min(bytes.len());
                    bytes.extend_from_within(at..end);
                }
                // An integer of two, four or eight bytes that is very large, or -1.
                4 => {
                    let end = (at + *self.one(&[2, 4, 8])).min(bytes.len());
                    let high = *self.one(&[0x7f, 0x80, 0xff]);
                    bytes[at..end].fill(0xff);
                    bytes[end - 1] = high;
                }
                _ => _ = bytes.remove(at),
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let all = |seed| {
            let mut dice = Dice::new(seed);
            let bytes = (0..100).map(|_| dice.mutated(b"some bytes of a file"));
            bytes.collect::<Vec<_>>()
        };
        assert_eq!(all(0), all(0));
        assert_ne!(all(0), all(1));
        let changed = all(0);
        assert!(
            changed
                .iter()
                .filter(|bytes| *bytes != b"some bytes of a file")
                .count()
                > 90
        );
        assert!(changed.iter().any(Vec::is_empty) || changed.iter().any(|bytes| bytes.len() > 20));
    }
}
