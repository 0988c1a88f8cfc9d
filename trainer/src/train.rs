//! The loop: resume, step, log, evaluate, save. No arithmetic.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use spd_checkpoint::{Lock, newest};
use spd_configs::{Checkpoint, Log};
use spd_dataloader::{Batch, Loader};
use spd_engine::{Executor, Store};
use spd_tracker::{Kind, Mark, Row, Spool};

use crate::data;
use crate::fault::{Fault, Outcome};
use crate::halt;
use crate::parameters::BETA1;
use crate::saver::Saver;
use crate::state;
use crate::task::Task;

/// Batches that wait to be used.
pub(crate) const PREFETCHED: usize = 4;

/// Where a task is trained, and how often it is written down.
pub(crate) struct Place<'a> {
    /// Holds `checkpoints/`, `metrics.jsonl` and `system.jsonl`.
    pub(crate) dir: &'a Path,
    /// Nobody else trains there meanwhile.
    pub(crate) lock: &'a Lock,
    /// When states are saved.
    pub(crate) checkpoint: Checkpoint,
    /// When rows are written.
    pub(crate) log: Log,
    /// What makes two directories hold the same run; a checkpoint of another is refused.
    pub(crate) config: &'a str,
    /// Where progress is shown, if not in `dir`.
    pub(crate) progress: Option<&'a Path>,
}

/// Trains to the last step, from the newest good checkpoint if there is one.
pub(crate) fn train(
    task: &mut dyn Task,
    store: &mut Store,
    place: &Place<'_>,
    stop: &AtomicBool,
) -> Result<Outcome, Fault> {
    let root = place.dir.join("checkpoints");
    place.lock.sweep(&root)?;
    let found = newest(&root)?;
    let resumed = found
        .snapshot
        .as_ref()
        .map(|snapshot| state::restore(snapshot, store, place.config))
        .transpose()?;
    let is_new = resumed.is_none();
    let (mut step, mark) = resumed.unwrap_or((0, Mark::default()));
    let mut spool = Spool::roll_back(place.dir, &mark).context("the metrics of the run")?;
    let mut progress = Progress::at(place.progress.unwrap_or(place.dir))?;
    for (path, reason) in &found.set_aside {
        progress.event(
            step,
            format!("checkpoint set aside as {}: {reason}", path.display()),
        );
    }
    if is_new {
        progress.show((task.phase(), task.steps()), 0, true);
        let Some(start) = task.begin(store, stop)? else {
            return Ok(Outcome::Stopped);
        };
        if !start.is_empty() {
            let start = start
                .into_iter()
                .map(|(name, value)| (name.replace("eval/", "start/"), value));
            spool.append(&start.fold(Row::new(0, Kind::Eval), |row, (name, value)| {
                row.with(name, value)
            }));
        }
    } else {
        progress.event(
            step,
            format!("continued from the checkpoint of step {step}"),
        );
    }
    let mut saver = Saver::new(&root, place, found.snapshot)?;
    let (source, feed) = task.source();
    let rows = feed.rows as u64;
    let mut loader = Loader::spawn(source, feed, step * rows, PREFETCHED)?;
    let steps = task.steps();
    while step < steps {
        saver.poll(&mut progress);
        if stop.load(Ordering::Relaxed) {
            saver.finish((task, store), &mut spool, step, &mut progress)?;
            progress.event(
                step,
                "stopped on request; the same command continues".into(),
            );
            return Ok(Outcome::Stopped);
        }
        progress.show((task.phase(), steps), step, step == 0);
        let clock = Instant::now();
        if step == 0 || every(step, task.eval_every()) {
            evaluate(task, store, &mut spool, step)?;
        }
        if step > 0 && every(step, task.figures_every()) {
            draw((task, store), place.dir, step, &mut progress);
        }
        progress.rest(clock.elapsed());
        let is_logged = every(step, place.log.every) || step + 1 == steps;
        let clock = Instant::now();
        let batch = loader.next()?;
        let waited = clock.elapsed();
        // On a GPU the clock of the ops would cost the step its graph.
        if is_logged && matches!(task.program(), Executor::Cpu(_)) {
            task.program().start_profile();
        }
        run_step(task, store, &batch, step)?;
        saver.make_room(store);
        if is_logged {
            task.program().fetch(store)?;
            let parts = task.program().part_times();
            progress.times(step, waited, clock.elapsed(), &parts);
        }
        loader.recycle(batch);
        if is_logged {
            halt::check(task, store, step)?;
            let mut row = Row::new(step, Kind::Train);
            for (name, value) in task
                .observe(store)
                .into_iter()
                .chain(named(task.scalars(step)))
            {
                row = row.with(name, value);
            }
            spool.append(&row);
            spool.flush();
        }
        step += 1;
        if every(step, place.checkpoint.every) {
            saver.save((task, store), &mut spool, step, &mut progress)?;
        }
    }
    let clock = Instant::now();
    saver.save((task, store), &mut spool, step, &mut progress)?;
    evaluate(task, store, &mut spool, step)?;
    draw((task, store), place.dir, step, &mut progress);
    spool.sync();
    saver.finish((task, store), &mut spool, step, &mut progress)?;
    progress.rest(clock.elapsed());
    progress.show((task.phase(), steps), step, true);
    Ok(Outcome::Done)
}

fn every(step: u64, steps: u64) -> bool {
    steps > 0 && step.is_multiple_of(steps)
}

