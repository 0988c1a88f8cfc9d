//! Rows as metrics, in requests within the server's limits.

use serde_json::{Value as Json, json};
use spd_tracker::{Histogram, Value};

use super::names::taken;
use crate::run::RunInfo;
use crate::sink::Stamped;
use crate::system_row;

/// Most metrics of one request.
const MOST: usize = 1000;

/// Most bytes of metrics in one request; servers accept a megabyte.
const MOST_BYTES: usize = 900_000;

/// Thresholds of a histogram. The fraction of its values above each is a curve, since MLflow shows
/// no histograms. They are edges of the bins of importances, so the fractions are exact.
const FROM: [f64; 4] = [0.02, 0.1, 0.5, 0.9];

/// A number with its name, step and time, by which the server recognises repetitions.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Metric {
    pub(super) name: String,
    pub(super) value: f64,
    /// Milliseconds since 1970.
    pub(super) time: i64,
    pub(super) step: u64,
}

impl Metric {
    fn json(&self) -> Json {
        // A bare NaN would be accepted, and stored as 0.
        let value = match self.value {
            value if value.is_nan() => json!("NaN"),
            f64::INFINITY => json!("Infinity"),
            f64::NEG_INFINITY => json!("-Infinity"),
            value => json!(value),
        };
        json!({"key": taken(&self.name), "value": value, "timestamp": self.time, "step": self.step})
    }
}

/// The numbers of a train or eval row, and the fractions of its histograms.
pub(super) fn of_row(row: &Stamped) -> Vec<Metric> {
    let mut metrics = Vec::new();
    let time = milliseconds(row.time);
    let mut push = |name: String, value| {
        let step = row.row.step;
        metrics.push(Metric {
            name,
            value,
            time,
            step,
        });
    };
    for (name, value) in &row.row.values {
        match value {
            Value::Number(value) => push(name.clone(), *value),
            Value::Histogram(histogram) => {
                for least in FROM {
                    if let Some(part) = part_from(histogram, least) {
                        push(format!("{name}/at_least_{least}"), part);
                    }
                }
            }
            Value::Text(_) | Value::File(_) => {}
        }
    }
    metrics
}

/// The numbers of a system row.
pub(super) fn of_system_row(run: &RunInfo, row: &Stamped) -> Vec<Metric> {
    let (time, step) = (milliseconds(row.time), system_row::step(run, row));
    let numbers = system_row::numbers(row);
    let metrics = numbers.map(|(name, value)| Metric {
        name,
        value,
        time,
        step,
    });
    metrics.collect()
}

/// The bodies of requests that add metrics to a run.
pub(super) fn requests(run: &str, metrics: &[Metric]) -> Vec<Json> {
    let (mut requests, mut items, mut bytes) = (Vec::new(), Vec::new(), 0);
    for metric in metrics {
        let item = metric.json();
        let more = item.to_string().len() + 1;
        if items.len() == MOST || bytes + more > MOST_BYTES {
            requests.push(json!({"run_id": run, "metrics": std::mem::take(&mut items)}));
            bytes = 0;
        }
        bytes += more;
        items.push(item);
    }
    if !items.is_empty() {
        requests.push(json!({"run_id": run, "metrics": items}));
    }
    requests
}

/// Milliseconds since 1970.
pub(super) fn milliseconds(seconds: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "it is a time of this era")]
    let milliseconds = (seconds * 1000.0).round() as i64;
    milliseconds
}

/// The fraction of values that are at least `least`; `None` unless that is an edge, or without
/// values.
fn part_from(histogram: &Histogram, least: f64) -> Option<f64> {
    let is_edge = |edge: &f64| (edge - least).abs() < 1e-9;
    let first = histogram.edges.iter().position(is_edge)?;
    let total: f64 = histogram.counts.iter().sum();
    let from: f64 = histogram.counts.iter().skip(first).sum();
    (total > 0.0).then(|| from / total)
}

#[cfg(test)]
mod tests {
    use spd_tracker::{Kind, Row};

    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_words() {
        let row = Row::new(3, Kind::Train)
            .with("a", f64::NAN)
            .with("b", f64::NEG_INFINITY)
            .with("c", 0.1);
        let metrics = of_row(&Stamped { row, time: 1.2345 });
        assert_eq!(
            requests("r", &metrics),
            [json!({"run_id": "r", "metrics": [
                {"key": "a", "value": "NaN", "timestamp": 1235, "step": 3},
                {"key": "b", "value": "-Infinity", "timestamp": 1235, "step": 3},
                {"key": "c", "value": 0.1, "timestamp": 1235, "step": 3},
            ]})]
        );
    }

    #[test]
    fn a_histogram_is_the_parts_from_its_edges_on() {
        // Of 50 bins, as for importances: 900 in the first, as usual, 60 from 0.1 on, 40 at 1.
        let edges: Vec<f64> = (0..=50).map(|edge| f64::from(edge) / 50.0).collect();
        let mut counts = vec![0.0; 50];
        (counts[0], counts[5], counts[49]) = (900.0, 60.0, 40.0);
        let of = |edges: &[f64], counts: &[f64]| {
            let (edges, counts) = (edges.to_vec(), counts.to_vec());
            Value::Histogram(Histogram { edges, counts })
        };
        let row = Row::new(1, Kind::Eval)
            .with("importance/a", of(&edges, &counts))
            .with("empty", of(&edges, &[0.0; 50]))
            // Places within a bin are unknown.
            .with("wide", of(&[0.0, 0.5, 1.0], &[3.0, 1.0]));
        let found = of_row(&Stamped { row, time: 0.0 });
        let found: Vec<_> = found
            .iter()
            .map(|metric| (metric.name.as_str(), metric.value))
            .collect();
        let expected = [
            ("importance/a/at_least_0.02", 0.1),
            ("importance/a/at_least_0.1", 0.1),
            ("importance/a/at_least_0.5", 0.04),
            ("importance/a/at_least_0.9", 0.04),
            ("wide/at_least_0.5", 0.25),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn requests_are_as_large_as_servers_take() {
        let metric = |name: String| Metric {
            name,
            value: 1.0,
            time: 0,
            step: 0,
        };
        let many: Vec<_> = (0..2001).map(|at| metric(format!("m{at}"))).collect();
        let lengths: Vec<usize> = requests("r", &many)
            .iter()
            .map(|request| request["metrics"].as_array().unwrap().len())
            .collect();
        assert_eq!(lengths, [1000, 1000, 1]);
        assert!(requests("r", &[]).is_empty());
    }
}
