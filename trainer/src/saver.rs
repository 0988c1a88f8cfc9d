//! When a state is saved, and what happens when it cannot be: a disk that is full for a while ends
//! no run.
//!
//! On a GPU the state is [staged](Store::stage): the thread that writes it waits until it has come,
//! and training goes on.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use serde_json::{Value, json};
use spd_checkpoint::{CheckpointError, Lock, Snapshot, Writer};
use spd_engine::Store;
use spd_tracker::Spool;

use crate::fault::Fault;
use crate::gather::Whole;
use crate::heartbeat::Heartbeat;
use crate::progress::{Progress, WARMUP};
use crate::resume::{self, Ingredient};
use crate::run_file::{Checkpoint, Log};
use crate::state;
use crate::task::Task;
use crate::world::World;

/// The run directory of a task, and its saving intervals.
pub(crate) struct Place<'a> {
    /// Holds `checkpoints/`, `metrics.jsonl` and `system.jsonl`.
    pub(crate) dir: &'a Path,
    /// Lock of the directory; the first rank holds it for all.
    pub(crate) lock: Option<&'a Lock>,
    /// The ranks that train it.
    pub(crate) world: &'a World,
    /// When states are saved.
    pub(crate) checkpoint: Checkpoint,
    /// When rows are written.
    pub(crate) log: Log,
    /// The resolved run, its identity; a checkpoint of another run is refused.
    pub(crate) config: &'a str,
    /// Data and target; a checkpoint that was made of others is refused.
    pub(crate) made_of: &'a [Ingredient],
    /// It lies in the cache: what is damaged there is made again, with a word. In a run directory
    /// it is refused.
    pub(crate) is_kept: bool,
    /// Directory of progress, if not `dir`.
    pub(crate) progress: Option<&'a Path>,
    /// The heartbeat.
    pub(crate) heartbeat: &'a Arc<Heartbeat>,
}

impl Place<'_> {
    /// Checks that the directory is still the one that the task began in: nothing is written into
    /// another of its name.
    pub(crate) fn check(&self) -> Result<(), CheckpointError> {
        self.lock.map_or(Ok(()), |lock| lock.check(self.dir))
    }
}

/// How far a state is: updates of the warm-up, as long as that lasts, then finished steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    WarmUp(u64),
    Step(u64),
}

impl At {
    /// Finished steps.
    pub(crate) fn step(self) -> u64 {
        match self {
            Self::WarmUp(_) => 0,
            Self::Step(step) => step,
        }
    }

    /// How far a checkpoint is.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let made = snapshot.meta.get(WARMUP_UPDATES).and_then(Value::as_u64);
        made.map_or(Self::Step(snapshot.step), Self::WarmUp)
    }

    /// Message of a run that was asked to stop here, and saved.
    pub(crate) fn stopped(self, of: &str) -> String {
        let place = match self {
            Self::WarmUp(0) | Self::Step(0) => format!("before the first step{of}, and its start"),
            Self::WarmUp(made) => format!("after update {made} of the warm-up{of}, which"),
            Self::Step(step) => format!("after step {step}{of}, which"),
        };
        format!("stopped {place} is saved; the same command goes on")
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WarmUp(made) => write!(f, "update {made} of the warm-up"),
            Self::Step(step) => write!(f, "step {step}"),
        }
    }
}

/// Key of a checkpoint of the warm-up: the number of updates made.
const WARMUP_UPDATES: &str = "warmup_updates";

/// Key of a checkpoint: the end of its rows.
const METRICS: &str = "metrics";

/// Note on a failed save with steps to come.
pub(crate) const TRAINING_GOES_ON: &str = "; training goes on, and the next is tried";

/// Hands states to the writer's thread.
pub(crate) struct Saver<'a> {
    writer: Writer,
    place: &'a Place<'a>,
    /// The state that was handed over last, until its write fails.
    submitted: Option<At>,
    /// The newest one on disk.
    written: Option<At>,
    /// Why the last write failed.
    trouble: Option<String>,
    /// There is memory for states to leave a GPU through, or it was asked for.
    has_room: bool,
}

