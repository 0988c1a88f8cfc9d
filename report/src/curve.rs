//! A curve as the page gets it.

use std::ops::Range;

use serde::{Serialize, Serializer};

use crate::run::Rows;
use crate::series::{Series, Source, stretch, thinned};

/// The points of one series from some row on, thinned.
#[derive(Serialize)]
pub(crate) struct Curve<'a> {
    name: &'a str,
    /// Whether its values differ between two runs of one config.
    system: bool,
    /// Whether it may be smoothed.
    smooth: bool,
    /// Number of points before thinning.
    of: usize,
    /// Steps.
    x: Vec<u64>,
    y: Vec<Number>,
    /// Seconds since the run's first row with a time, if the rows have times.
    #[serde(skip_serializing_if = "Option::is_none")]
    t: Option<Vec<Option<f64>>>,
    /// Means of all its rows, from which it is smoothed; set if it may be smoothed and was thinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    means: Option<Means>,
}

/// The mean of each stretch of a curve, over all its finite rows: smoothing only the extremes would
/// give another curve.
#[derive(Default, Serialize)]
struct Means {
    x: Vec<Number>,
    y: Vec<Number>,
    t: Vec<Option<f64>>,
    /// Number of rows of each mean.
    n: Vec<usize>,
}

impl<'a> Curve<'a> {
    /// The points of `series` from row `first` on, about `most` of them; `None` if there are none.
    pub(crate) fn of(series: &'a Series, rows: &Rows, first: u32, most: usize) -> Option<Self> {
        let begin = series.from(first);
        let values = &series.values[begin..];
        if values.is_empty() {
            return None;
        }
        let kept = thinned(values, most);
        let at = |index: &usize| rows.at[series.rows[begin + index] as usize];
        let since = |time: f64| time.is_finite().then(|| thousandths(time - rows.zero()));
        let times: Vec<Option<f64>> = kept.iter().map(|index| since(at(index).1)).collect();
        let means = || {
            let mut means = Means::default();
            let stretch = stretch(values.len(), most);
            for first in (0..values.len()).step_by(stretch) {
                let part = first..values.len().min(first + stretch);
                means.add(part, values, |index| at(&index), since);
            }
            means
        };
        Some(Self {
            name: &series.name,
            system: series.source == Source::System,
            smooth: series.smooths,
            means: (series.smooths && kept.len() < values.len()).then(means),
            of: values.len(),
            x: kept.iter().map(|index| at(index).0).collect(),
            y: kept.iter().map(|&index| Number(values[index])).collect(),
            t: times.iter().any(Option::is_some).then_some(times),
        })
    }
}

impl Means {
    /// Adds the mean of a stretch, if it has a finite value.
    fn add(
        &mut self,
        part: Range<usize>,
        values: &[f64],
        at: impl Fn(usize) -> (u64, f64),
        since: impl Fn(f64) -> Option<f64>,
    ) {
        let finite: Vec<usize> = part.filter(|&index| values[index].is_finite()).collect();
        let mean = |of: &dyn Fn(usize) -> f64| {
            let of_each = finite.iter().map(|&index| of(index) / finite.len() as f64);
            of_each.sum::<f64>()
        };
        if finite.is_empty() {
            return;
        }
        self.x.push(Number(mean(&|index| at(index).0 as f64)));
        self.y.push(Number(mean(&|index| values[index])));
        self.t.push(since(mean(&|index| at(index).1)));
        self.n.push(finite.len());
    }
}

/// At most `most` pairs of a step and its seconds since the run's first row with a time.
pub(crate) fn clock(rows: &Rows, most: usize) -> Vec<(u64, f64)> {
    let all = &rows.clock;
    let every = all.len().div_ceil(most.max(1)).max(1);
    let last = all.last().filter(|_| all.len() % every != 1);
    let kept = all.iter().step_by(every).chain(last);
    kept.map(|(step, time)| (*step, thousandths(time - rows.zero())))
        .collect()
}

fn thousandths(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

/// A number in the digits of an f32, or a string if JSON lacks it.
pub(crate) struct Number(pub(crate) f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what does not fit is seen below"
        )]
        let short = self.0 as f32;
        match self.0 {
            value if value.is_nan() => serializer.serialize_str("NaN"),
            f64::INFINITY => serializer.serialize_str("Infinity"),
            f64::NEG_INFINITY => serializer.serialize_str("-Infinity"),
            0.0 => serializer.serialize_u8(0),
            value if value.fract() == 0.0 && value.abs() < 1e15 =>
            {
                #[expect(clippy::cast_possible_truncation, reason = "a small whole number")]
                serializer.serialize_i64(value as i64)
            }
            _ if short.is_normal() => serializer.serialize_f32(short),
            value => serializer.serialize_f64(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_the_digits_of_an_f32_and_their_range() {
        let text = |value| serde_json::to_string(&Number(value)).unwrap();
        assert_eq!(text(0.1_f32.into()), "0.1");
        assert_eq!(text(1.0 / 3.0), "0.33333334");
        assert_eq!(text(6_729_728_123.0), "6729728123");
        assert_eq!(text(1.5e-60), "1.5e-60");
        assert_eq!(text(-2.5e60), "-2.5e+60");
        assert_eq!(text(f64::NAN), "\"NaN\"");
        assert_eq!(text(f64::NEG_INFINITY), "\"-Infinity\"");
        assert_eq!(text(-0.0), "0");
    }
}
