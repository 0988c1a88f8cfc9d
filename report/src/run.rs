//! The rows of one run directory, read while they are written. No other module reads spool files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use spd_tracker::{
    Cursor, Histogram, Kind, METRICS, Mark, Read, ReadError, Reader, Row, Value, system_files,
};

use crate::series::{Histograms, Series, Source};

/// Lines about unreadable files that are kept.
const PROBLEMS: usize = 20;

/// Most events that are kept: the last ones.
const EVENTS: usize = 2000;

/// The phase whose steps are those of the run.
pub(crate) const TRAIN: &str = "train";

/// Prefix of the names of measurements of a machine. These samples have no step.
const MACHINE: &str = "system/";

/// An event of the run.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Event {
    pub(crate) step: u64,
    /// Unix time in seconds, if the row has one.
    pub(crate) time: Option<f64>,
    pub(crate) note: String,
}

/// The rows of a run directory, as far as they have been read.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    dir: PathBuf,
    files: Vec<Followed>,
    /// Counts how often the rows that were read became void.
    pub(crate) generation: u64,
    /// Step and unix time (or NaN) of each row with values.
    pub(crate) at: Vec<(u64, f64)>,
    pub(crate) series: Vec<Series>,
    names: BTreeMap<(Source, String), usize>,
    pub(crate) histograms: Vec<Histograms>,
    pub(crate) events: Vec<Event>,
    /// Step and unix time of rows of training, from which the time of any step is interpolated.
    pub(crate) clock: Vec<(u64, f64)>,
    zero: Option<f64>,
    /// The last unix time of a row.
    pub(crate) last: Option<f64>,
    /// The current phase that counts steps.
    phase: Option<String>,
    /// Number of planned steps, by the last row of training.
    pub(crate) planned: Option<u64>,
    pub(crate) problems: Vec<String>,
    /// Number of lines that could not be read.
    pub(crate) unread: u64,
}

/// A spool file that is followed.
struct Followed {
    name: String,
    reader: Option<Reader>,
    /// The series of the values of the previous row, a guess for the next row.
    last: Vec<usize>,
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.name)
    }
}

impl Rows {
    /// The rows of a directory, none of them read yet. `generation`: number of the first
    /// generation.
    pub(crate) fn of(dir: &Path, generation: u64) -> Self {
        Self {
            dir: dir.to_path_buf(),
            generation,
            ..Self::default()
        }
    }

    /// Reads new rows. If rows were cut, everything is read again, as another generation.
    pub(crate) fn poll(&mut self) {
        // A run that is cut again meanwhile is read again at the next poll.
        for _ in 0..3 {
            if self.read_on() {
                return;
            }
            *self = Self::of(&self.dir, self.generation + 1);
        }
    }

    /// Reads every file to its end; returns false if one was cut.
    fn read_on(&mut self) -> bool {
        let system = system_files(&self.dir);
        for name in std::iter::once(METRICS.to_owned()).chain(system) {
            if !self.files.iter().any(|file| file.name == name) {
                self.files.push(Followed {
                    name,
                    reader: None,
                    last: Vec::new(),
                });
            }
        }
        let mut files = std::mem::take(&mut self.files);
        let whole = files.iter_mut().all(|file| self.read_file(file));
        self.files = files;
        whole
    }

    fn read_file(&mut self, file: &mut Followed) -> bool {
        if file.reader.is_none() {
            let opened = if file.name == METRICS {
                Reader::of_metrics(&self.dir, &Cursor::default())
            } else {
                Reader::open(&self.dir.join(&file.name), &Mark::default())
            };
            match opened {
                Ok(reader) => file.reader = Some(reader),
                Err(error) => {
                    self.problem(&error);
                    return true;
                }
            }
        }
        let Some(reader) = &mut file.reader else {
            return true;
        };
        let last = &mut file.last;
        loop {
            match reader.next() {
                Ok(Some(Read::Row { row, .. })) => self.take(row, last),
                Ok(Some(Read::RolledBack(_))) => return false,
                // Waiting for rows to be made again would stop the curve, and end it behind the
                // run's step.
                Ok(None) => return reader.went_back().is_none(),
                Err(error @ ReadError::Junk { .. }) => self.problem(&error),
                // The same error comes at every call, or the next poll tries again.
                Err(error) => {
                    self.problem(&error);
                    return true;
                }
            }
        }
    }

