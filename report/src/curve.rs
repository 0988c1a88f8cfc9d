//! A curve as the page reads it.

use serde::{Serialize, Serializer};

use crate::run::Rows;
use crate::series::{Series, Source, thinned};

/// Points of one series from some row on, few enough to be sent.
#[derive(Serialize)]
pub(crate) struct Curve<'a> {
    name: &'a str,
    /// Whether it is the run's mathematics, or system metrics.
    system: bool,
    /// Points there are, of which these are the ones to be drawn.
    of: usize,
    /// Steps.
    x: Vec<u64>,
    y: Vec<Number>,
    /// Seconds since the run's first row with a time, where the rows have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    t: Option<Vec<Option<f64>>>,
}

impl<'a> Curve<'a> {
    /// The points of `series` from row `first` on, about `most` of them; none where there are none.
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
        Some(Self {
            name: &series.name,
            system: series.source == Source::System,
            of: values.len(),
            x: kept.iter().map(|index| at(index).0).collect(),
            y: kept.iter().map(|&index| Number(values[index])).collect(),
            t: times.iter().any(Option::is_some).then_some(times),
        })
    }
}

/// Step and seconds since the run's first row with a time: at most so many pairs.
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

/// A number in the digits of an f32, or a string where JSON has none.
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
