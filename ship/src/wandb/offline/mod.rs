//! A run in the offline format of W&B's own client, for clusters without a network: the directory
//! is synced from another machine.
//!
//! ```text
//! rows of the run directory -> lines, media, system -> record -> log
//!   -> OUT/offline-run-DATE_TIME-ID/run-ID.wandb, files/
//! ```
//!
//! Values are encoded as for the stream of the server, so `wandb sync` makes the same run as
//! `--tracker wandb`. Only the parts that `wandb sync` adds differ: its telemetry, its files, and
//! the time before each line of the console.
//!
//! Reading order: `log`, `record`, this file.

mod log;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use prost::Message;
use serde_json::Value as Json;
use spd_configs::OnRollback;
use spd_files::atomic;
use spd_tracker::{Kind, ReadError, Row, Start};
use thiserror::Error;

use self::log::Log;
use self::record::{Held, Item, Items, Record, Time};
use super::labels::{Labels, values};
use super::lines::{Line, STEP, steps};
use super::media::{self, Media};
use super::state::State;
use super::stream::{LINE, last_values};
use super::{run_files, shown, system};
use crate::credentials::Environment;
use crate::feed::{Fed, Feed};
use crate::run::{About, RunInfo};
use crate::sink::{End, Stamped};

/// Rows in memory at a time.
const ROWS: usize = 2000;

/// The directory of a run's files.
const FILES: &str = "files";

/// The oldest client that can read the file.
const OLDEST: &str = "0.12.0";

/// Tries of an export, if the run rolls back meanwhile.
const TRIES: u32 = 3;

/// The result of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The directory for `wandb sync`.
    pub dir: PathBuf,
    /// Number of steps with rows.
    pub steps: u64,
}

/// The reason why nothing was written.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The run has no rows yet.
    #[error("{0}: the run has made no rows yet; export it when its first step is logged")]
    NoRows(PathBuf),
    /// The output path exists.
    #[error(
        "{0}: already exists, perhaps from an earlier export; name another directory with --out"
    )]
    InTheWay(PathBuf),
    /// The run directory cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The run rolled back during every try.
    #[error("{0}: the run went back to a checkpoint while it was exported; try again")]
    WentBack(PathBuf),
    /// The disk refuses.
    #[error("{path}: {found}")]
    Disk {
        /// The path that was to be written.
        path: PathBuf,
        /// The error of the system.
        found: io::Error,
    },
}

/// Writes the run in `dir` as a directory in `out` for `wandb sync`, whole or not at all.
///
/// - `about`: the description of the run; labels come from its `[tracker]`, and from W&B's
///   variables
/// - `code`: the launcher's exit code, as for [`crate::Shipper::finish`]; `None` if the run goes on
///
/// # Errors
///
/// When the run has no rows, cannot be read, or keeps rolling back; when the output path exists;
/// when the disk refuses.
pub fn export(
    dir: &Path,
    about: About,
    out: &Path,
    code: Option<u8>,
) -> Result<Exported, ExportError> {
    let unreadable = |found: &dyn ToString| ExportError::Unreadable(found.to_string());
    let starts = Start::all(dir).map_err(|found| unreadable(&found))?;
    let first = starts.into_iter().next();
    let first = first.ok_or_else(|| ExportError::NoRows(dir.to_path_buf()))?;
    let info = RunInfo::of(dir, about, first);
    let end = code.map(|code| End { code });
    write(&info, &Environment::of_process(), out, end)
}

