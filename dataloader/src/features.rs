//! Generated features for the toy models: sparse vectors, no two alike, no file.

use spd_draws::{Purpose, Stream};

use crate::DataError;

/// The draw that is a feature's value.
const VALUE: Stream = Stream::new(Purpose::Features, 0, 0);
/// The draw that says whether a feature is on.
const GATE: Stream = Stream::new(Purpose::Features, 1, 0);

/// Rows of independent features, each on with a probability and then uniform ("at least zero active").
///
/// `x = U[low, high) * Bernoulli(probability)`. A row is a function of the seed and its number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Features {
    features: u32,
    probability: f64,
    low: f64,
    high: f64,
}

impl Features {
    /// Rows of `features` values.
    ///
    /// # Errors
    ///
    /// When there is no feature, `probability` is outside of `[0, 1]`, or `low` is not below `high` (as
    /// f32, both finite).
    pub fn new(features: usize, probability: f64, low: f64, high: f64) -> Result<Self, DataError> {
        let refuse = |fault| Err(DataError::Request(fault));
        let count = match u32::try_from(features) {
            Ok(count) if count > 0 => count,
            _ => {
                return refuse(format!(
                    "{features} features were asked for; 1 to 2^32 - 1 can be made"
                ));
            }
        };
        if !(0.0..=1.0).contains(&probability) {
            return refuse(format!(
                "feature probability is {probability}, must be in [0, 1]"
            ));
        }
        if !(narrow(low).is_finite() && narrow(high).is_finite() && narrow(low) < narrow(high)) {
            return refuse(format!(
                "feature range is [{low}, {high}): the first must be below the second"
            ));
        }
        Ok(Self {
            features: count,
            probability,
            low,
            high,
        })
    }

    /// Values of a row.
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
        // Rounding may reach `high`, which is excluded.
        let largest = narrow(self.high).next_down();
        GATE.fill_uniform(seed, step, row, out);
        for (column, x) in (0_u32..).zip(out) {
            *x = if f64::from(*x) < self.probability {
                let draw = f64::from(VALUE.uniform(seed, step, row, column));
                narrow(self.low + (self.high - self.low) * draw).min(largest)
            } else {
                0.0
            };
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
fn narrow(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    // 40,000 values of which a tenth is on: the standard error of the count is 60, of the mean of the
    // 4,000 values on [-1, 1) 0.009; the bounds are five of them.
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
        // Between 1 and the next f32 lies nothing: only `low` is left.
        let features = Features::new(64, 1.0, 1.0, f64::from(1_f32.next_up())).unwrap();
        let mut out = [0.0; 64];
        features.make(0, 0, &mut out);
        assert_eq!(out.map(f32::to_bits), [1_f32.to_bits(); 64]);
    }

    #[test]
    fn senseless_requests_are_refused_by_name() {
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
    }
}
