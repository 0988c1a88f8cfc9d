//! Generated features for the toy models: sparse vectors, each a new one.

use std::collections::BTreeSet;

use spd_draws::{Purpose, Stream};

use crate::DataError;

/// Draws the value of a feature.
const VALUE: Stream = Stream::new(Purpose::Features, 0, 0);
/// Draws which features are on.
const GATE: Stream = Stream::new(Purpose::Features, 1, 0);

/// Rows of sparse features: some are on, with values uniform in `[low, high)`, the others are 0.
///
/// A row is a function of the seed and its number. Which features are on:
///
/// | made by | on | also known as |
/// |---|---|---|
/// | [`new`](Self::new) | each independently, with a probability | "at least zero active" |
/// | `new`, [`synced`](Self::synced) | a group, if any of it is by itself | "synced inputs" |
/// | [`exactly`](Self::exactly) | a uniformly random subset of `k` | "exactly k active" |
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    features: u32,
    active: Active,
    low: f64,
    high: f64,
}

#[derive(Debug, Clone, PartialEq)]
enum Active {
    /// The features of a group share the smallest of their gates, so all of them are on if one is.
    ByChance {
        probability: f64,
        groups: Vec<Vec<usize>>,
    },
    Exactly(u32),
}

impl Features {
    /// Rows of `features` values, each on with `probability`.
    ///
    /// # Errors
    ///
    /// When there is no feature, `probability` is outside of `[0, 1]`, or `low` is not below `high`
    /// (as f32, both finite).
    pub fn new(features: usize, probability: f64, low: f64, high: f64) -> Result<Self, DataError> {
        let active = Active::ByChance {
            probability,
            groups: Vec::new(),
        };
        let features = Self::checked(features, active, low, high)?;
        if !(0.0..=1.0).contains(&probability) {
            return refuse(format!(
                "feature probability is {probability}, must be in [0, 1]"
            ));
        }
        Ok(features)
    }

    /// Rows of `features` values of which `k` are on.
    ///
    /// # Errors
    ///
    /// When there is no feature, `k` is above their number, or `low` is not below `high` (as f32,
    /// both finite).
    pub fn exactly(features: usize, k: usize, low: f64, high: f64) -> Result<Self, DataError> {
        let mut made = Self::checked(features, Active::Exactly(0), low, high)?;
        match u32::try_from(k) {
            Ok(k) if k <= made.features => made.active = Active::Exactly(k),
            _ => {
                return refuse(format!(
                    "{k} of {features} features were asked to be on; at most all can be"
                ));
            }
        }
        Ok(made)
    }

    /// Turns all features of a group on if one of them is, each with its own value.
    ///
    /// - `groups`: features by number, from 0
    ///
    /// # Errors
    ///
    /// When the number of features that are on is fixed, or a group names a feature that does not
    /// exist or is in a group already.
    pub fn synced(mut self, groups: &[Vec<usize>]) -> Result<Self, DataError> {
        let mut seen = BTreeSet::new();
        for &feature in groups.iter().flatten() {
            if feature >= self.width() {
                return refuse(format!(
                    "synced inputs name feature {feature}, the last is {}",
                    self.width() - 1
                ));
            }
            if !seen.insert(feature) {
                return refuse(format!(
                    "synced inputs name feature {feature} twice; a feature is in one group"
                ));
            }
        }
        match &mut self.active {
            Active::ByChance { groups: own, .. } => groups.clone_into(own),
            Active::Exactly(_) if groups.is_empty() => {}
            Active::Exactly(_) => {
                return refuse(
                    "synced inputs go with a feature probability, not with a number of features"
                        .to_owned(),
                );
            }
        }
        Ok(self)
    }

    fn checked(features: usize, active: Active, low: f64, high: f64) -> Result<Self, DataError> {
        let count = match u32::try_from(features) {
            Ok(count) if count > 0 => count,
            _ => {
                return refuse(format!(
                    "{features} features were asked for; 1 to 2^32 - 1 can be made"
                ));
            }
        };
        if !(narrow(low).is_finite() && narrow(high).is_finite() && narrow(low) < narrow(high)) {
            return refuse(format!(
                "feature range is [{low}, {high}): the first must be below the second"
            ));
        }
        Ok(Self {
            features: count,
            active,
            low,
            high,
        })
    }

    /// Number of values of a row.
    pub fn width(&self) -> usize {
        self.features as usize
    }

