//! How values are distributed: counted finely as they come, then over the bins of a figure.

use std::collections::BTreeMap;

use serde::Serialize;

/// Bins of the histograms.
const BINS: usize = 50;

/// How values are distributed over bins of one width.
#[derive(Debug, Serialize)]
pub(super) struct Histogram {
    /// Site, or site and kind.
    pub(super) site: String,
    /// Lower border of the first bin.
    pub(super) low: f64,
    /// Upper border of the last bin.
    pub(super) high: f64,
    /// Values in each bin.
    pub(super) counts: Vec<u64>,
}

/// How many values there are of each thousandth.
pub(super) type Counts = BTreeMap<i64, u64>;

/// Fine bins that values are counted in as they come, before the borders of the histogram are known.
const FINE: f64 = 1000.0;

/// Adds values, rounded to a thousandth; a value that is not finite is no value.
pub(super) fn count(counts: &mut Counts, values: &[f32]) {
    for &value in values.iter().filter(|value| value.is_finite()) {
        *counts.entry(rounded(f64::from(value))).or_insert(0) += 1;
    }
}

/// The values of counts, and how many there are of each.
pub(super) fn values(counts: &Counts) -> Vec<(f64, u64)> {
    let values = counts.iter();
    values
        .map(|(&value, &count)| (value as f64 / FINE, count))
        .collect()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "saturates, far outside of every figure"
)]
fn rounded(value: f64) -> i64 {
    (value * FINE).round() as i64
}

/// Smallest and largest value.
pub(super) fn spread(values: &[(f64, u64)]) -> (f64, f64) {
    let low = values
        .iter()
        .map(|(value, _)| *value)
        .fold(f64::INFINITY, f64::min);
    let high = values
        .iter()
        .map(|(value, _)| *value)
        .fold(f64::NEG_INFINITY, f64::max);
    if low < high {
        (low, high)
    } else {
        (low.min(0.0), high.max(0.0) + 1e-3)
    }
}

/// Counts over the bins between two borders.
pub(super) fn histogram(site: String, (low, high): (f64, f64), values: &[(f64, u64)]) -> Histogram {
    let mut counts = vec![0; BINS];
    for &(value, count) in values {
        let place = (value - low) / (high - low) * BINS as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a bin, and the last one for its upper border"
        )]
        let bin = (place.max(0.0) as usize).min(BINS - 1);
        counts[bin] += count;
    }
    Histogram {
        site,
        low,
        high,
        counts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_one_bin() {
        let values = [(0.0, 2), (0.019, 1), (0.02, 1), (0.5, 3), (1.0, 4)];
        let found = histogram("a".into(), (0.0, 1.0), &values);
        assert_eq!((found.counts[0], found.counts[1]), (3, 1));
        assert_eq!((found.counts[25], found.counts[49]), (3, 4));
        assert_eq!(found.counts.iter().sum::<u64>(), 11);
    }

    #[test]
    fn values_are_counted_to_a_thousandth() {
        let mut counts = Counts::new();
        count(&mut counts, &[0.5, f32::NAN, 0.500_1]);
        count(&mut counts, &[-1.0, f32::INFINITY]);
        let counts = values(&counts);
        assert_eq!(counts, [(-1.0, 1), (0.5, 2)]);
        assert_eq!(spread(&counts), (-1.0, 0.5));
        assert_eq!(spread(&[(0.0, 3)]), (0.0, 1e-3));
    }
}
