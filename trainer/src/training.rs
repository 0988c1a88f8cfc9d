//! A run on its way: what the loop does, with what it says of it in rows, in progress and in
//! checkpoints.

use std::sync::Arc;
use std::time::Instant;

use spd_checkpoint::newest;
use spd_dataloader::Loader;
use spd_engine::Store;
use spd_tracker::{Kind, Mark, Row, Spool};

use crate::fault::{Fault, Interrupt};
use crate::gather::gather;
use crate::progress::{LADDER, Progress, Stop, WARMUP};
use crate::refused_step;
use crate::resume::{self, CHECKPOINTS};
use crate::saver::{At, Place, Saver, State};
use crate::state;
use crate::task::{CheckStop, Measured, Task, run_step};

/// A task on its way.
pub(crate) struct Training<'a> {
    pub(crate) task: &'a mut dyn Task,
    pub(crate) place: &'a Place<'a>,
    /// How far it is.
    pub(crate) at: At,
    /// It has no starting values yet: no checkpoint was there to go on from.
    pub(crate) is_new: bool,
    store: &'a mut Store,
    stop: Stop<'a>,
    progress: Progress,
    /// Files that the first rank writes.
    records: Option<Records<'a>>,
}

/// Rows and states.
struct Records<'a> {
    spool: Spool,
    saver: Saver<'a>,
}

/// A way of the saver to save.
type How<'a> = fn(&mut Saver<'a>, State<'_>, &Spool, At, &mut Progress) -> Result<(), Fault>;

/// The state from which a run continues, and its progress and records.
type Restored<'a> = (Option<At>, Progress, Option<Records<'a>>);

impl<'a> Training<'a> {
    /// Restores the newest good checkpoint, if there is one, and cuts the rows back to it. Ranks
    /// but the first read what that leaves.
    ///
    /// # Errors
    ///
    /// Bad input, where the directory is another run's, or its checkpoints are lost.
    pub(crate) fn open(
        task: &'a mut dyn Task,
        store: &'a mut Store,
        place: &'a Place<'a>,
        stop: Stop<'a>,
    ) -> Result<Self, Interrupt> {
        let restored = place.world.in_turn(|| Ok(restore(store, place)?))?;
        let (at, mut progress, records) = restored;
        progress.steps_of(task.program().0.flops(), task.peak());
        Ok(Self {
            task,
            place,
            at: at.unwrap_or(At::WarmUp(0)),
            is_new: at.is_none(),
            store,
            stop,
            progress,
            records,
        })
    }

    /// Starting values and the row about them.
    pub(crate) fn begin(&mut self) -> Result<(), Interrupt> {
        self.show(true);
        let start = self.beside("eval", |task, store, check_stop| {
            task.begin(store, check_stop)
        })?;
        self.is_new = false;
        if let Some(Records { spool, .. }) = &mut self.records
            && !start.is_empty()
        {
            let start = start.into_iter();
            let start = start.map(|(name, value)| (name.replace("eval/", "start/"), value));
            spool.append(row(0, Kind::Eval, start));
        }
        Ok(())
    }

    /// The updates before the first step, of which `made` are made.
    pub(crate) fn warm_up(&mut self, made: u64) -> Result<(), Interrupt> {
        let Self {
            task,
            store,
            progress,
            stop,
            place,
            ..
        } = self;
        let (all, mut now) = (task.warmup_steps(), made);
        let mut check_stop = |made| {
            now = made;
            progress.show(WARMUP, all, made, false);
            place.world.agree(!stop())
        };
        let ended = task.warm_up(store, made, &mut check_stop);
        match &ended {
            Ok(()) => self.at = At::Step(0),
            Err(Interrupt::Stop) => self.at = At::WarmUp(now),
            Err(Interrupt::Fault(_)) => {}
        }
        ended
    }

    /// Ends on a request to stop, all ranks together.
    pub(crate) fn check_stop(&self) -> Result<(), Interrupt> {
        self.place.world.agree(!(self.stop)())
    }

