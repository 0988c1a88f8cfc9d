//! TensorBoard's event files, in `RUN/tensorboard`.
//!
//! All rows are in this directory, which TensorBoard shows as one run: train and eval rows,
//! measurements of the machine, events. After a roll-back, and if a file has changed, all of them
//! are written again: a start that voids earlier rows voids rows of all kinds.

mod event;
mod segment;
#[cfg(test)]
mod stories;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use spd_tracker::Kind;

use crate::run::RunInfo;
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped, Taken};
use crate::system_row;
use segment::{Segment, Written};

/// The directory of event files in a run directory.
const DIR: &str = "tensorboard";

/// A directory below it, in which an earlier version wrote rows of the machine. TensorBoard would
/// show it as another run.
const SYSTEM: &str = "system";

/// Bytes that are collected before a write: pictures are large.
const MOST_WAITING: usize = 4 << 20;

/// The rows that were written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct State {
    metrics: Written,
}

/// Writes event files.
#[derive(Debug, Default)]
pub(crate) struct TensorBoard {
    files: Option<Segment>,
}

impl TensorBoard {
    fn files(&mut self, run: &RunInfo) -> &mut Segment {
        let files = || Segment::new(run.dir.join(DIR), &run.host);
        self.files.get_or_insert_with(files)
    }

    fn write_rows(&mut self, run: &RunInfo, written: &mut Written, rows: &[Stamped]) -> Taken {
        let segment = self.files(run);
        let mut records = Vec::new();
        for Stamped { row, time } in rows {
            let values = row.values.iter();
            let values = values.filter_map(|(name, value)| event::tagged(run, name, value));
            records.extend(event::values(*time, row.step, values.collect()));
            if records.len() > MOST_WAITING {
                segment.append(written, &records)?;
                records.clear();
            }
        }
        segment.append(written, &records)
    }

    fn open_files(&mut self, run: &RunInfo, state: &mut State) -> Taken {
        let old = run.dir.join(DIR).join(SYSTEM);
        if old.is_dir() {
            let why = |found: std::io::Error| Refusal::Later {
                why: format!("{}: {found}", old.display()),
                after: None,
            };
            std::fs::remove_dir_all(&old).map_err(why)?;
            let why = "rows of the machine are among the others".to_owned();
            return Err(Refusal::Gone { why });
        }
        let files = self.files(run);
        if files.open(&mut state.metrics)? {
            let config = serde_json::to_string_pretty(&run.config).unwrap_or_default();
            let config = event::text("config", &format!("```json\n{config}\n```"));
            let record = event::values(run.started, 0, vec![config]);
            files.append(&mut state.metrics, &record)?;
        }
        Ok(())
    }
}

impl Sink for TensorBoard {
    type State = State;

    const NAME: &'static str = "tensorboard";

    const EVERY: Duration = Duration::from_secs(2);

    const ROWS: usize = 1000;

    async fn open(&mut self, run: &RunInfo, state: &mut State) -> Result<bool, Refusal> {
        let opened = self.open_files(run, state);
        if let Err(Refusal::Gone { .. }) = opened {
            *state = State::default();
            self.open_files(run, state)?;
            return Ok(true);
        }
        opened.map(|()| false)
    }

    async fn send_metrics(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let before = state.metrics.clone();
        let written = self.write_rows(run, &mut state.metrics, rows);
        if written.is_err() {
            // The same rows come again; those that are written are skipped.
            state.metrics = before;
        }
        written
    }

    async fn send_system(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let mut records = Vec::new();
        for row in rows {
            let step = system_row::step(run, row);
            let note = row.row.note.as_deref().unwrap_or_default();
            let values = match row.row.kind {
                Kind::Alert => vec![event::text("alerts", note)],
                Kind::Event => vec![event::text("events", note)],
                _ => system_row::numbers(row)
                    .map(|(name, value)| event::scalar(&name, value))
                    .collect(),
            };
            records.extend(event::values(row.time, step, values));
        }
        self.files(run).append(&mut state.metrics, &records)
    }

    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        _: RollBack,
    ) -> Result<After, Refusal> {
        *state = State::default();
        self.open_files(run, state)?;
        Ok(After::FromStart)
    }

    async fn close(&mut self, _: &RunInfo, _: &mut State, _: End) -> Taken {
        self.files = None;
        Ok(())
    }
}
