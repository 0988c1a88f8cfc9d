//! The order of samples: a shuffle that is computed, not stored.
//!
//! Each epoch visits every sample once, in the order of a keyed permutation of the sample numbers.
//! The permutation is a Feistel network: a number is cut into two halves, and each round changes
//! one half by a keyed function of the other. Each round can be undone, so no two numbers collide.
//! The network permutes `0 .. 4^k`, the smallest such range that holds all samples; a result beyond
//! the last sample goes through the network again until it is a sample ("cycle walking", Black and
//! Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), less than four times on average.

use std::num::NonZero;

use spd_draws::{Purpose, Stream, block};

const ROUNDS: usize = 8;
/// Least bits of a half: with fewer, eight rounds reach too few of the permutations.
const MIN_HALF_BITS: u32 = 3;

/// The order of a run's samples over all epochs: a function of the seed, in constant memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    samples: NonZero<u64>,
    half_bits: u32,
}

impl Order {
    /// The order of `samples` samples.
    pub fn new(seed: u64, samples: NonZero<u64>) -> Self {
        let bits = u64::BITS - (samples.get() - 1).leading_zeros();
        Self {
            seed,
            samples,
            half_bits: bits.div_ceil(2).max(MIN_HALF_BITS),
        }
    }

    /// The sample at a position: epoch `position / samples`, place `position % samples` in it.
    pub fn at(&self, position: u64) -> u64 {
        self.epoch(position / self.samples)
            .at(position % self.samples)
    }

    /// One pass over all samples.
    pub fn epoch(&self, number: u64) -> Epoch {
        Epoch {
            order: *self,
            number,
            keys: self.keys(number),
        }
    }

    /// The epoch of a position; `epoch` itself if the position is in it.
    pub(crate) fn epoch_at(&self, position: u64, epoch: Option<Epoch>) -> Epoch {
        let number = position / self.samples;
        epoch
            .filter(|epoch| epoch.number == number && epoch.order == *self)
            .unwrap_or_else(|| self.epoch(number))
    }

    /// The key of each round.
    fn keys(&self, epoch: u64) -> [u64; ROUNDS] {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the two halves of the epoch"
        )]
        let (low, high) = (epoch as u32, (epoch >> 32) as u32);
        let what = Stream::new(Purpose::Order, 0, 0).word();
        let mut keys = [0; ROUNDS];
        for (pair, two) in (0_u32..).zip(keys.chunks_mut(2)) {
            let [a, b, c, d] = block(self.seed, [pair, high, what, low]).map(u64::from);
            two.copy_from_slice(&[a << 32 | b, c << 32 | d]);
        }
        keys
    }
}

/// The order of one epoch. Its keys are derived once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    order: Order,
    number: u64,
    keys: [u64; ROUNDS],
}

impl Epoch {
    /// The sample at a place, which is below the number of samples.
    pub fn at(&self, place: u64) -> u64 {
        let mut sample = place;
        loop {
            sample = self.permute(sample);
            if sample < self.order.samples.get() {
                return sample;
            }
        }
    }

    /// One pass of the network over `0 .. 4^half_bits`.
    fn permute(&self, number: u64) -> u64 {
        let half_bits = self.order.half_bits;
        let mask = (1 << half_bits) - 1;
        let (mut left, mut right) = (number >> half_bits, number & mask);
        for key in self.keys {
            // The upper bits of the product are the best mixed ones.
            let change = mix(right ^ key) >> (u64::BITS - half_bits);
            (left, right) = (right, left ^ change);
        }
        left << half_bits | right
    }
}

