//! The loop: resume, step, log, evaluate, save. No arithmetic.

use std::time::Instant;

use spd_checkpoint::newest;
use spd_dataloader::Loader;
use spd_engine::{Executor, Store};
use spd_tracker::{Kind, METRICS, Mark, Row, Spool, SpoolError};

use crate::data::PREFETCHED;
use crate::fault::{Fault, Outcome};
use crate::progress::{Progress, Stop, WARMUP};
use crate::refused_step;
use crate::resume::{self, CHECKPOINTS};
use crate::saver::{At, Place, Saver, TRAINING_GOES_ON};
use crate::state;
use crate::task::{GoOn, Task, run_step};

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
            refused_step::check(&mut **task, store, step)?;
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    use spd_checkpoint::{Lock, step_path};
    use spd_configs::{Run, TiedUpdate};
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
        let sources = crate::data::open(run).unwrap();
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
        goes_on_to_the_same_bits(&small_run());
    }

    #[test]
    fn so_does_a_run_whose_tied_sites_have_moments_of_their_own() {
        let mut run = small_run();
        run.decomposition.tied_update = TiedUpdate::Separate;
        goes_on_to_the_same_bits(&run);
    }

    fn goes_on_to_the_same_bits(run: &Run) {
        let straight = tempfile::tempdir().unwrap();
        let lock = Lock::take(straight.path()).unwrap();
        let (questions, outcome) = trained(run, (straight.path(), &lock), u64::MAX);
        assert_eq!(outcome, Outcome::Done);
        let expected = remains(run, straight.path());
        // Start 2, warm-up 3, steps 5, evaluations before steps 0, 2 and 4 and at the end 8, figures before 2 and 4 and at the
        // end 3 each.
        assert_eq!(questions, 27);
        let (mut said, mut continued) = (Vec::new(), Vec::new());
        for stop_at in 0..questions {
            let dir = tempfile::tempdir().unwrap();
            let lock = Lock::take(dir.path()).unwrap();
            let (asked, outcome) = trained(run, (dir.path(), &lock), stop_at);
            assert_eq!((asked, outcome), (stop_at + 1, Outcome::Stopped));
            said.push(events(dir.path()).pop().unwrap());
            let (_, outcome) = trained(run, (dir.path(), &lock), u64::MAX);
            assert_eq!(outcome, Outcome::Done);
            continued.extend(events(dir.path()).into_iter().nth(1));
            let same = remains(run, dir.path()) == expected;
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
}