/// Writes a run.
pub(super) fn write(
    run: &RunInfo,
    environment: &Environment,
    out: &Path,
    end: Option<End>,
) -> Result<Exported, ExportError> {
    let since = Time::of(run.started);
    let begun = Timestamp::new(since.seconds, since.nanoseconds).unwrap_or_default();
    let name = begun.strftime("offline-run-%Y%m%d_%H%M%S");
    let dir = out.join(format!("{name}-{}", run.id));
    if std::fs::symlink_metadata(&dir).is_ok() {
        return Err(ExportError::InTheWay(dir));
    }
    let disk = |found| ExportError::Disk {
        path: dir.clone(),
        found,
    };
    atomic::make_dirs(out).map_err(disk)?;
    for _ in 0..TRIES {
        let mut steps = 0;
        let made = atomic::new_dir(&dir, |dir| {
            let file = dir.join(format!("run-{}.wandb", run.id));
            let mut export = Export {
                run,
                files: dir.join(FILES),
                log: Log::begin(BufWriter::new(File::create_new(file)?))?,
                records: 0,
                state: State::default(),
                named: BTreeSet::new(),
            };
            atomic::create_dir(&export.files)?;
            export.begin(&Labels::of(run, environment))?;
            steps = export.rows(end.is_some())?;
            export.end(end)
        });
        match made {
            Ok(()) => return Ok(Exported { dir, steps }),
            Err(Stopped::WentBack) => {}
            Err(Stopped::Unreadable(found)) => {
                return Err(ExportError::Unreadable(found.to_string()));
            }
            Err(Stopped::Disk(found)) => return Err(disk(found)),
        }
    }
    Err(ExportError::WentBack(run.dir.clone()))
}

/// The reason why a try failed.
#[derive(Debug, Error)]
enum Stopped {
    #[error("the run went back")]
    WentBack,
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    #[error(transparent)]
    Disk(#[from] io::Error),
}

/// A directory that is being filled.
struct Export<'r> {
    run: &'r RunInfo,
    /// The directory of the run's files.
    files: PathBuf,
    log: Log<BufWriter<File>>,
    records: i64,
    /// The state that a server would have.
    state: State,
    /// Names of the files that were written.
    named: BTreeSet<String>,
}