/// The state that is saved: that of the first rank, and the rows that it gathered.
pub(crate) type State<'s> = (&'s mut dyn Task, &'s mut Store, &'s Arc<Vec<Whole>>);

impl<'a> Saver<'a> {
    /// Saves under `root`, from the state that the run resumed from on.
    pub(crate) fn new(
        root: &Path,
        place: &'a Place<'a>,
        resumed: Option<Snapshot>,
    ) -> Result<Self, Fault> {
        let keep = NonZeroUsize::new(place.checkpoint.keep).unwrap_or(NonZeroUsize::MIN);
        let at = resumed.as_ref().map(At::of);
        // The writer makes its root where that is missing, and not in another run directory.
        place.check()?;
        Ok(Self {
            writer: Writer::spawn(root, keep, resumed)?,
            place,
            submitted: at,
            written: at,
            trouble: None,
            has_room: false,
        })
    }

    /// Makes room for states to leave a GPU through, once: after the first step, which has waited
    /// for its kernels, so that no later one waits for memory to be pinned.
    pub(crate) fn make_room(&mut self, store: &Store) {
        if !self.has_room {
            self.has_room = true;
            // If there is none, saving reports it.
            let _ = store.make_room_to_stage();
        }
    }

    /// Has the state written; does nothing where that was done.
    pub(crate) fn save(
        &mut self,
        (task, store, gathered): State<'_>,
        spool: &Spool,
        at: At,
        progress: &mut Progress,
    ) -> Result<(), Fault> {
        if self.submitted == Some(at) {
            return Ok(());
        }
        let step = at.step();
        self.place.check()?;
        self.check_rows(spool)?;
        let phase = match at {
            At::WarmUp(_) => WARMUP,
            At::Step(_) => task.phase(),
        };
        let mut meta = vec![
            ("config".to_owned(), json!(self.place.config)),
            (
                resume::MADE_OF.to_owned(),
                resume::remembered(self.place.made_of),
            ),
            ("phase".to_owned(), json!(phase)),
            (
                "position".to_owned(),
                json!(step * task.source().1.rows as u64),
            ),
        ];
        if let At::WarmUp(made) = at {
            meta.push((WARMUP_UPDATES.to_owned(), json!(made)));
        }
        // The result of the last save is known before the next one starts.
        self.writer.settle();
        self.poll(progress, "; the next is tried");
        let saved: Vec<_> = store.lasting().collect();
        let staged = store.stage(&saved).unwrap_or_else(|fault| {
            let note = format!("training waits for the checkpoint of {at}: {fault}");
            progress.event(step, note);
            None
        });
        let mut tensors = Vec::new();
        if staged.is_none() {
            // All is at home, or there was no memory for it to travel to.
            store.fetch()?;
            tensors.extend(saved.iter().map(|&slot| store.named(slot)));
            tensors.extend(gathered.iter().map(Whole::named));
        }
        let is_here = staged.is_none();
        let frozen = state::frozen(store);
        let here = |snapshot: &mut Snapshot| {
            if is_here {
                state::fill(snapshot, &tensors, &frozen, step);
            }
        };
        let names = frozen.clone();
        let (mark, gathered) = (spool.mark(), Arc::clone(gathered));
        self.writer.submit(here, move |snapshot| {
            if let Some(staged) = staged {
                let mut tensors = staged.arrived()?;
                tensors.extend(gathered.iter().map(Whole::named));
                state::fill(snapshot, &tensors, &names, step);
            }
            // A checkpoint counts on all rows before it: without them, a run that goes on from it
            // has a gap.
            let rows = serde_json::to_value(mark.wait()?)?;
            snapshot.meta = meta.into_iter().collect();
            snapshot.meta.insert(METRICS.to_owned(), rows);
            Ok(())
        });
        self.submitted = Some(at);
        Ok(())
    }