fn named(scalars: Vec<(&'static str, f64)>) -> impl Iterator<Item = (String, f64)> {
    scalars
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
}

/// One replay on a batch.
///
/// # Errors
///
/// When a GPU refuses, or failed before.
pub(crate) fn run_step(
    task: &mut dyn Task,
    store: &mut Store,
    batch: &Batch,
    step: u64,
) -> Result<(), Fault> {
    let scalars = task.scalars(step);
    let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
    let corrections = [
        ("correction1", 1.0 - BETA1.powi(power)),
        ("correction2", 1.0 - task.beta2().powi(power)),
    ];
    let program = task.program();
    data::fill(program, batch);
    program.parameters().step = u32::try_from(step).unwrap_or(u32::MAX);
    #[expect(clippy::cast_possible_truncation, reason = "f64 settings to f32")]
    for (name, value) in scalars.into_iter().chain(corrections) {
        program.set_scalar(name, value as f32);
    }
    Ok(program.run(store)?)
}

fn evaluate(
    task: &mut dyn Task,
    store: &mut Store,
    spool: &mut Spool,
    step: u64,
) -> Result<(), Fault> {
    let mut row = Row::new(step, Kind::Eval);
    for (name, value) in task.evaluate(store)? {
        row = row.with(name, value);
    }
    spool.append(&row);
    spool.flush();
    Ok(())
}

/// Figures are worth a warning, not a run.
fn draw(
    (task, store): (&mut dyn Task, &mut Store),
    dir: &Path,
    step: u64,
    progress: &mut Progress,
) {
    if let Err(fault) = task.draw(store, dir, step) {
        progress.event(
            step,
            format!("the figures of step {step} were not drawn: {fault}"),
        );
    }
}

/// Tells the launcher how far the run is, at most twice a second.
pub(crate) struct Progress {
    spool: Spool,
    shown: Instant,
    /// Time since then that went into no step.
    rested: Duration,
    /// Finished steps when it was last shown; none before the first time, as a run may have begun earlier.
    step: Option<u64>,
}

impl Progress {
    /// Progress that is shown in the run directory `dir`.
    pub(crate) fn at(dir: &Path) -> Result<Self, Fault> {
        let spool = Spool::create_or_open(dir).context("the progress of the run")?;
        Ok(Self {
            spool,
            shown: Instant::now(),
            rested: Duration::ZERO,
            step: None,
        })
    }

    /// Says what is going on, the spool's word for it and its number of steps, after `step` of them.
    pub(crate) fn show(&mut self, (phase, steps): (&str, u64), step: u64, now: bool) {
        let elapsed = self.shown.elapsed();
        if !now && elapsed < Duration::from_millis(500) {
            return;
        }
        let made = self.step.map_or(0, |shown| step.saturating_sub(shown));
        let row = Row::new(step, Kind::System)
            .with_note(phase)
            .with("steps", steps as f64)
            .with("steps_per_s", speed(made, elapsed, self.rested))
            .with("time", unix_time());
        self.append(&row);
        self.shown = Instant::now();
        self.rested = Duration::ZERO;
        self.step = Some(step);
    }

    /// Leaves time out of the speed of the steps: that of an evaluation, of figures, of the last save.
    fn rest(&mut self, time: Duration) {
        self.rested += time;
    }

    /// Says what happened.
    pub(crate) fn event(&mut self, step: u64, note: String) {
        self.append(
            &Row::new(step, Kind::Event)
                .with_note(note)
                .with("time", unix_time()),
        );
    }

    /// Says where the time of a step went, in milliseconds: the wait for its batch, the parts of its program, all of it.
    fn times(
        &mut self,
        step: u64,
        waited: Duration,
        all: Duration,
        parts: &[(&'static str, Duration)],
    ) {
        let ms = |time: &Duration| 1e3 * time.as_secs_f64();
        let mut row = Row::new(step, Kind::System).with("time_ms/data_wait", ms(&waited));
        for (part, time) in parts {
            row = row.with(format!("time_ms/{part}"), ms(time));
        }
        self.append(&row.with("time_ms/step", ms(&all)));
    }

    fn append(&mut self, row: &Row) {
        self.spool.append(row);
        self.spool.flush();
    }
}

/// Steps a second, of a time of which some was rest; 0 where all of it was.
fn speed(steps: u64, elapsed: Duration, rested: Duration) -> f64 {
    let seconds = elapsed.saturating_sub(rested).as_secs_f64();
    if seconds > 0.0 {
        steps as f64 / seconds
    } else {
        0.0
    }
}

fn unix_time() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn steps_of_an_earlier_start_are_no_speed() {
        let dir = tempfile::tempdir().unwrap();
        let mut progress = Progress::at(dir.path()).unwrap();
        for step in [3600, 3605] {
            sleep(Duration::from_millis(2));
            progress.show(("train", 10_000), step, true);
        }
        drop(progress);
        let text = fs::read_to_string(dir.path().join("system.jsonl")).unwrap();
        let speed = |line: &str| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            row["steps_per_s"].as_f64().unwrap()
        };
        let speeds: Vec<f64> = text.lines().map(speed).collect();
        assert!(
            speeds[0] == 0.0 && speeds[1] > 0.0 && speeds[1] <= 2500.0,
            "{text}"
        );
    }

    #[test]
    fn time_beside_the_steps_does_not_slow_them() {
        let seconds = Duration::from_secs_f64;
        let speeds = [(5, 0.0), (5, 1.5), (5, 2.0), (0, 0.0)]
            .map(|(steps, rested)| speed(steps, seconds(2.0), seconds(rested)));
        assert_eq!(speeds.to_vec(), [2.5, 10.0, 0.0, 0.0]);
    }
}