impl Export<'_> {
    /// Writes the description of the run.
    fn begin(&mut self, labels: &Labels) -> Result<(), Stopped> {
        self.add(Held::Header(record::Header {
            version: Some(record::Version {
                producer: concat!("spd-launch ", env!("CARGO_PKG_VERSION")).into(),
                oldest: OLDEST.into(),
            }),
        }))?;
        let own = |text: &Option<String>| text.clone().unwrap_or_default();
        let run = record::Run {
            id: self.run.id.clone(),
            entity: own(&labels.entity),
            project: labels.project.clone(),
            config: Some(config(&self.run.config)),
            group: own(&labels.group),
            job_type: self.run.job.into(),
            name: labels.name.clone(),
            notes: own(&labels.notes),
            tags: labels.tags.clone(),
            host: self.run.host.clone(),
            started: Some(Time::of(self.run.started)),
        };
        self.add(Held::Run(run))?;
        if self.run.tracker.on_rollback == OnRollback::Keep {
            for (name, pattern, axis) in [(STEP, "", ""), ("", "*", STEP)] {
                let options = record::Options {
                    is_synced: !axis.is_empty(),
                    is_defined: axis.is_empty(),
                };
                self.add(Held::Metric(record::Metric {
                    name: name.into(),
                    pattern: pattern.into(),
                    axis: axis.into(),
                    options: Some(options),
                }))?;
            }
        }
        Ok(())
    }

    /// Writes all rows; returns the number of their steps. While the run goes on, the last step is
    /// left out, as it may get more rows.
    fn rows(&mut self, is_over: bool) -> Result<u64, Stopped> {
        let run = self.run;
        let starts = || Start::all(&run.dir).map_or(0, |starts| starts.len());
        let (begun, mut count) = (starts(), 0);
        let mut feed = Feed::of(&run.dir, &Default::default(), &Default::default())?;
        loop {
            let rows = match feed.steps(ROWS, is_over)? {
                Fed::RolledBack(..) => return Err(Stopped::WentBack),
                Fed::Steps(fed) => fed.rows,
            };
            if rows.is_empty() {
                break;
            }
            for rows in steps(&rows) {
                self.line(rows)?;
                count += 1;
            }
        }
        // Rows that were made again since may differ from those that were read.
        if starts() != begun {
            return Err(Stopped::WentBack);
        }
        while let Some((_, _, rows)) = feed.system(ROWS)? {
            for stamped in &rows {
                self.happened(stamped)?;
            }
        }
        Ok(count)
    }

    /// Writes the rows of a step as a line of the history, with its files.
    fn line(&mut self, rows: &[Stamped]) -> Result<(), Stopped> {
        let last = self.state.last_step;
        let mut line = Line::of(rows, last, self.run);
        if line.json().len() > LINE {
            line = Line::placeholder(rows, last, self.run);
        }
        self.state.note(&line);
        self.state.owed.clear();
        for media in &line.media {
            self.media(media)?;
        }
        let values = line.values.into_iter();
        self.add(Held::History(record::History {
            items: values.map(|(key, value)| item(&key, value)).collect(),
            step: Some(record::Step {
                num: i64::try_from(line.step).unwrap_or(i64::MAX),
            }),
        }))
    }

    /// Writes a file of a row to the place where `wandb sync` looks for it.
    fn media(&mut self, media: &Media) -> Result<(), Stopped> {
        let Media {
            name, from, drawn, ..
        } = media;
        let read = || media::bytes(self.run, from, name);
        let kind = (record::NOW, record::MEDIA);
        match drawn.clone().or_else(read) {
            Some(bytes) => self.file(name, &bytes, kind),
            None => Ok(()),
        }
    }

    /// Writes a file, once. `how`: when it is sent, and its kind.
    fn file(&mut self, name: &str, bytes: &[u8], how: (i32, i32)) -> Result<(), Stopped> {
        if !self.named.insert(name.into()) {
            return Ok(());
        }
        let path = self.files.join(name);
        if let Some(folder) = path.parent() {
            atomic::make_dirs(folder)?;
        }
        atomic::create_file(&path, &[bytes])?;
        let (policy, kind) = how;
        let path = name.into();
        let files = vec![record::Named { path, policy, kind }];
        self.add(Held::Files(record::Files { files }))
    }

    /// Writes a system row or an event.
    fn happened(&mut self, stamped: &Stamped) -> Result<(), Stopped> {
        let Stamped { row, time } = stamped;
        if row.kind == Kind::System {
            let values = system::measured(row).into_iter();
            let items: Vec<Item> = values
                .map(|(key, value)| item(key.strip_prefix("system.").unwrap_or(&key), value))
                .collect();
            if items.is_empty() {
                return Ok(());
            }
            let time = Some(Time::of(*time));
            return self.add(Held::Stats(record::Stats { time, items }));
        }
        let is_alert = row.kind == Kind::Alert;
        for line in system::told(stamped) {
            self.add(Held::Output(record::Output {
                kind: i32::from(!is_alert),
                time: Some(Time::of(*time)),
                line: format!("{line}\n"),
            }))?;
        }
        if is_alert {
            self.add(Held::Alert(alert(row)))?;
        }
        Ok(())
    }

    /// Writes the end of the run, if there is one, and syncs everything.
    fn end(mut self, end: Option<End>) -> Result<(), Stopped> {
        for name in run_files(self.run) {
            if let Ok(bytes) = self.run.file(&name) {
                self.file(&name, &bytes, (record::END, record::OTHER))?;
            }
        }
        if let Some(values) = last_values(&self.state) {
            let update = values.into_iter().map(|(key, value)| item(key, value));
            let update = update.collect();
            self.add(Held::Summary(Items { update }))?;
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "an i32 of seconds is 68 years"
        )]
        let runtime = self.state.runtime().unwrap_or_default() as i32;
        // Without this record `wandb sync` takes the run for a failed one.
        self.add(Held::Exit(record::Exit {
            code: end.map_or(0, |end| i32::from(shown(end))),
            runtime,
            is_open: end.is_none(),
        }))?;
        let file = self.log.into_inner();
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        atomic::sync(&file)?;
        atomic::sync_dir(&self.files)?;
        Ok(())
    }

    fn add(&mut self, held: Held) -> Result<(), Stopped> {
        self.records += 1;
        let record = Record {
            num: self.records,
            held: Some(held),
        };
        Ok(self.log.add(&record.encode_to_vec())?)
    }
}

fn alert(row: &Row) -> record::Alert {
    record::Alert {
        title: system::title(row).into(),
        text: system::said(row),
        level: "ERROR".into(),
    }
}

/// The values of the run file; `wandb sync` adds those of its own client.
fn config(config: &Json) -> Items {
    let values = values(config).into_iter();
    let update = values.map(|(key, value)| item(key, value.to_string()));
    Items {
        update: update.collect(),
    }
}

fn item(key: &str, value: String) -> Item {
    let key = key.into();
    Item { key, value }
}
