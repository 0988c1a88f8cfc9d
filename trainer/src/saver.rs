//! When a state is saved, and what happens when it cannot be: a disk that is full for a while ends no run.

use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, anyhow};
use serde_json::json;
use spd_checkpoint::{CheckpointError, Snapshot, Writer};
use spd_engine::Store;
use spd_tracker::Spool;

use crate::fault::Fault;
use crate::halt;
use crate::state;
use crate::task::Task;
use crate::train::{Place, Progress};

/// Hands states to the writer's thread.
pub(crate) struct Saver<'a> {
    writer: Writer,
    place: &'a Place<'a>,
    /// The step that was handed over last, until its write fails.
    submitted: Option<u64>,
    /// The newest step on disk.
    written: Option<u64>,
    /// Why the last write failed.
    trouble: Option<String>,
}

type State<'s> = (&'s mut dyn Task, &'s mut Store);

impl<'a> Saver<'a> {
    /// Saves under `root`, from the state that the run resumed from on.
    pub(crate) fn new(
        root: &Path,
        place: &'a Place<'a>,
        resumed: Option<Snapshot>,
    ) -> Result<Self, Fault> {
        let keep = NonZeroUsize::new(place.checkpoint.keep).unwrap_or(NonZeroUsize::MIN);
        let step = resumed.as_ref().map(|snapshot| snapshot.step);
        Ok(Self {
            writer: Writer::spawn(root, keep, resumed)?,
            place,
            submitted: step,
            written: step,
            trouble: None,
        })
    }

    /// Has the state after `step` written; does nothing where that was done.
    pub(crate) fn save(
        &mut self,
        (task, store): State<'_>,
        spool: &mut Spool,
        step: u64,
        progress: &mut Progress,
    ) -> Result<(), Fault> {
        if self.submitted == Some(step) {
            return Ok(());
        }
        halt::check(task, store, step)?;
        store.fetch()?;
        let meta = [
            ("config".to_owned(), json!(self.place.config)),
            ("phase".to_owned(), json!(task.phase())),
            (
                "position".to_owned(),
                json!(step * task.source().1.rows as u64),
            ),
            (
                "metrics".to_owned(),
                serde_json::to_value(spool.mark()).context("the mark of the metrics")?,
            ),
        ];
        // What came of the last one is known before the next one is on its way.
        self.writer.settle();
        self.poll(progress);
        self.writer.submit(|snapshot| {
            state::fill(snapshot, store, step);
            snapshot.meta = meta.into();
        });
        self.submitted = Some(step);
        Ok(())
    }

    /// Takes in what came of the last state, and says so where it is no good news.
    pub(crate) fn poll(&mut self, progress: &mut Progress) {
        while let Some(outcome) = self.writer.poll() {
            match outcome {
                Ok(_) => (self.written, self.trouble) = (self.submitted, None),
                Err(error) => self.warn(&error, progress),
            }
        }
    }

    fn warn(&mut self, error: &CheckpointError, progress: &mut Progress) {
        let step = self.submitted.unwrap_or(0);
        let what = if self.written == self.submitted {
            // Written, and something about an older one went wrong.
            format!("after the checkpoint of step {step}: {error}; training goes on")
        } else {
            self.submitted = None;
            format!(
                "the checkpoint of step {step} was not written: {error}; training goes on, and the next is tried"
            )
        };
        self.trouble = Some(error.to_string());
        progress.event(step, what);
    }

    /// Makes sure that the state after `step` is on disk. A write that failed is tried once more.
    pub(crate) fn finish(
        &mut self,
        (task, store): State<'_>,
        spool: &mut Spool,
        step: u64,
        progress: &mut Progress,
    ) -> Result<(), Fault> {
        for _ in 0..2 {
            self.save((&mut *task, &mut *store), spool, step, progress)?;
            self.writer.settle();
            self.poll(progress);
            if self.written == Some(step) {
                return Ok(());
            }
        }
        let from = match self.written {
            Some(step) => format!("the checkpoint of step {step}"),
            None => "the beginning".to_owned(),
        };
        let trouble = self.trouble.as_deref().unwrap_or("it was not written");
        Err(Fault::Failed(anyhow!(
            "the state after step {step} is not saved: {trouble}; the same command goes on from {from}"
        )))
    }
}
