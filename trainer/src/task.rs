//! Tasks of the training loop: a target, or a decomposition. Both are a program, its parameters and
//! an evaluation.

use std::path::Path;

use spd_dataloader::{Batch, Feed, Source};
use spd_engine::{Arena, Store};
use spd_tracker::Value;

use crate::batch_program::{BatchProgram, PartTimes};
use crate::fault::{Fault, Interrupt};
pub(crate) use crate::metrics::Measured;
use crate::metrics::ladder::CheckPass;
use crate::parameters::{corrections, set_scalars};

/// Called between the batches and files of whatever takes long: ends it on a request to stop.
pub(crate) type CheckStop<'a> = dyn FnMut() -> Result<(), Interrupt> + 'a;

/// The first value of a step that is not finite, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NonFinite {
    /// In words, if it can be found.
    pub(crate) what: Option<String>,
    /// In words.
    pub(crate) advice: &'static str,
}

/// Something that the loop can train.
pub(crate) trait Task {
    /// The phase, in the spool's word.
    fn phase(&self) -> &'static str;

    /// Number of updates.
    fn steps(&self) -> u64;

    /// Steps between evaluations; 0 for the ends only.
    fn eval_every(&self) -> u64;

    /// The program of a step, and the memory in which it runs.
    fn program(&mut self) -> (&mut BatchProgram, &mut Arena);

    /// Waits for the last replay, and fetches what can be observed of it. Returns the time of each
    /// part, if they were timed.
    fn fetch(&mut self, store: &mut Store) -> Result<PartTimes, Fault> {
        let (program, arena) = self.program();
        program.fetch(store, arena)
    }

    /// The source of batches.
    fn source(&self) -> (Source, Feed);

    /// The sources of batches of all streams of data, that one first.
    fn sources(&self) -> Vec<(Source, Feed)> {
        vec![self.source()]
    }

    /// Decay of AdamW's second moment.
    fn beta2(&self) -> f64;

    /// The step scalars of a step, beside AdamW's corrections.
    fn scalars(&self, step: u64) -> Vec<(String, f64)>;

    /// Starting values. Returns what was measured on them, if anything.
    fn begin(
        &mut self,
        store: &mut Store,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt>;

    /// Number of updates that come before the first step.
    fn warmup_steps(&self) -> u64 {
        0
    }

    /// Makes them, of which `made` are made. Before each, `check_stop` is called with how many are
    /// made. After a stop too the state is one to save: what was made is finite.
    fn warm_up(
        &mut self,
        _store: &mut Store,
        _made: u64,
        _check_stop: &mut dyn FnMut(u64) -> Result<(), Interrupt>,
    ) -> Result<(), Interrupt> {
        Ok(())
    }

    /// The training row of the last replay, which was fetched.
    fn observe(&self, store: &Store) -> Measured;

    /// The first non-finite value of a refused step. The program has just been run on that step and
    /// its batches, and is not run any more.
    fn find_non_finite(
        &mut self,
        store: &mut Store,
        batches: &[Batch],
        step: u64,
    ) -> Result<NonFinite, Fault>;

    /// Steps between slow evaluations, figures among them; 0 for the ends only.
    fn slow_every(&self) -> u64 {
        0
    }

    /// The values of a slow evaluation's row that concern the figures of its step.
    fn figures(&self, _step: u64) -> Vec<(String, Value)> {
        Vec::new()
    }

    /// Draws the figures of this step into the run directory, if there are any.
    fn draw(
        &mut self,
        _store: &mut Store,
        _run_dir: &Path,
        _step: u64,
        _check_stop: &mut CheckStop<'_>,
    ) -> Result<(), Interrupt> {
        Ok(())
    }

    /// Measures on held-out batches, what is slow too if it `is_slow`.
    fn evaluate(
        &mut self,
        store: &mut Store,
        is_slow: bool,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt>;

    /// Measures what is of the end of a run alone. Before each pass, `check` is called with how
    /// many are made, and of how many.
    fn climb(
        &mut self,
        _store: &mut Store,
        _check: &mut CheckPass<'_>,
    ) -> Result<Measured, Interrupt> {
        Ok(Measured::new())
    }

    /// The most multiplications and additions a second that its processor makes in the run's
    /// precision, if they are known.
    fn peak(&self) -> Option<f64> {
        None
    }
}

/// One replay on a batch of each stream of data.
///
/// # Errors
///
/// When a GPU refuses, or failed before.
pub(crate) fn run_step(
    task: &mut dyn Task,
    store: &mut Store,
    batches: &[Batch],
    step: u64,
) -> Result<(), Fault> {
    let scalars = task.scalars(step);
    let corrections = corrections(task.beta2(), step + 1);
    let (program, arena) = task.program();
    program.run(store, arena, batches, &|given| {
        given.parameters.step = u32::try_from(step).unwrap_or(u32::MAX);
        set_scalars(given, scalars.iter().map(|(name, value)| (name, *value)));
        set_scalars(given, corrections);
    })
}
