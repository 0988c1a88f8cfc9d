//! TensorBoard's event files, in `RUN/tensorboard`.
//!
//! Train and eval rows are in the directory itself. What is measured of the machine and what happened is in `system` below it, so that a
//! roll-back leaves it as it is.

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
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped};
use crate::system_row;
use segment::{Segment, Written};

/// The directory of event files in that of a run.
const DIR: &str = "tensorboard";

/// The one of rows that no roll-back touches, below it.
const SYSTEM: &str = "system";

/// Bytes that wait to be written: pictures are large.
const MOST_WAITING: usize = 4 << 20;

/// What was written of both kinds of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct State {
    metrics: Written,
    system: Written,
}

/// Writes event files.
#[derive(Debug, Default)]
pub(crate) struct TensorBoard {
    files: Option<Files>,
    anew: bool,
}

#[derive(Debug)]
struct Files {
    metrics: Segment,
    system: Segment,
}

impl TensorBoard {
    fn files(&mut self, run: &RunInfo) -> &mut Files {
        self.files.get_or_insert_with(|| {
            let dir = run.dir.join(DIR);
            Files {
                system: Segment::new(dir.join(SYSTEM), &run.host),
                metrics: Segment::new(dir, &run.host),
            }
        })
    }

    fn write_rows(
        &mut self,
        run: &RunInfo,
        written: &mut Written,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
        let segment = &mut self.files(run).metrics;
        let (mut records, mut next) = (Vec::new(), 0);
        for Stamped { row, time } in rows {
            let values = row.values.iter();
            let values = values.filter_map(|(name, value)| event::tagged(run, name, value));
            records.extend(event::values(*time, row.step, values.collect()));
            next = next.max(row.step + 1);
            if records.len() > MOST_WAITING {
                segment.append(written, &records, next)?;
                records.clear();
            }
        }
        segment.append(written, &records, next)
    }

    fn open_files(&mut self, run: &RunInfo, state: &mut State) -> Result<(), Refusal> {
        let files = self.files(run);
        if files.metrics.open(&mut state.metrics)? {
            let config = serde_json::to_string_pretty(&run.config).unwrap_or_default();
            let config = event::text("config", &format!("```json\n{config}\n```"));
            let record = event::values(run.started, 0, vec![config]);
            files.metrics.append(&mut state.metrics, &record, 0)?;
        }
        files.system.open(&mut state.system).map(drop)
    }
}

impl Sink for TensorBoard {
    type State = State;

    const NAME: &'static str = "tensorboard";

    const EVERY: Duration = Duration::from_secs(2);

    const ROWS: usize = 1000;

    async fn open(&mut self, run: &RunInfo, state: &mut State) -> Result<(), Refusal> {
        self.anew = false;
        let opened = self.open_files(run, state);
        if let Err(Refusal::Gone { .. }) = opened {
            *state = State::default();
            self.open_files(run, state)?;
            self.anew = true;
            return Ok(());
        }
        opened
    }

    fn starts_anew(&self) -> bool {
        self.anew
    }

    async fn send_metrics(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
        let before = state.metrics.clone();
        let written = self.write_rows(run, &mut state.metrics, rows);
        if written.is_err() {
            // The same rows come again, so that those of them that are written are cut.
            state.metrics = before;
        }
        written
    }

    async fn send_system(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
        let (mut records, mut next) = (Vec::new(), 0);
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
            next = next.max(step + 1);
        }
        let files = self.files(run);
        files.system.append(&mut state.system, &records, next)
    }

    async fn skip(&mut self, _: &RunInfo, _: &mut State, _: &[Stamped]) -> Result<(), Refusal> {
        Ok(())
    }

    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        to: RollBack,
    ) -> Result<After, Refusal> {
        let files = self.files(run);
        // Without this, the tail that no cursor knows of would stay in a file that is never looked at again.
        files.metrics.open(&mut state.metrics)?;
        files.metrics.begin(&mut state.metrics, to.step)?;
        Ok(After::GoOn)
    }

    async fn idle(&mut self, _: &RunInfo, _: &mut State) -> Result<(), Refusal> {
        Ok(())
    }

    async fn close(&mut self, _: &RunInfo, _: &mut State, _: End) -> Result<(), Refusal> {
        self.files = None;
        Ok(())
    }
}