    /// Makes row number `row`, into `out` of [`Features::width`].
    pub(crate) fn make(&self, seed: u64, row: u64, out: &mut [f32]) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the two halves of the row number"
        )]
        let (row, step) = (row as u32, (row >> 32) as u32);
        // Rounding may give `high`, which is excluded.
        let largest = narrow(self.high).next_down();
        let value = |column: u32| {
            let draw = f64::from(VALUE.uniform(seed, step, row, column));
            narrow(self.low + (self.high - self.low) * draw).min(largest)
        };
        match &self.active {
            Active::ByChance {
                probability,
                groups,
            } => {
                GATE.fill_uniform(seed, step, row, out);
                for group in groups {
                    let least = group.iter().map(|&at| out[at]).fold(1.0, f32::min);
                    group.iter().for_each(|&at| out[at] = least);
                }
                for (column, x) in (0..).zip(out) {
                    let on = f64::from(*x) < *probability;
                    *x = if on { value(column) } else { 0.0 };
                }
            }
            Active::Exactly(k) => {
                out.fill(0.0);
                for column in subset(self.features, *k, |at| GATE.uniform(seed, step, row, at)) {
                    out[column as usize] = value(column);
                }
            }
        }
    }
}

/// `k` different numbers below `n`, each subset equally likely (Floyd's algorithm: one draw a
/// number). A draw has 24 bits, so chances have a relative error of at most `n / 2^24`.
fn subset(n: u32, k: u32, draw: impl Fn(u32) -> f32) -> BTreeSet<u32> {
    let mut chosen = BTreeSet::new();
    for last in n - k..n {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a draw is in [0, 1): its share of the numbers up to `last` is one of them"
        )]
        let any = (f64::from(draw(last)) * (f64::from(last) + 1.0)) as u32;
        if !chosen.insert(any) {
            chosen.insert(last);
        }
    }
    chosen
}

fn refuse<T>(fault: String) -> Result<T, DataError> {
    Err(DataError::Request(fault))
}