/// David Stafford's "mix 13" finalizer: every bit of the result depends on every bit of `x`.
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn order(seed: u64, samples: u64) -> Order {
        Order::new(seed, NonZero::new(samples).unwrap())
    }

    fn epoch(order: Order, number: u64) -> Vec<usize> {
        let epoch = order.epoch(number);
        (0..order.samples.get())
            .map(|place| usize::try_from(epoch.at(place)).unwrap())
            .collect()
    }

    // Two epochs, so that one is left for the other and returned to.
    #[test]
    fn kept_epoch_gives_the_same_samples() {
        let orders = [order(3, 10), order(4, 10)];
        let mut kept = None;
        for position in (0..40).chain([39, 0, 20]) {
            for order in orders {
                let epoch = order.epoch_at(position, kept);
                assert_eq!(epoch.at(position % 10), order.at(position), "{position}");
                kept = Some(epoch);
            }
        }
    }

    #[test]
    fn every_epoch_visits_every_sample_once() {
        for samples in 1..2000 {
            for seed in [0, 1, u64::MAX] {
                let visits = epoch(order(seed, samples), seed % 3);
                let mut seen = vec![false; visits.len()];
                for sample in visits {
                    assert!(
                        !seen[sample],
                        "{samples} samples, seed {seed}: {sample} twice"
                    );
                    seen[sample] = true;
                }
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let orders = [
            epoch(order(0, 1000), 0),
            epoch(order(0, 1000), 1),
            epoch(order(1, 1000), 0),
            epoch(order(0, 1000), 1 << 32),
            epoch(order(1 << 32, 1000), 0),
        ];
        for (a, first) in orders.iter().enumerate() {
            for (b, second) in orders.iter().enumerate().skip(a + 1) {
                let same = first.iter().zip(second).filter(|(x, y)| x == y).count();
                // Two random permutations agree in one place on average, practically never in more
                // than 10.
                assert!(same <= 10, "orders {a} and {b} agree in {same} places");
            }
        }
    }

    // For a fair shuffle the statistic has the mean `(n - 1)^2`, its degrees of freedom, and twice
    // that as its variance; the bound is six standard deviations.
    #[test]
    fn every_sample_comes_equally_often_at_every_place() {
        for (samples, n) in [(2, 2), (3, 3), (5, 5), (8, 8), (17, 17), (64, 64)] {
            let epochs = 400 * samples;
            let mut counts = vec![0_f64; n * n];
            for number in 0..epochs {
                for (place, sample) in epoch(order(7, samples), number).into_iter().enumerate() {
                    counts[place * n + sample] += 1.0;
                }
            }
            let statistic: f64 = counts
                .iter()
                .map(|count| (count - 400.0).powi(2) / 400.0)
                .sum();
            let freedom = ((n - 1) * (n - 1)) as f64;
            let limit = 6.0 * (2.0 * freedom).sqrt();
            assert!(
                (statistic - freedom).abs() < limit,
                "{samples} samples: {statistic} for {freedom}"
            );
        }
    }

    // Four samples have 24 orders; 24,000 epochs make 1,000 each, with 23 degrees of freedom.
    #[test]
    fn all_orders_of_four_samples_are_equally_likely() {
        let mut counts = BTreeMap::new();
        for number in 0..24_000 {
            *counts.entry(epoch(order(11, 4), number)).or_insert(0_f64) += 1.0;
        }
        let statistic: f64 = counts
            .values()
            .map(|count| (count - 1000.0).powi(2) / 1000.0)
            .sum();
        assert_eq!(counts.len(), 24);
        assert!(statistic < 23.0 + 6.0 * 46_f64.sqrt(), "{statistic}");
    }

    // The correlation of neighbours has a standard error of 1 / sqrt(n); the bound is five of them.
    #[test]
    fn neighbours_are_unrelated() {
        let n = 40_000_u64;
        for seed in 0..20 {
            let places: Vec<f64> = epoch(order(seed, n), 0)
                .into_iter()
                .map(|s| s as f64 / n as f64 - 0.5)
                .collect();
            let sum: f64 = places.windows(2).map(|pair| pair[0] * pair[1]).sum();
            let correlation = sum * 12.0 / n as f64;
            assert!(
                correlation.abs() < 5.0 / (n as f64).sqrt(),
                "seed {seed}: {correlation}"
            );
        }
    }

    #[test]
    fn sixteen_billion_samples_need_no_more_memory_than_one() {
        for samples in [(1 << 34) - 1, 1 << 34, (1 << 34) + 1, u64::MAX] {
            let order = order(5, samples);
            let places = (0..20_000_u64).map(|i| i.wrapping_mul(samples / 20_000));
            let seen: BTreeSet<u64> = places.map(|position| order.at(position)).collect();
            assert_eq!(seen.len(), 20_000, "{samples} samples");
            assert!(seen.iter().all(|&sample| sample < samples));
            // Both halves of the range are met equally often: 10,000 times, with a standard error
            // of 71.
            let low = seen.iter().filter(|&&sample| sample < samples / 2).count();
            assert!(low.abs_diff(10_000) < 425, "{samples} samples: {low}");
        }
    }

    #[test]
    fn the_last_position_has_a_sample() {
        assert_eq!(order(0, 1).at(u64::MAX), 0);
        assert!(order(0, 3).at(u64::MAX) < 3);
        assert!(order(0, u64::MAX).at(u64::MAX) < u64::MAX);
    }
}
