//! The files of a spool, as the writing thread holds them.

use std::path::Path;

use crate::error::SpoolError;
use crate::lines::{self, Lines};
use crate::mark::Mark;
use crate::mend::mend;
use crate::row::{Kind, Row};
use crate::starts::Start;
use crate::times::Times;

/// Name of the file that holds [`Kind::Train`] and [`Kind::Eval`] rows.
pub const METRICS: &str = "metrics.jsonl";

/// Name of the file that holds [`Kind::System`], [`Kind::Event`] and [`Kind::Alert`] rows.
pub const SYSTEM: &str = "system.jsonl";

/// Name of the file with a launcher's measurements of its machine, by the number of its node.
pub fn machine_file(node: u64) -> String {
    match node {
        0 => "machine.jsonl".to_owned(),
        node => format!("machine-{node}.jsonl"),
    }
}

/// The files of system rows in a run directory: [`SYSTEM`], then those of machines by their names.
pub fn system_files(dir: &Path) -> Vec<String> {
    let names = spd_files::atomic::names(dir).unwrap_or_default();
    let names = names.into_iter().filter_map(|name| name.into_string().ok());
    let is_machine = |name: &str| name.starts_with("machine") && name.ends_with(".jsonl");
    let mut names: Vec<_> = names
        .filter(|name| name == SYSTEM || is_machine(name))
        .collect();
    names.sort_unstable_by_key(|name| (name != SYSTEM, name.clone()));
    names
}

pub(crate) struct Files {
    metrics: Option<Metrics>,
    system: Lines,
}

struct Metrics {
    rows: Lines,
    times: Times,
    /// Number of rows, including those that wait.
    count: u64,
}

impl Files {
    /// Opens all files with the rows before `mark`, and records the start. Also returns a line for
    /// each damaged file.
    pub(crate) fn start(
        dir: &Path,
        mark: &Mark,
        step: u64,
    ) -> Result<(Self, Vec<String>), SpoolError> {
        let path = dir.join(METRICS);
        let starts = Start::all(dir)?;
        let stands_for = |mark: Mark, start: &Start| start.stands_for(&mark).unwrap_or(mark);
        let mut mark = starts.iter().fold(mark.clone(), stands_for);
        let (mut mended, mut notes) = (None, Vec::new());
        if !lines::holds(&path, &mark)? {
            let (left, how, note) = mend((dir, &path), &mark, step)?;
            (mark, mended) = (left, Some(how));
            notes.push(note);
        }
        let rows = Lines::open_at(&path, mark.offset)?;
        let times = Times::open(dir, mark.lines)?;
        // After the cut and before the first new row: a reader of a new row finds the cut.
        notes.extend(Start::append(dir, &mark, step, mended)?);
        let metrics = Metrics {
            rows,
            times,
            count: mark.lines,
        };
        let files = Self {
            metrics: Some(metrics),
            ..Self::system(dir)?
        };
        Ok((files, notes))
    }

    /// Opens the system file only, in an existing directory: one that was removed is not made
    /// again.
    pub(crate) fn system(dir: &Path) -> Result<Self, SpoolError> {
        Ok(Self {
            metrics: None,
            system: Lines::open(&dir.join(SYSTEM))?,
        })
    }

    /// Adds a row that was made at `time`. A metrics row is ignored if only the system file is
    /// open.
    pub(crate) fn append(&mut self, row: &Row, time: f64) {
        match (row.kind, &mut self.metrics) {
            (Kind::Train | Kind::Eval, Some(metrics)) => {
                if metrics.rows.append(&row.line()) {
                    metrics.times.append(metrics.count, time);
                    metrics.count += 1;
                }
            }
            (Kind::Train | Kind::Eval, None) => {}
            (Kind::System | Kind::Event | Kind::Alert, _) => {
                self.system.append(&row.line());
            }
        }
    }

    /// Writes the rows appended so far, in one write for each file.
    pub(crate) fn flush(&mut self) {
        self.each(Lines::flush);
    }

    /// Flushes, and syncs to disk.
    pub(crate) fn sync(&mut self) {
        self.each(Lines::sync);
    }

    fn each(&mut self, work: impl Fn(&mut Lines)) {
        if let Some(metrics) = &mut self.metrics {
            // A reader waits for the time of a row.
            work(metrics.times.lines());
            work(&mut metrics.rows);
        }
        work(&mut self.system);
    }

    /// Syncs, and returns the mark of the metrics.
    ///
    /// # Errors
    ///
    /// The reason why some rows still wait: a checkpoint that counted on them would leave a gap.
    pub(crate) fn mark(&mut self) -> Result<Mark, String> {
        self.sync();
        match (self.trouble(), &self.metrics) {
            (None, Some(metrics)) => Ok(metrics.rows.mark()),
            (None, None) => Ok(Mark::default()),
            (Some(trouble), _) => Err(trouble),
        }
    }

    /// Rows that were lost because memory was full.
    pub(crate) fn dropped(&self) -> u64 {
        let metrics = self.metrics.as_ref();
        metrics.map_or(0, |metrics| metrics.rows.dropped) + self.system.dropped
    }

    /// The reason why rows wait; `None` if the last flush wrote all of them.
    pub(crate) fn trouble(&mut self) -> Option<String> {
        let metrics = self.metrics.as_mut();
        let trouble = metrics.and_then(|metrics| {
            let of_times = metrics.times.lines().trouble();
            metrics.rows.trouble().or(of_times)
        });
        trouble.or_else(|| self.system.trouble())
    }
}