    /// Refuses to go on without rows that memory had no room for.
    fn check_rows(&self, spool: &Spool) -> Result<(), Fault> {
        match spool.dropped() {
            0 => Ok(()),
            lost => Err(Fault::Failed(anyhow!(
                "{lost} rows are lost, as the disk took none for too long; the same command goes on from {}",
                self.newest()
            ))),
        }
    }

    /// Makes sure that every row is on the disk.
    pub(crate) fn finish_rows(&self, spool: &Spool) -> Result<(), Fault> {
        let synced = spool.sync();
        self.check_rows(spool)?;
        synced.map_err(|trouble| {
            let from = self.newest();
            Fault::Failed(anyhow!("{trouble}; the same command goes on from {from}"))
        })
    }

    /// Place from which the same command continues, in words.
    fn newest(&self) -> String {
        match self.written {
            Some(at) => format!("the checkpoint of {at}"),
            None => "the beginning".to_owned(),
        }
    }

    /// Takes in what came of the last state, and says so where it is no good news.
    ///
    /// - `then`: what follows a state that was not written, in words
    pub(crate) fn poll(&mut self, progress: &mut Progress, then: &str) {
        while let Some(outcome) = self.writer.poll() {
            match outcome {
                Ok(_) => {
                    (self.written, self.trouble) = (self.submitted, None);
                    self.remember(progress);
                }
                Err(error) => self.warn(&error, then, progress),
            }
        }
    }

    /// Has the directory remember that there is a checkpoint, if there is; see [`resume`].
    pub(crate) fn remember(&self, progress: &mut Progress) {
        if let Some(at) = self.written
            && let Err(error) = (self.place.check())
                .and_then(|()| resume::remember(self.place.dir, Some(at.step())))
        {
            progress.event(at.step(), error.to_string());
        }
    }

    fn warn(&mut self, error: &CheckpointError, then: &str, progress: &mut Progress) {
        let at = self.submitted.unwrap_or(At::Step(0));
        let what = if self.written == self.submitted {
            // Written, and something about an older one went wrong.
            format!("after the checkpoint of {at}: {error}")
        } else {
            self.submitted = None;
            if self.written.is_none() {
                // The disk that did not take the state may not take this; then rows tell of a state
                // that there never was, and only --fresh starts over.
                let _ = resume::remember(self.place.dir, None);
            }
            format!("the checkpoint of {at} was not written: {error}{then}")
        };
        self.trouble = Some(error.to_string());
        progress.alert(at.step(), what);
    }