    /// The first unix time of a row, the zero of the page's clock.
    pub(crate) fn zero(&self) -> f64 {
        self.zero.unwrap_or(0.0)
    }

    fn problem(&mut self, error: &ReadError) {
        let line = error.to_string();
        if self.problems.contains(&line) {
            return;
        }
        self.unread += 1;
        if self.problems.len() < PROBLEMS {
            self.problems.push(line);
        }
    }

    fn take(&mut self, row: Row, last: &mut Vec<usize>) {
        let source = match row.kind {
            Kind::Train | Kind::Eval => Source::Metrics,
            Kind::System | Kind::Event | Kind::Alert => Source::System,
        };
        let time = match source {
            Source::Metrics => None,
            Source::System => row.number("time"),
        };
        let time = time.unwrap_or(f64::NAN);
        if time.is_finite() {
            self.zero.get_or_insert(time);
            self.last = Some(self.last.map_or(time, |last| last.max(time)));
        }
        if matches!(row.kind, Kind::Event | Kind::Alert) {
            let event = Event {
                step: row.step,
                time: time.is_finite().then_some(time),
                note: row.note.unwrap_or_default(),
            };
            self.events.push(event);
            if self.events.len() > EVENTS {
                self.events.remove(0);
            }
            return;
        }
        if row.note.as_deref() == Some(TRAIN) {
            self.planned = row.number("steps").map_or(self.planned, whole);
            if time.is_finite() {
                self.clock.push((row.step, time));
            }
        }
        if row.number("steps").is_some_and(|steps| steps > 0.0) {
            self.phase.clone_from(&row.note);
        }
        let Ok(number) = u32::try_from(self.at.len()) else {
            return;
        };
        self.at.push((row.step, time));
        let mut place = 0;
        for (name, value) in row.values {
            let value = match value {
                Value::Number(value) => value,
                Value::Histogram(histogram) => {
                    self.add_histogram(name, number, histogram);
                    continue;
                }
                // Figures are read from their files.
                Value::Text(_) | Value::File(_) => continue,
            };
            let Some(name) = self.name(source, name, (value, row.note.as_deref())) else {
                continue;
            };
            let index = self.index((source, name), last.get(place).copied());
            match last.get_mut(place) {
                Some(slot) => *slot = index,
                None => last.push(index),
            }
            place += 1;
            let series = &mut self.series[index];
            series.smooths &= row.kind != Kind::Eval;
            series.rows.push(number);
            series.values.push(value);
        }
    }

    fn add_histogram(&mut self, name: String, row: u32, histogram: Histogram) {
        let known = self.histograms.iter().position(|known| known.name == name);
        let index = known.unwrap_or_else(|| {
            self.histograms.push(Histograms {
                name,
                rows: Vec::new(),
                all: Vec::new(),
            });
            self.histograms.len() - 1
        });
        let known = &mut self.histograms[index];
        known.rows.push(row);
        known.all.push(histogram);
    }

    /// The name of a value on the page, if it is shown. Values of other phases than training get
    /// names of their own, as their steps count from 0 again.
    fn name(
        &self,
        source: Source,
        name: String,
        (value, note): (f64, Option<&str>),
    ) -> Option<String> {
        if source == Source::Metrics {
            return Some(name);
        }
        match name.as_str() {
            "time" | "steps" => None,
            // A phase begins or ends: no step was made since the row before.
            "steps_per_s" if value == 0.0 => None,
            "steps_per_s" | "gflop_per_s" => {
                Some(note.map_or_else(|| name.clone(), |phase| format!("{name}/{phase}")))
            }
            _ => match (name.strip_prefix("time_ms/"), self.phase.as_deref()) {
                (Some(part), Some(phase)) if phase != TRAIN => {
                    Some(format!("time_ms/{phase}/{part}"))
                }
                _ => Some(name),
            },
        }
    }