    /// Does what is no step, and leaves its time out of their speed.
    pub(crate) fn beside_steps(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), Interrupt>,
    ) -> Result<(), Interrupt> {
        let clock = Instant::now();
        let ended = work(self);
        self.progress.rest(clock);
        ended
    }

    /// One step, and its row where one is due.
    pub(crate) fn step(&mut self, step: u64, loaders: &mut [Loader]) -> Result<(), Fault> {
        let Self { task, store, .. } = self;
        let is_logged = is_due(step, self.place.log.every) || step + 1 == task.steps();
        let clock = Instant::now();
        let batches = loaders.iter_mut().map(Loader::next);
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        let waited = clock.elapsed();
        if is_logged {
            task.program().0.start_clock();
        }
        run_step(&mut **task, store, &batches, step)?;
        if let Some(Records { saver, .. }) = &mut self.records {
            saver.make_room(store);
        }
        if is_logged {
            let parts = task.fetch(store)?;
            self.progress.times(step, waited, clock.elapsed(), &parts);
        }
        let used = loaders.iter_mut().zip(batches);
        used.for_each(|(loader, batch)| loader.recycle(batch));
        if is_logged {
            refused_step::check(&mut **task, store, step)?;
            let seen = task.observe(store).into_iter();
            let seen = seen.chain(task.scalars(step));
            if let Some(Records { spool, .. }) = &mut self.records {
                spool.append(row(step, Kind::Train, seen));
            }
        }
        self.at = At::Step(step + 1);
        Ok(())
    }

    /// The row of an evaluation.
    pub(crate) fn evaluate(&mut self, is_slow: bool) -> Result<(), Interrupt> {
        refused_step::check(&mut *self.task, self.store, self.at.step())?;
        let values = self.measure(is_slow)?;
        self.append_evaluation(values, is_slow);
        Ok(())
    }

    fn measure(&mut self, is_slow: bool) -> Result<Measured, Interrupt> {
        self.beside("eval", |task, store, check_stop| {
            task.evaluate(store, is_slow, check_stop)
        })
    }

    /// Measurements of the end alone. Their passes are shown, and a request to stop is heard
    /// before each.
    fn climb(&mut self) -> Result<Measured, Interrupt> {
        let Self {
            task,
            store,
            progress,
            stop,
            place,
            ..
        } = self;
        task.climb(store, &mut |made, all| {
            progress.show_beside(LADDER, all, made);
            place.world.agree(!stop())
        })
    }

    fn append_evaluation(&mut self, values: Measured, is_slow: bool) {
        if let Some(Records { spool, .. }) = &mut self.records {
            spool.append(evaluation_row(self.task, self.at.step(), values, is_slow));
        }
    }

    /// The figures, which are worth a warning, not a run.
    pub(crate) fn draw(&mut self) -> Result<(), Interrupt> {
        let (dir, step, world) = (self.place.dir, self.at.step(), self.place.world);
        world.first(|| {
            self.place.check()?;
            let mut check_stop = || {
                self.progress.show("figures", 0, step, false);
                Interrupt::when((self.stop)())
            };
            let drawn = self.task.draw(self.store, dir, step, &mut check_stop);
            if let Err(Interrupt::Fault(fault)) = drawn {
                let note = format!("the figures of step {step} were not drawn: {fault}");
                self.progress.alert(step, note);
                return Ok(());
            }
            drawn
        })
    }

    /// Does with all ranks what takes long and is no step. While it does, the run says that it is
    /// alive, and hears a request to stop.
    ///
    /// - `doing`: the spool's word for it
    fn beside<R>(
        &mut self,
        doing: &'static str,
        work: impl FnOnce(&mut dyn Task, &mut Store, &mut CheckStop<'_>) -> R,
    ) -> R {
        let (step, world) = (self.at.step(), self.place.world);
        let mut check_stop = || {
            self.progress.show(doing, 0, step, false);
            world.agree(!(self.stop)())
        };
        work(&mut *self.task, &mut *self.store, &mut check_stop)
    }

    /// Looks whether a write has ended.
    pub(crate) fn poll_writer(&mut self, what_follows: &str) {
        if let Some(Records { saver, .. }) = &mut self.records {
            saver.poll(&mut self.progress, what_follows);
        }
    }

    /// Has the state written; does nothing where that was done.
    pub(crate) fn save(&mut self) -> Result<(), Fault> {
        self.save_by(Saver::save)
    }

    /// Has the first rank save by `how`, with what it gathers of all ranks.
    fn save_by(&mut self, how: How<'a>) -> Result<(), Fault> {
        self.place.heartbeat.enter("saving");
        refused_step::check(&mut *self.task, self.store, self.at.step())?;
        self.save_gathered(how)
    }

    /// The same where it is known whether a step was refused. All ranks come here alike: only the
    /// first knows what was saved already, and each gives its rows.
    fn save_gathered(&mut self, how: How<'a>) -> Result<(), Fault> {
        let gathered = Arc::new(gather(self.store, self.place.world)?);
        let Some(Records { spool, saver }) = &mut self.records else {
            return Ok(());
        };
        how(
            saver,
            (&mut *self.task, &mut *self.store, &gathered),
            spool,
            self.at,
            &mut self.progress,
        )
    }

    /// Saves the state before the step that was refused, so that the same command meets that step
    /// again at once: parameters and moments are still those before it, and no row follows it. All
    /// ranks wait for that.
    pub(crate) fn save_before_refused(&mut self) {
        let refused = match (self.at, refused_step::halted(self.store)) {
            (At::Step(1..), Ok(Some(step))) if step > 0 => step,
            _ => return,
        };
        // The message of any rank is about that step.
        self.at = At::Step(refused);
        let saved = self.save_gathered(Saver::finish);
        if let Some(Records { spool, .. }) = &self.records {
            let note = match saved {
                Ok(()) => format!(
                    "the state before step {refused} is saved; the same command meets that step again at once"
                ),
                Err(fault) => fault.to_string(),
            };
            self.progress.alert(refused, note);
            // The launcher ends this rank as soon as another one has failed. Faults of the disk are
            // told by other means.
            let _ = spool.sync();
        }
        let _ = self.place.world.agree(false);
    }

    /// Ends a run that has made all its steps: its last figures, evaluation and state.
    /// Returns the evaluation.
    pub(crate) fn finish(&mut self) -> Result<Measured, Interrupt> {
        self.save()?;
        let clock = Instant::now();
        self.draw()?;
        let mut values = self.measure(true)?;
        values.extend(self.climb()?);
        // Before the row: a run that continues from a state repeats every row after it.
        self.finish_saving()?;
        self.append_evaluation(values.clone(), true);
        if let Some(Records { spool, saver }) = &mut self.records {
            saver.finish_rows(spool)?;
        }
        self.progress.rest(clock);
        self.show(true);
        Ok(values)
    }

    /// Leaves on request: saves, once there is anything to save, and says so.
    pub(crate) fn leave(&mut self) -> Result<(), Fault> {
        let note = if self.is_new {
            "stopped before the first step; nothing is saved yet, and the same command starts over"
                .to_owned()
        } else {
            self.finish_saving()?;
            self.at.stopped(match self.task.phase() {
                "target" => " of the target",
                _ => "",
            })
        };
        self.progress.stopped(self.at.step(), note);
        Ok(())
    }

    fn finish_saving(&mut self) -> Result<(), Fault> {
        self.save_by(Saver::finish)
    }

    /// Says how far it is, at most twice a second but for `now`.
    pub(crate) fn show(&mut self, now: bool) {
        let (phase, steps, step) = match self.at {
            At::WarmUp(made) if made > 0 => (WARMUP, self.task.warmup_steps(), made),
            _ => (self.task.phase(), self.task.steps(), self.at.step()),
        };
        self.progress.show(phase, steps, step, now);
    }
}

