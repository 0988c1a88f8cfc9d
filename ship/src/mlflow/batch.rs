//! Rows as metrics, in requests that the server takes.

use serde_json::{Value as Json, json};
use spd_tracker::{Histogram, Value};

use super::names::taken;
use crate::run::RunInfo;
use crate::sink::Stamped;
use crate::system_row;

/// Metrics that one request holds.
const MOST: usize = 1000;

/// Bytes of metrics in one request, below the megabyte that servers take.
const MOST_BYTES: usize = 900_000;

/// What is shown of a histogram, as curves: MLflow shows no histograms.
const QUANTILES: [(&str, f64); 5] = [
    ("p5", 0.05),
    ("p25", 0.25),
    ("p50", 0.5),
    ("p75", 0.75),
    ("p95", 0.95),
];

/// A number under its name, at its step and time: what the server tells repetitions by.
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
        // A bare NaN would be taken, and kept as 0.
        let value = match self.value {
            value if value.is_nan() => json!("NaN"),
            f64::INFINITY => json!("Infinity"),
            f64::NEG_INFINITY => json!("-Infinity"),
            value => json!(value),
        };
        json!({"key": taken(&self.name), "value": value, "timestamp": self.time, "step": self.step})
    }
}

/// The numbers of a train or eval row, and quantiles of its histograms.
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
                for (part, share) in QUANTILES {
                    if let Some(value) = quantile(histogram, share) {
                        push(format!("{name}/{part}"), value);
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

/// The bodies of requests that give a run metrics.
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

/// Where `share` of the values are below, if they are spread evenly in each bin.
fn quantile(histogram: &Histogram, share: f64) -> Option<f64> {
    let total: f64 = histogram.counts.iter().sum();
    let mut below = total * share;
    for (edges, &count) in histogram.edges.windows(2).zip(&histogram.counts) {
        if count > 0.0 && below <= count {
            return Some(edges[0] + (edges[1] - edges[0]) * (below / count));
        }
        below -= count;
    }
    None
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
    fn a_histogram_is_five_curves() {
        // By hand: 20 values from 0 to 1, 60 from 1 to 4, 20 from 4 to 5.
        let histogram = Histogram {
            edges: vec![0.0, 1.0, 4.0, 5.0],
            counts: vec![20.0, 60.0, 20.0],
        };
        let row = Row::new(1, Kind::Eval)
            .with("h", Value::Histogram(histogram))
            .with(
                "empty",
                Value::Histogram(Histogram {
                    edges: vec![0.0, 1.0],
                    counts: vec![0.0],
                }),
            );
        let found = of_row(&Stamped { row, time: 0.0 });
        let found: Vec<_> = found
            .iter()
            .map(|metric| (metric.name.as_str(), metric.value))
            .collect();
        let expected = [
            ("h/p5", 0.25),
            ("h/p25", 1.25),
            ("h/p50", 2.5),
            ("h/p75", 3.75),
            ("h/p95", 4.75),
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