    /// The index of the series of a name; `guess` is tried first.
    fn index(&mut self, (source, name): (Source, String), guess: Option<usize>) -> usize {
        let guessed = guess.filter(|&index| {
            let series = &self.series[index];
            series.source == source && series.name == name
        });
        if let Some(index) = guessed {
            return index;
        }
        let next = self.series.len();
        let index = *self.names.entry((source, name.clone())).or_insert(next);
        if index == next {
            self.series.push(Series {
                source,
                smooths: !name.starts_with(MACHINE),
                name,
                rows: Vec::new(),
                values: Vec::new(),
            });
        }
        index
    }
}

/// A count that is stored as a float.
pub(crate) fn whole(count: f64) -> Option<u64> {
    const MOST: f64 = 9e15;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is between 0 and MOST"
    )]
    (0.0..=MOST).contains(&count).then_some(count as u64)
}

#[cfg(test)]
mod tests {
    use spd_tracker::Spool;

    use super::*;

    fn values(rows: &Rows, name: &str) -> Vec<(u64, f64)> {
        let series = rows.series.iter().find(|series| series.name == name);
        let Some(series) = series else {
            return Vec::new();
        };
        let steps = series.rows.iter().map(|&row| rows.at[row as usize].0);
        steps.zip(series.values.iter().copied()).collect()
    }

    #[test]
    fn rows_become_curves_and_events_and_a_clock() {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
        let train = |step| Row::new(step, Kind::Train).with("loss/total", step as f64);
        spool.append(train(1));
        let system = Row::new(1, Kind::System).with_note("train");
        spool.append(
            system
                .with("steps", 10.0)
                .with("steps_per_s", 3.0)
                .with("time", 1e9),
        );
        let event = Row::new(1, Kind::Event).with_note("resumed");
        spool.append(event.with("time", 1e9));
        spool.sync().unwrap();
        let mut rows = Rows::of(dir.path(), 0);
        rows.poll();
        spool.append(train(2));
        spool.sync().unwrap();
        rows.poll();
        assert_eq!(values(&rows, "loss/total"), [(1, 1.0), (2, 2.0)]);
        assert_eq!(values(&rows, "steps_per_s/train"), [(1, 3.0)]);
        assert_eq!(
            (rows.planned, rows.clock.as_slice()),
            (Some(10), &[(1, 1e9)][..])
        );
        assert_eq!(rows.events.len(), 1);
        assert_eq!((rows.generation, rows.unread), (0, 0));
    }

    #[test]
    fn cut_rows_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
        let train = |step, value| Row::new(step, Kind::Train).with("loss/total", value);
        spool.append(train(1, 1.0));
        let mark = spool.mark().wait().unwrap();
        spool.append(train(2, 2.0));
        spool.sync().unwrap();
        let mut rows = Rows::of(dir.path(), 0);
        rows.poll();
        drop(spool);
        let spool = Spool::start(dir.path(), &mark, 2).unwrap();
        // At once, and not only when as many rows are made again.
        rows.poll();
        assert_eq!(values(&rows, "loss/total"), [(1, 1.0)]);
        assert_eq!(rows.generation, 1);
        spool.append(train(2, 3.0));
        spool.sync().unwrap();
        rows.poll();
        assert_eq!(values(&rows, "loss/total"), [(1, 1.0), (2, 3.0)]);
        drop(spool);
        // A run that continues after its last row cuts nothing.
        let mut reader = Reader::of_metrics(dir.path(), &Cursor::default()).unwrap();
        while reader.next().unwrap().is_some() {}
        drop(Spool::start(dir.path(), &reader.mark(), 3).unwrap());
        rows.poll();
        assert_eq!(rows.generation, 1);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "nobody reads it meanwhile")]
    fn junk_is_counted_and_named_and_machines_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let machine = "{\"step\":3,\"kind\":\"system\",\"system/cpu_percent\":50,\"time\":5}\n";
        std::fs::write(dir.path().join("machine0.jsonl"), machine).unwrap();
        std::fs::write(dir.path().join(METRICS), "junk\n{}\n").unwrap();
        let mut rows = Rows::of(dir.path(), 0);
        rows.poll();
        rows.poll();
        assert_eq!(values(&rows, "system/cpu_percent"), [(3, 50.0)]);
        assert_eq!((rows.unread, rows.problems.len()), (2, 2));
    }
}
