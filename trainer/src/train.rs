//! The loop: resume, step, log, evaluate, save. No arithmetic.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use spd_checkpoint::{Lock, newest};
use spd_configs::{Checkpoint, Log};
use spd_dataloader::{Batch, Loader};
use spd_engine::{Executor, Store};
use spd_tracker::{Kind, METRICS, Mark, Row, Spool, SpoolError};

use crate::data;
use crate::fault::{Fault, Outcome};
use crate::halt;
use crate::parameters::BETA1;
use crate::resume::{self, CHECKPOINTS, Ingredient};
use crate::saver::{At, Saver, TRAINING_GOES_ON};
use crate::state;
use crate::task::{GoOn, Task};

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
    /// Data and target; a checkpoint that was made of others is refused.
    pub(crate) made_of: &'a [Ingredient],
    /// It lies in the cache: what is damaged there is made again, with a word. In a run directory it is refused.
    pub(crate) is_kept: bool,
    /// Where progress is shown, if not in `dir`.
    pub(crate) progress: Option<&'a Path>,
}

/// Whether a stop was asked for; once it was, it stays so.
pub(crate) type Stop<'a> = &'a dyn Fn() -> bool;

/// The spool's word for the updates before the first step.
pub(crate) const WARMUP: &str = "warmup";

/// Trains to the last step, from the newest good checkpoint if there is one. A request to stop is heard between steps, updates
/// of the warm-up, batches of an evaluation and figures; the state is then saved, and the same call goes on from there to the
/// same bits.
pub(crate) fn train(
    task: &mut dyn Task,
    store: &mut Store,
    place: &Place<'_>,
    stop: Stop<'_>,
) -> Result<Outcome, Fault> {
    let root = place.dir.join(CHECKPOINTS);
    place.lock.sweep(place.dir)?;
    place.lock.sweep(&root)?;
    let found = newest(&root)?;
    let resumed = found
        .snapshot
        .as_ref()
        .map(|snapshot| state::restore(snapshot, store, (place.config, place.made_of)))
        .transpose()?;
    let lost = if resumed.is_none() {
        resume::lost(place.dir, &found.set_aside)?
    } else {
        None
    };
    if let Some(line) = lost.as_ref().filter(|_| !place.is_kept) {
        return Err(Fault::BadInput(line.clone()));
    }
    let (step, mark) = resumed.unwrap_or((0, Mark::default()));
    let mut progress = Progress::at(place.progress.unwrap_or(place.dir))?;
    for (path, reason) in &found.set_aside {
        progress.event(
            step,
            format!("checkpoint set aside as {}: {reason}", path.display()),
        );
    }
    if lost.is_some() {
        progress.event(
            step,
            format!(
                "no checkpoint is left in {}; it is trained again",
                root.display()
            ),
        );
    }
    let spool = match Spool::roll_back(place.dir, &mark) {
        // Nobody reads the rows of a target once it is trained.
        Err(SpoolError::Short { .. } | SpoolError::Differs { .. }) if place.is_kept => {
            let rows = place.dir.join(METRICS);
            let note = format!(
                "{}: not the rows of its checkpoint; they begin again",
                rows.display()
            );
            progress.event(step, note);
            Spool::roll_back(place.dir, &Mark::default())?
        }
        other => other?,
    };
    let at = found.snapshot.as_ref().map(At::of);
    if let Some(at) = at {
        progress.event(step, format!("continued from the checkpoint of {at}"));
    }
    let saver = Saver::new(&root, place, found.snapshot)?;
    saver.remember(&mut progress);
    let mut training = Training {
        task,
        store,
        place,
        stop,
        spool,
        progress,
        saver,
        at: at.unwrap_or(At::WarmUp(0)),
    };
    let ended = training.until_end(at.is_none());
    if ended.is_err() {
        // Whoever tells where it failed tells it from the last of these.
        training.show(true);
    }
    ended
}

/// A task on its way.
struct Training<'a> {
    task: &'a mut dyn Task,
    store: &'a mut Store,
    place: &'a Place<'a>,
    stop: Stop<'a>,
    spool: Spool,
    progress: Progress,
    saver: Saver<'a>,
    at: At,
}