#[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
fn narrow(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    // 40,000 values of which a tenth is on: the standard error of the count is 60, of the mean of
    // the 4,000 values on [-1, 1) 0.009; the bounds are five of them.
    #[test]
    fn features_are_on_as_often_as_asked_and_uniform_in_their_range() {
        let features = Features::new(40, 0.1, -1.0, 1.0).unwrap();
        let mut values = vec![0.0; 40_000];
        for (row, out) in (0..).zip(values.chunks_mut(40)) {
            features.make(3, row, out);
        }
        let on: Vec<f64> = values
            .iter()
            .filter(|x| **x != 0.0)
            .map(|&x| x.into())
            .collect();
        assert!(on.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!((on.len() as f64 - 4000.0).abs() < 300.0, "{}", on.len());
        let mean = on.iter().sum::<f64>() / on.len() as f64;
        assert!(mean.abs() < 0.045, "{mean}");
    }

    fn rows(features: &Features, rows: u64) -> Vec<Vec<f32>> {
        let row = |row| {
            let mut out = vec![f32::NAN; features.width()];
            features.make(3, row, &mut out);
            out
        };
        (0..rows).map(row).collect()
    }

    // 30,000 rows of 2 out of 5: each of the ten pairs 3,000 times, with a standard error of 52;
    // the bound is five of them. The mean of 60,000 values on [-1, 1) has a standard error of
    // 0.0024.
    #[test]
    fn exactly_so_many_are_on_and_any_subset_is_as_likely_as_any_other() {
        let features = Features::exactly(5, 2, -1.0, 1.0).unwrap();
        let mut pairs = [0_u32; 25];
        let mut sum = 0.0;
        for row in rows(&features, 30_000) {
            let on: Vec<usize> = (0..5).filter(|&at| row[at] != 0.0).collect();
            let [one, two] = on[..] else {
                panic!("{row:?}")
            };
            pairs[5 * one + two] += 1;
            sum += f64::from(row.iter().sum::<f32>());
            assert!(row.iter().all(|x| (-1.0..1.0).contains(x)));
        }
        let counts: Vec<u32> = pairs.into_iter().filter(|&count| count > 0).collect();
        assert_eq!(counts.len(), 10);
        assert!(
            counts.iter().all(|count| count.abs_diff(3000) < 260),
            "{counts:?}"
        );
        assert!((sum / 60_000.0).abs() < 0.012, "{sum}");
    }

    #[test]
    fn none_and_all_can_be_on() {
        let on = |k| {
            let features = Features::exactly(7, k, 1.0, 2.0).unwrap();
            let rows = rows(&features, 50);
            rows.iter().flatten().filter(|x| **x != 0.0).count()
        };
        assert_eq!((on(0), on(7)), (0, 350));
    }

    // A group of two is on with chance 1 - 0.8^2 = 0.36, one of three with 0.488, and 0.2 without a
    // group: of 20,000 rows 7,200, 9,760 and 4,000, with standard errors of 68, 71 and 57; the
    // bounds are five of them.
    #[test]
    fn a_group_is_on_where_any_of_it_would_be_and_its_values_differ() {
        let features = Features::new(6, 0.2, 0.0, 1.0).unwrap();
        let synced = features
            .clone()
            .synced(&[vec![4, 0], vec![1, 2, 5]])
            .unwrap();
        let mut counts = [0_u32; 6];
        for (alone, row) in rows(&features, 20_000).iter().zip(rows(&synced, 20_000)) {
            let on = |at: usize| u32::from(row[at] != 0.0);
            for (at, count) in counts.iter_mut().enumerate() {
                *count += on(at);
                // A feature that is on by itself keeps its value.
                assert!(alone[at] == 0.0 || alone[at].to_bits() == row[at].to_bits());
            }
            assert_eq!(on(0), on(4));
            assert_eq!((on(1), on(1)), (on(2), on(5)));
            assert!(on(0) == 0 || row[0].to_bits() != row[4].to_bits());
        }
        let near = |count: u32, expected, bound| count.abs_diff(expected) < bound;
        assert!(near(counts[0], 7200, 340), "{counts:?}");
        assert!(near(counts[1], 9760, 355), "{counts:?}");
        assert!(near(counts[3], 4000, 285), "{counts:?}");
    }

    #[test]
    fn rows_beyond_32_bits_are_rows_of_their_own() {
        let features = Features::new(8, 1.0, 0.0, 1.0).unwrap();
        let (mut near, mut far) = ([0.0; 8], [0.0; 8]);
        features.make(3, 5, &mut near);
        features.make(3, 5 + (1 << 32), &mut far);
        assert_ne!(near.map(f32::to_bits), far.map(f32::to_bits));
    }

    #[test]
    fn the_upper_end_is_never_reached() {
        // No f32 lies between 1 and the next f32: only `low` is left.
        let features = Features::new(64, 1.0, 1.0, f64::from(1_f32.next_up())).unwrap();
        let mut out = [0.0; 64];
        features.make(0, 0, &mut out);
        assert_eq!(out.map(f32::to_bits), [1_f32.to_bits(); 64]);
    }

    #[test]
    fn invalid_requests_are_refused_by_name() {
        let text = |request: Result<Features, DataError>| request.unwrap_err().to_string();
        assert_eq!(
            text(Features::new(0, 0.5, 0.0, 1.0)),
            "0 features were asked for; 1 to 2^32 - 1 can be made"
        );
        assert_eq!(
            text(Features::new(5, f64::NAN, 0.0, 1.0)),
            "feature probability is NaN, must be in [0, 1]"
        );
        assert_eq!(
            text(Features::new(5, 0.5, 1.0, 1.0)),
            "feature range is [1, 1): the first must be below the second"
        );
        assert!(
            Features::new(5, 0.5, 0.0, 1e300).is_err(),
            "infinite as f32"
        );
        assert_eq!(
            text(Features::exactly(5, 6, 0.0, 1.0)),
            "6 of 5 features were asked to be on; at most all can be"
        );
        let by_chance = Features::new(5, 0.5, 0.0, 1.0).unwrap();
        let synced = |groups: &[Vec<usize>]| text(by_chance.clone().synced(groups));
        assert_eq!(
            synced(&[vec![0, 5]]),
            "synced inputs name feature 5, the last is 4"
        );
        assert_eq!(
            synced(&[vec![0, 1], vec![2, 1]]),
            "synced inputs name feature 1 twice; a feature is in one group"
        );
        let exactly = Features::exactly(5, 2, 0.0, 1.0).unwrap();
        assert_eq!(exactly.clone().synced(&[]).unwrap(), exactly);
        assert_eq!(
            text(exactly.synced(&[vec![0, 1]])),
            "synced inputs go with a feature probability, not with a number of features"
        );
    }
}