/// [`Training::open`] of a rank in its turn.
fn restore<'a>(store: &mut Store, place: &'a Place<'a>) -> Result<Restored<'a>, Fault> {
    let root = place.dir.join(CHECKPOINTS);
    if let Some(lock) = place.lock {
        lock.sweep(place.dir)?;
        lock.sweep(&root)?;
    }
    if place.world.is_first() {
        // The target's weights are there: they are those that the checkpoints were made with, or
        // are refused.
        state::mend_frozen(&root, store)?;
    }
    let found = newest(&root)?;
    let resumed = found
        .snapshot
        .as_ref()
        .map(|snapshot| state::restore(snapshot, store, place.config, place.made_of))
        .transpose()?;
    let at = found.snapshot.as_ref().map(At::of);
    if !place.world.is_first() {
        return Ok((at, Progress::felt(place.heartbeat), None));
    }
    let lost = if resumed.is_none() {
        resume::lost(place.dir, &found.set_aside, place.checkpoint.every)?
    } else {
        None
    };
    if let Some(line) = lost.as_ref().filter(|_| !place.is_kept) {
        return Err(Fault::BadInput(line.clone()));
    }
    let (step, mark) = resumed.unwrap_or((0, Mark::default()));
    place.check()?;
    let spool = Spool::start(place.dir, &mark, step)?;
    let mut progress = match place.progress {
        Some(elsewhere) => {
            let mut progress = Progress::at(elsewhere, place.heartbeat)?;
            let notes = spool.mended().iter().cloned();
            notes.for_each(|note| progress.event(step, note));
            progress
        }
        None => Progress::told(&spool, place.heartbeat),
    };
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
    if let Some(at) = at {
        progress.event(step, format!("continued from the checkpoint of {at}"));
    }
    let saver = Saver::new(&root, place, found.snapshot)?;
    saver.remember(&mut progress);
    Ok((at, progress, Some(Records { spool, saver })))
}

/// Whether `step` is one of every `steps`; none is where that is 0.
pub(crate) fn is_due(step: u64, steps: u64) -> bool {
    steps > 0 && step.is_multiple_of(steps)
}

/// The row of an evaluation after `step`.
///
/// - `is_slow`: the step has figures, which the row names even where a disk took none: rows are the
///   same on all disks
pub(crate) fn evaluation_row(
    task: &dyn Task,
    step: u64,
    values: impl IntoIterator<Item = (String, f64)>,
    is_slow: bool,
) -> Row {
    let mut row = row(step, Kind::Eval, values);
    if is_slow {
        row.values.extend(task.figures(step));
    }
    row
}

fn row(step: u64, kind: Kind, values: impl IntoIterator<Item = (String, f64)>) -> Row {
    let values = values.into_iter();
    values.fold(Row::new(step, kind), |row, (name, value)| {
        row.with(name, value)
    })
}