impl Training<'_> {
    fn until_end(&mut self, is_new: bool) -> Result<Outcome, Fault> {
        if is_new && !self.begin()? {
            let note = "stopped before the first step; nothing is saved yet, and the same command begins anew";
            self.progress.stopped(0, note.to_owned());
            return Ok(Outcome::Stopped);
        }
        if let At::WarmUp(made) = self.at
            && !self.warm_up(made)?
        {
            return self.leave();
        }
        let step = self.at.step();
        let (source, feed) = self.task.source();
        let first = step * feed.rows as u64;
        let mut loader = Loader::spawn(source, feed, first, PREFETCHED)?;
        self.show(true);
        for step in step..self.task.steps() {
            self.saver.poll(&mut self.progress, TRAINING_GOES_ON);
            self.show(false);
            if !self.look(step)? {
                return self.leave();
            }
            self.step(step, &mut loader)?;
            if every(step + 1, self.place.checkpoint.every) {
                self.save()?;
            }
        }
        self.save()?;
        let clock = Instant::now();
        // What was said after this state is said anew by a run that continues from it.
        if !self.draw()? || !self.evaluate()? {
            return self.leave();
        }
        self.finish()?;
        self.saver.finish_rows(&mut self.spool)?;
        self.progress.rest(clock);
        self.show(true);
        Ok(Outcome::Done)
    }

    /// Starting values and the row about them. Whether it came to that.
    fn begin(&mut self) -> Result<bool, Fault> {
        self.show(true);
        let start = self.beside("eval", |task, store, go_on| task.begin(store, go_on))?;
        let Some(start) = start else {
            return Ok(false);
        };
        if !start.is_empty() {
            let start = start.into_iter();
            let start = start.map(|(name, value)| (name.replace("eval/", "start/"), value));
            self.spool.append(&row(0, Kind::Eval, start));
        }
        Ok(true)
    }

    /// The updates before the first step, of which `made` are made. Whether all are made now.
    fn warm_up(&mut self, made: u64) -> Result<bool, Fault> {
        let Self {
            task,
            store,
            progress,
            stop,
            ..
        } = self;
        let all = task.warmup_steps();
        let mut go_on = |made| {
            progress.show((WARMUP, all), made, false);
            !stop()
        };
        let made = task.warm_up(store, made, &mut go_on)?;
        self.at = if made < all {
            At::WarmUp(made)
        } else {
            At::Step(0)
        };
        Ok(made == all)
    }

    /// What is looked at before a step: figures and an evaluation, where they are due. Whether to go on with the step.
    fn look(&mut self, step: u64) -> Result<bool, Fault> {
        if (self.stop)() {
            return Ok(false);
        }
        let clock = Instant::now();
        if step > 0 && every(step, self.task.figures_every()) && !self.draw()? {
            return Ok(false);
        }
        // Last of all: a run that stops here is continued before the evaluation, and must have no row of it.
        if (step == 0 || every(step, self.task.eval_every())) && !self.evaluate()? {
            return Ok(false);
        }
        self.progress.rest(clock);
        Ok(true)
    }

    fn step(&mut self, step: u64, loader: &mut Loader) -> Result<(), Fault> {
        let Self { task, store, .. } = self;
        let is_logged = every(step, self.place.log.every) || step + 1 == task.steps();
        let clock = Instant::now();
        let batch = loader.next()?;
        let waited = clock.elapsed();
        // On a GPU the clock of the ops would cost the step its graph.
        if is_logged && matches!(task.program(), Executor::Cpu(_)) {
            task.program().start_profile();
        }
        run_step(&mut **task, store, &batch, step)?;
        self.saver.make_room(store);
        if is_logged {
            task.program().fetch(store)?;
            let parts = task.program().part_times();
            self.progress.times(step, waited, clock.elapsed(), &parts);
        }
        loader.recycle(batch);
        if is_logged {
            halt::check(&mut **task, store, step)?;
            let seen = task.observe(store).into_iter();
            let seen = seen.chain(named(task.scalars(step)));
            self.spool.append(&row(step, Kind::Train, seen));
            self.spool.flush();
        }
        self.at = At::Step(step + 1);
        Ok(())
    }

    /// The row of an evaluation. Whether there is one; not so where it was left on request.
    fn evaluate(&mut self) -> Result<bool, Fault> {
        let Some(values) = self.beside("eval", |task, store, go_on| task.evaluate(store, go_on))?
        else {
            return Ok(false);
        };
        self.spool.append(&row(self.at.step(), Kind::Eval, values));
        self.spool.flush();
        Ok(true)
    }

    /// The figures. Whether it was to go on; figures are worth a warning, not a run.
    fn draw(&mut self) -> Result<bool, Fault> {
        let (dir, step) = (self.place.dir, self.at.step());
        let drawn = self.beside("figures", |task, store, go_on| {
            task.draw(store, (dir, step), go_on)
        });
        drawn.or_else(|fault| {
            let note = format!("the figures of step {step} were not drawn: {fault}");
            self.progress.event(step, note);
            Ok(true)
        })
    }

    /// Does what takes long and is no step. While it does, the run says that it is alive, and hears a request to stop.
    ///
    /// - `doing`: the spool's word for it
    fn beside<R>(
        &mut self,
        doing: &str,
        work: impl FnOnce(&mut dyn Task, &mut Store, &mut GoOn<'_>) -> R,
    ) -> R {
        let step = self.at.step();
        let mut go_on = || self.progress.alive(doing, step, self.stop);
        work(&mut *self.task, &mut *self.store, &mut go_on)
    }

    fn save(&mut self) -> Result<(), Fault> {
        let (spool, progress) = (&mut self.spool, &mut self.progress);
        self.saver.save(
            (&mut *self.task, &mut *self.store),
            spool,
            self.at,
            progress,
        )
    }

    fn finish(&mut self) -> Result<(), Fault> {
        let (spool, progress) = (&mut self.spool, &mut self.progress);
        self.saver.finish(
            (&mut *self.task, &mut *self.store),
            spool,
            self.at,
            progress,
        )
    }

    /// Saves and leaves.
    fn leave(&mut self) -> Result<Outcome, Fault> {
        self.finish()?;
        let of = match self.task.phase() {
            "target" => " of the target",
            _ => "",
        };
        let note = self.at.stopped(of);
        self.progress.stopped(self.at.step(), note);
        Ok(Outcome::Stopped)
    }

    fn show(&mut self, now: bool) {
        let (phase, step) = match self.at {
            At::WarmUp(made) if made > 0 => ((WARMUP, self.task.warmup_steps()), made),
            _ => ((self.task.phase(), self.task.steps()), self.at.step()),
        };
        self.progress.show(phase, step, now);
    }
}