    /// Makes sure that the state is on disk. A write that failed is tried once more.
    pub(crate) fn finish(
        &mut self,
        (task, store, gathered): State<'_>,
        spool: &Spool,
        at: At,
        progress: &mut Progress,
    ) -> Result<(), Fault> {
        for then in ["; it is tried once more", ""] {
            self.save((&mut *task, &mut *store, gathered), spool, at, progress)?;
            self.writer.settle();
            self.poll(progress, then);
            if self.written == Some(at) {
                return Ok(());
            }
        }
        let from = self.newest();
        let trouble = self.trouble.as_deref().unwrap_or("it was not written");
        Err(Fault::Failed(anyhow!(
            "the state after {at} is not saved: {trouble}; the same command goes on from {from}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ops::Range;
    use std::process::Command;

    use spd_checkpoint::{Lock, Tensor, load, step_path};
    use spd_dataloader::Batch;
    use spd_engine::cuda::Device;
    use spd_engine::{PINNED, Pool, Processor};
    use spd_tracker::Mark;
    use tempfile::TempDir;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::data;
    use crate::decomposition::Decomposition;
    use crate::decomposition_task::DecompositionTask;
    use crate::gather::gather;
    use crate::losses::{Loss, Remembered, Term};
    use crate::refused_step;
    use crate::run_file::{Checkpoint, Log, Run, Schedule};
    use crate::task::run_step;

    /// A decomposition in training.
    struct Training {
        task: DecompositionTask,
        store: Store,
        gathered: Arc<Vec<Whole>>,
    }

    impl Training {
        fn on(processor: &Processor) -> Self {
            let run = preset("tiny-tms", &Overrides::default()).unwrap().run;
            Self::of(&run, processor)
        }

        fn of(run: &Run, processor: &Processor) -> Self {
            let sources = data::open(run).unwrap();
            let mut store = Store::new();
            let decomposition = Decomposition::new(run, &mut store).unwrap();
            let world = World::default();
            let task =
                DecompositionTask::new(decomposition, sources, &mut store, processor, &world);
            let mut task = task.unwrap();
            task.make_room().unwrap();
            task.decomposition.initialise(&mut store);
            for slot in store.lasting().collect::<Vec<_>>() {
                for (at, value) in (0u16..).zip(store.get_mut(slot)) {
                    *value = f32::from(at % 7) / 10.0;
                }
            }
            let gathered = Arc::default();
            Self {
                task,
                store,
                gathered,
            }
        }

        fn go(&mut self, steps: Range<u64>) {
            let (source, feed) = self.task.source();
            let mut batch = Batch::default();
            for step in steps {
                let first = step * feed.rows as u64;
                source.fill(&feed, first, &mut batch).unwrap();
                run_step(
                    &mut self.task,
                    &mut self.store,
                    std::slice::from_ref(&batch),
                    step,
                )
                .unwrap();
            }
        }

        fn state(&mut self) -> State<'_> {
            let gathered = gather(&mut self.store, &World::default());
            self.gathered = Arc::new(gathered.unwrap());
            (&mut self.task, &mut self.store, &self.gathered)
        }

        fn remains(&mut self) -> Vec<Tensor> {
            let (_, store, gathered) = self.state();
            store.fetch().unwrap();
            let mut snapshot = Snapshot::default();
            let tensors = store.lasting().map(|slot| store.named(slot));
            let tensors = tensors.chain(gathered.iter().map(Whole::named));
            let frozen = state::frozen(store);
            state::fill(&mut snapshot, &tensors.collect::<Vec<_>>(), &frozen, 0);
            snapshot.tensors
        }
    }

    /// The remains of so many steps.
    fn state_after(steps: u64) -> Vec<Tensor> {
        let mut training = Training::on(&gpu(&spd_emulated::device()));
        training.go(0..steps);
        training.remains()
    }

    fn gpu(device: &Arc<Device>) -> Processor {
        Processor::Gpu(Some(Arc::clone(device)))
    }

    /// Does something with a saver; where it saved, and what it told.
    fn saving(work: impl FnOnce(&mut Saver<'_>, &Spool, &mut Progress)) -> (TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        let place = Place {
            dir: dir.path(),
            lock: Some(&lock),
            world: &World::default(),
            checkpoint: Checkpoint { every: 3, keep: 9 },
            log: Log { every: 0 },
            config: "",
            made_of: &[],
            is_kept: false,
            progress: None,
            heartbeat: &Arc::default(),
        };
        let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
        let mut progress = Progress::told(&spool, &Arc::default());
        let mut saver = Saver::new(dir.path(), &place, None).unwrap();
        work(&mut saver, &spool, &mut progress);
        drop((spool, progress));
        let told = fs::read_to_string(dir.path().join("system.jsonl")).unwrap();
        drop(saver);
        drop(lock);
        (dir, told)
    }

    /// Saves the third step and the sixth, asks for further ones before anybody waits, and
    /// compares; how often the host waited for each of the two, and what was told.
    fn saved_on(device: &Arc<Device>) -> ([u64; 2], String) {
        let mut training = Training::on(&gpu(device));
        let mut waits = [0; 2];
        let (dir, told) = saving(|saver, spool, progress| {
            waits = [3, 6].map(|step| {
                training.go(step - 3..step);
                saver.make_room(&training.store);
                let before = device.waits();
                let Training { task, store, .. } = &mut training;
                refused_step::check(task, store, step).unwrap();
                let saved = saver.save(training.state(), spool, At::Step(step), progress);
                saved.unwrap();
                device.waits() - before
            });
            training.go(6..8);
            let finished = saver.finish(training.state(), spool, At::Step(8), progress);
            finished.unwrap();
        });
        for step in [3, 6, 8] {
            let found = load(&step_path(dir.path(), step)).unwrap();
            let expected = state_after(step);
            assert!(found.step == step && found.tensors == expected, "{step}");
        }
        (waits, told)
    }

    fn is_there() -> bool {
        let there = Command::new("g++").arg("--version").output().is_ok();
        if !there {
            spd_testing::skip("g++");
        }
        there
    }

    #[test]
    fn a_state_leaves_a_gpu_while_training_goes_on() {
        if !is_there() {
            return;
        }
        let (waits, told) = saved_on(&spd_emulated::device());
        // Whether a step was refused, and at first that what the device started from has arrived;
        // no state is waited for.
        assert_eq!(waits, [2, 1]);
        assert_eq!(told, "");
    }

    #[test]
    fn where_no_memory_can_be_pinned_training_waits_for_the_state() {
        if !is_there() {
            return;
        }
        let training = Training::on(&gpu(&spd_emulated::device()));
        let programs = training.task.program.programs();
        // Of these bytes, a third is not pinned.
        let sent: usize = programs.map(|program| program.own.inputs / 3 * 2).sum();
        let (waits, told) = saved_on(&spd_emulated::device_that_pins(PINNED + sent));
        assert!(waits[0] > 2 && waits[1] > 1, "{waits:?}");
        for step in [3, 6, 8] {
            let line =
                format!("training waits for the checkpoint of step {step}: the GPU cannot pin ");
            assert!(told.contains(&line), "{told}");
        }
    }

    // In one block, and in blocks that a rank computes in turn.
    #[test]
    fn rows_leave_a_gpu_with_the_state_and_training_goes_on_from_them() {
        if !is_there() {
            return;
        }
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        let term = Term::Remembered(Remembered);
        let coeff = Schedule::Constant(0.1);
        run.losses.push(Loss::new(coeff, term));
        for shards in [1, 4] {
            run.train.shards = Some(shards);
            let started = || Training::of(&run, &gpu(&spd_emulated::device()));
            let (dir, told) = saving(|saver, spool, progress| {
                let mut straight = started();
                for step in [3, 6] {
                    straight.go(step - 3..step);
                    let saved = saver.finish(straight.state(), spool, At::Step(step), progress);
                    saved.unwrap();
                }
            });
            assert_eq!(told, "");
            let [three, six] = [3, 6].map(|step| load(&step_path(dir.path(), step)).unwrap());
            let mut resumed = started();
            state::restore(&three, &mut resumed.store, "", &[]).unwrap();
            resumed.go(3..6);
            assert!(resumed.remains() == six.tensors, "{shards} shards");
            let rows = |of: &Snapshot| {
                let mut tensors = of.tensors.iter().cloned();
                tensors.find(|tensor| tensor.name == "losses.remembered.linear2")
            };
            let [three, six] = [three, six].map(|of| rows(&of).unwrap());
            assert!(three.shape == [64, 8] && three.bytes != six.bytes);
        }
    }

    #[test]
    fn a_state_that_does_not_come_is_a_warning_and_the_next_is_tried() {
        let mut training = Training::on(&Processor::Cpu(Arc::new(Pool::single())));
        let (dir, told) = saving(|saver, spool, progress| {
            training.go(0..2);
            saver
                .writer
                .submit(|_| {}, |_| Err("the GPU cannot copy".into()));
            saver.submitted = Some(At::Step(1));
            let finished = saver.finish(training.state(), spool, At::Step(2), progress);
            finished.unwrap();
        });
        let line =
            "the checkpoint of step 1 was not written: the GPU cannot copy; the next is tried";
        assert!(told.contains(line) && told.lines().count() == 1, "{told}");
        assert!(!step_path(dir.path(), 1).try_exists().unwrap());
        assert_eq!(load(&step_path(dir.path(), 2)).unwrap().step, 2);
    }
}
