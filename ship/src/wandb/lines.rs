//! The lines of a run's history: one a step, as JSON with bare `NaN`, `Infinity` and `-Infinity`.

use spd_tracker::{Histogram, Kind, Value};

use super::json::{number, object, string};
use super::media::{self, Media};
use crate::run::RunInfo;
use crate::sink::Stamped;

/// Most bins of a histogram that W&B shows.
const BINS: usize = 512;

/// An x axis that is independent of the numbers of lines.
pub(super) const STEP: &str = "trainer/step";

/// Values of a line that are not from its rows.
const OWN: usize = 4;

/// A line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    /// Its `_step`.
    pub(super) step: u64,
    /// Names and encoded values, in order; names are unique.
    pub(super) values: Vec<(String, String)>,
    /// The files of its values.
    pub(super) media: Vec<Media>,
}

impl Line {
    /// The line of the rows of one step, numbered after `last`.
    pub(super) fn of(rows: &[Stamped], last: Option<u64>, run: &RunInfo) -> Self {
        let mut line = Self::placeholder(rows, last, run);
        let Some(first) = rows.first() else {
            return line;
        };
        line.put(STEP, first.row.step.to_string());
        for (at, Stamped { row, .. }) in rows.iter().enumerate() {
            for (name, value) in &row.values {
                // Names within a row are unique, so only those of other rows are compared.
                let others = if at == 0 { OWN } else { line.values.len() };
                line.add(name, row.kind, value, others, run);
            }
        }
        line
    }

    /// A placeholder for refused rows, since lines are counted.
    pub(super) fn placeholder(rows: &[Stamped], last: Option<u64>, run: &RunInfo) -> Self {
        let started = run.started;
        let (step, time) = rows
            .first()
            .map_or((0, started), |first| (first.row.step, first.time));
        let step = last.map_or(step, |last| step.max(last + 1));
        let mut line = Self {
            step,
            values: Vec::new(),
            media: Vec::new(),
        };
        line.put("_step", step.to_string());
        line.put("_timestamp", number(time));
        line.put("_runtime", number((time - started).max(0.0)));
        line
    }

    /// The line without its end.
    pub(super) fn json(&self) -> String {
        object(
            self.values
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str())),
        )
    }

    fn put(&mut self, name: &str, value: String) {
        self.values.push((name.to_string(), value));
    }

    fn has(&self, name: &str, among: usize) -> bool {
        self.values[..among].iter().any(|(found, _)| found == name)
    }

    /// Adds a value. If a row of another kind has its name, the kind is added to the name.
    fn add(&mut self, name: &str, kind: Kind, value: &Value, among: usize, run: &RunInfo) {
        let name = if self.has(name, among) {
            let kind = if kind == Kind::Eval { "eval" } else { "train" };
            format!("{kind}/{name}")
        } else {
            name.to_string()
        };
        if self.has(&name, among) {
            return;
        }
        let value = match value {
            Value::Number(value) => number(*value),
            Value::Histogram(value) => histogram(value),
            Value::Text(text) => string(text),
            Value::File(path) => match media::read(run, path, &name, self.step) {
                Some(media) => {
                    let value = media.value.clone();
                    self.media.push(media);
                    value
                }
                None => return,
            },
        };
        self.values.push((name, value));
    }
}

/// The rows of each step.
pub(super) fn steps(rows: &[Stamped]) -> impl Iterator<Item = &[Stamped]> {
    rows.chunk_by(|a, b| a.row.step == b.row.step)
}

/// A histogram; neighbouring bins are merged down to at most 512.
fn histogram(histogram: &Histogram) -> String {
    let together = histogram.counts.len().div_ceil(BINS).max(1);
    let counts = histogram.counts.chunks(together);
    let counts = counts.map(|counts| number(counts.iter().sum()));
    // The last edge is the edge of the last bin, which may be narrower.
    let edges = histogram.edges.iter().step_by(together).copied();
    let is_whole = histogram.counts.len().is_multiple_of(together);
    let last = histogram.edges.last().copied().filter(|_| !is_whole);
    let edges = edges.chain(last).map(number);
    format!(
        r#"{{"_type":"histogram","values":[{}],"bins":[{}]}}"#,
        counts.collect::<Vec<_>>().join(","),
        edges.collect::<Vec<_>>().join(",")
    )
}

#[cfg(test)]
mod tests {
    use spd_tracker::Row;

    use super::*;

    fn at(time: f64, row: Row) -> Stamped {
        Stamped { row, time }
    }

    fn line(rows: &[Stamped], last: Option<u64>) -> String {
        let run = RunInfo {
            started: 1000.0,
            ..crate::run::tests::run(std::path::Path::new(""))
        };
        Line::of(rows, last, &run).json()
    }

    #[test]
    fn rows_of_a_step_are_one_line_at_the_time_of_the_first() {
        let rows = [
            at(
                1001.5,
                Row::new(20, Kind::Train)
                    .with("loss/total", 0.1)
                    .with("rows", 32.0),
            ),
            at(
                1002.0,
                Row::new(20, Kind::Eval)
                    .with("loss/total", 0.2)
                    .with("l0/a", 3.0),
            ),
        ];
        assert_eq!(
            line(&rows, Some(7)),
            r#"{"_step":20,"_timestamp":1001.5,"_runtime":1.5,"trainer/step":20,"loss/total":0.1,"rows":32,"eval/loss/total":0.2,"l0/a":3}"#
        );
    }

    #[test]
    fn a_late_row_is_numbered_behind_the_last_and_says_its_own_step() {
        let late = [at(999.0, Row::new(3, Kind::Eval).with("a", 1.0))];
        assert_eq!(
            line(&late, Some(20)),
            r#"{"_step":21,"_timestamp":999,"_runtime":0,"trainer/step":3,"a":1}"#
        );
    }

    #[test]
    fn a_histogram_has_512_bins_at_most() {
        let of = |bins: usize| Histogram {
            edges: (0..=bins).map(|edge| edge as f64).collect(),
            counts: vec![1.0; bins],
        };
        assert_eq!(
            histogram(&of(3)),
            r#"{"_type":"histogram","values":[1,1,1],"bins":[0,1,2,3]}"#
        );
        for (bins, kept, end) in [(512, 512, 1.0), (1024, 512, 2.0), (1025, 342, 2.0)] {
            let value: serde_json::Value = serde_json::from_str(&histogram(&of(bins))).unwrap();
            let values = value["values"].as_array().unwrap();
            let edges = value["bins"].as_array().unwrap();
            assert_eq!((values.len(), edges.len()), (kept, kept + 1), "{bins}");
            assert_eq!(edges.last().unwrap().as_f64(), Some(bins as f64));
            assert_eq!(values.last().unwrap().as_f64(), Some(end), "{bins}");
        }
    }

    #[test]
    fn text_is_a_string() {
        let rows = [at(
            1000.0,
            Row::new(0, Kind::Eval).with("said", Value::Text("a \"b\"\n".into())),
        )];
        assert!(line(&rows, None).ends_with(r#""said":"a \"b\"\n"}"#));
    }
}