fn every(step: u64, steps: u64) -> bool {
    steps > 0 && step.is_multiple_of(steps)
}

fn row(step: u64, kind: Kind, values: impl IntoIterator<Item = (String, f64)>) -> Row {
    let values = values.into_iter();
    values.fold(Row::new(step, kind), |row, (name, value)| {
        row.with(name, value)
    })
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

    /// Says that the run is alive in what it does after `step`, in the spool's word; whether it is to go on with that.
    pub(crate) fn alive(&mut self, doing: &str, step: u64, stop: Stop<'_>) -> bool {
        self.show((doing, 0), step, false);
        !stop()
    }

    /// Leaves the time since `clock` out of the speed of the steps: that of an evaluation, of figures, of the last save.
    fn rest(&mut self, clock: Instant) {
        self.rested += clock.max(self.shown).elapsed();
    }

    /// Says, for the launcher to repeat, that the run leaves on request, and what of it is saved.
    pub(crate) fn stopped(&mut self, step: u64, note: String) {
        let row = Row::new(step, Kind::Event).with_note(note);
        self.append(&row.with("stopped", 1.0).with("time", unix_time()));
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
    use std::cell::Cell;
    use std::fs;
    use std::sync::Arc;
    use std::thread::sleep;
    use std::time::Duration;

    use spd_checkpoint::step_path;
    use spd_configs::Run;
    use spd_engine::{Pool, Processor};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;
    use crate::decomposition_task::DecompositionTask;

    /// All that a rank has in its phases: a warm-up, evaluations at both ends and between, figures, and a checkpoint that was
    /// made while nobody asked for a stop.
    fn small_run() -> Run {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        run.train.steps = 5;
        run.train.faithfulness_warmup.steps = 3;
        (run.eval.every, run.eval.batches, run.eval.figures_every) = (2, 2, 2);
        run.eval.batch_size = 8;
        (run.log.every, run.checkpoint.every, run.checkpoint.keep) = (1, 3, 9);
        run
    }

    /// Trains in a directory until a stop is asked for at the given question, counted from 0. How many questions there were,
    /// and how it ended.
    fn trained(run: &Run, (dir, lock): (&Path, &Lock), stop_at: u64) -> (u64, Outcome) {
        let processor = Processor::Cpu(Arc::new(Pool::single()));
        let sources = data::open(run).unwrap();
        let mut store = Store::new();
        let decomposition = Decomposition::new(run, &mut store).unwrap();
        let task = DecompositionTask::new(decomposition, sources, &mut store, &processor);
        let mut task = task.unwrap();
        task.make_room().unwrap();
        let place = Place {
            dir,
            lock,
            checkpoint: run.checkpoint,
            log: run.log,
            config: "",
            made_of: &[],
            is_kept: false,
            progress: None,
        };
        let asked = Cell::new(0);
        let stop = || {
            asked.set(asked.get() + 1);
            asked.get() > stop_at
        };
        let outcome = train(&mut task, &mut store, &place, &stop).unwrap();
        (asked.get(), outcome)
    }

    /// Every bit that training leaves: rows, and the last state with its moments.
    fn remains(run: &Run, dir: &Path) -> (String, Vec<u8>) {
        let rows = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
        let state = step_path(&dir.join("checkpoints"), run.train.steps);
        (rows, fs::read(state.join("tensors.safetensors")).unwrap())
    }

    fn events(dir: &Path) -> Vec<String> {
        let text = fs::read_to_string(dir.join("system.jsonl")).unwrap();
        let rows = text.lines().map(|line| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            (row["kind"] == "event").then(|| row["note"].as_str().unwrap().to_owned())
        });
        rows.flatten().collect()
    }

    #[test]
    fn a_stop_is_heard_everywhere_and_the_run_goes_on_to_the_same_bits() {
        let run = small_run();
        let straight = tempfile::tempdir().unwrap();
        let lock = Lock::take(straight.path()).unwrap();
        let (questions, outcome) = trained(&run, (straight.path(), &lock), u64::MAX);
        assert_eq!(outcome, Outcome::Done);
        let expected = remains(&run, straight.path());
        // Start 2, warm-up 3, steps 5, evaluations before steps 0, 2 and 4 and at the end 8, figures before 2 and 4 and at the
        // end 3 each.
        assert_eq!(questions, 27);
        let (mut said, mut continued) = (Vec::new(), Vec::new());
        for stop_at in 0..questions {
            let dir = tempfile::tempdir().unwrap();
            let lock = Lock::take(dir.path()).unwrap();
            let (asked, outcome) = trained(&run, (dir.path(), &lock), stop_at);
            assert_eq!((asked, outcome), (stop_at + 1, Outcome::Stopped));
            said.push(events(dir.path()).pop().unwrap());
            let (_, outcome) = trained(&run, (dir.path(), &lock), u64::MAX);
            assert_eq!(outcome, Outcome::Done);
            continued.extend(events(dir.path()).into_iter().nth(1));
            let same = remains(&run, dir.path()) == expected;
            assert!(same, "stopped at {stop_at}");
        }
        said.dedup();
        continued.dedup();
        let saved = |place: &str| format!("stopped {place} is saved; the same command goes on");
        let mut words = vec![
            "stopped before the first step; nothing is saved yet, and the same command begins anew"
                .to_owned(),
            saved("before the first step, and its start"),
            saved("after update 1 of the warm-up, which"),
            saved("after update 2 of the warm-up, which"),
            saved("before the first step, and its start"),
        ];
        words.extend((1..=5).map(|step| saved(&format!("after step {step}, which"))));
        assert_eq!(said, words);
        let updates = (0..3).map(|made| format!("update {made} of the warm-up"));
        let places = updates.chain((0..=5).map(|step| format!("step {step}")));
        let from = places.map(|place| format!("continued from the checkpoint of {place}"));
        assert_eq!(continued, from.collect::<Vec<_>>());
    }

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
