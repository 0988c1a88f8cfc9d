//! How values are distributed: counted finely as they come, then over the bins of a figure.

use crate::rounded::whole;
use std::collections::BTreeMap;

use serde::Serialize;

/// Bins of the histograms.
const BINS: usize = 50;

/// How values are distributed over bins of one width.
#[derive(Debug, Clone, Serialize)]
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

impl Histogram {
    /// The same as a value of a row.
    pub(super) fn value(&self) -> spd_tracker::Histogram {
        let part = |bin: usize| bin as f64 / self.counts.len() as f64;
        let edge = |bin| self.low + (self.high - self.low) * part(bin);
        spd_tracker::Histogram {
            edges: (0..=self.counts.len()).map(edge).collect(),
            counts: self.counts.iter().map(|&count| count as f64).collect(),
        }
    }
}

/// How many values there are of each thousandth. Values come by the thousand million: those near 0,
/// which nearly all are, are counted in a table.
#[derive(Default)]
pub(super) struct Counts {
    /// The bin that the table begins with.
    first: i64,
    near: Vec<u64>,
    far: BTreeMap<i64, u64>,
}

/// Fine bins that values are counted in as they come, before the borders of the histogram are
/// known.
const FINE: f32 = 1000.0;

/// Fine bins of the table on either side of 0, at most: values up to 8.
const NEAR: i64 = 8000;

impl Counts {
    /// Adds values, rounded to a thousandth; a value that is not finite is no value.
    pub(super) fn add(&mut self, values: &[f32]) {
        for &value in values.iter().filter(|value| value.is_finite()) {
            let bin = rounded(value);
            let place = usize::try_from(bin - self.first).unwrap_or(usize::MAX);
            match self.near.get_mut(place) {
                Some(count) => *count += 1,
                None => self.add_outside(bin),
            }
        }
    }

    /// Adds one to a bin that the table has not: the table grows, or the bin is far.
    #[cold]
    fn add_outside(&mut self, bin: i64) {
        if bin.abs() > NEAR {
            *self.far.entry(bin).or_insert(0) += 1;
            return;
        }
        if self.near.is_empty() {
            self.first = bin;
        }
        let before = usize::try_from(self.first - bin).unwrap_or(0);
        self.near.splice(..0, std::iter::repeat_n(0, before));
        self.first = self.first.min(bin);
        let place = usize::try_from(bin - self.first).expect("the first, or later");
        self.near.resize(self.near.len().max(place + 1), 0);
        self.near[place] += 1;
    }

    /// The values that there are, and how many of each.
    pub(super) fn values(&self) -> Vec<(f64, u64)> {
        let near = (self.first..).zip(self.near.iter().copied());
        let near = near.filter(|(_, count)| *count > 0);
        let below = self.far.range(..0).map(|(&bin, &count)| (bin, count));
        let above = self.far.range(0..).map(|(&bin, &count)| (bin, count));
        let all = below.chain(near).chain(above);
        all.map(|(bin, count)| (bin as f64 / f64::from(FINE), count))
            .collect()
    }
}

/// The nearest bin, without a call of the mathematics library.
#[expect(
    clippy::cast_possible_truncation,
    reason = "saturates, far outside of every figure"
)]
fn rounded(value: f32) -> i64 {
    i64::from((value * FINE + 0.5_f32.copysign(value)) as i32)
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
        // The upper border is of the last bin.
        let bin = whole(place).min(BINS - 1);
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
    fn a_value_of_a_row_has_all_edges() {
        let found = histogram("a".into(), (0.0, 1.0), &[(0.01, 2), (1.0, 3)]).value();
        assert_eq!((found.edges.len(), found.counts.len()), (51, 50));
        assert_eq!(found.edges[..3], [0.0, 0.02, 0.04]);
        assert_eq!((found.edges[50], found.counts[49]), (1.0, 3.0));
    }

    #[test]
    fn values_are_counted_to_a_thousandth() {
        let mut counts = Counts::default();
        counts.add(&[0.5, f32::NAN, 0.500_1, 8.0, -8.0]);
        counts.add(&[-1.0, f32::INFINITY, -8.001, 9.5, -100.0, 9.5]);
        let counts = counts.values();
        let expected = [
            (-100.0, 1),
            (-8.001, 1),
            (-8.0, 1),
            (-1.0, 1),
            (0.5, 2),
            (8.0, 1),
            (9.5, 2),
        ];
        assert_eq!(counts, expected);
        assert_eq!(spread(&counts), (-100.0, 9.5));
        assert_eq!(spread(&[(0.0, 3)]), (0.0, 1e-3));
    }
}
