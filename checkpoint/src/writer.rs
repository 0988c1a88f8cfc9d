//! Writing, here and now or on a thread of its own.

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use spd_files::atomic::NewFile;

use crate::manifest::{FROZEN_SINCE, Files, MANIFEST, META, Manifest, TENSORS, entries};
use crate::step_path::step_path;
use crate::{CheckpointError, Snapshot, atomic, frozen, prune, tensors};

/// Writes a snapshot to `<root>/step-00001200`, whole and synced, and returns that path.
///
/// A checkpoint that is there already under that name is replaced in one operation. Hashes are taken
/// from the snapshot before the first byte goes to the disk, so they vouch for the memory, not for what
/// the disk made of it.
///
/// # Errors
///
/// When a tensor does not fill its shape, the disk is full, or it refuses. What was begun is removed, and
/// what was there before is as it was.
pub fn write(root: &Path, snapshot: &Snapshot) -> Result<PathBuf, CheckpointError> {
    atomic::make_dir(root)?;
    write_in(root, snapshot)
}

/// The same in a root that is there: one that was removed while a run writes to it is not made again.
fn write_in(root: &Path, snapshot: &Snapshot) -> Result<PathBuf, CheckpointError> {
    let entries = entries(snapshot)?;
    // Before the manifest that refers to it.
    let frozen = frozen::put(root, snapshot, &entries)?;
    let header = tensors::header(&entries, false);
    let tensor_pieces = frozen::pieces(&header, snapshot, &entries, false);
    let meta = serde_json::to_vec_pretty(&snapshot.meta).expect("names and JSON values are JSON");

    let manifest = Manifest {
        format: match frozen {
            Some(_) => FROZEN_SINCE,
            None => FROZEN_SINCE - 1,
        },
        step: snapshot.step,
        files: Files {
            meta: frozen::file_entry(&[&meta]),
            tensors: frozen::file_entry(&tensor_pieces),
            frozen,
        },
        tensors: entries,
    }
    .encode();

    let path = step_path(root, snapshot.step);
    atomic::write_dir(
        &path,
        &[
            NewFile {
                name: TENSORS,
                pieces: tensor_pieces,
            },
            NewFile {
                name: META,
                pieces: vec![&meta],
            },
            NewFile {
                name: MANIFEST,
                pieces: vec![&manifest],
            },
        ],
    )?;
    Ok(path)
}

/// What came of a snapshot: where it lies, or why it does not.
type Outcome = Result<PathBuf, CheckpointError>;

/// Fills in the rest of a snapshot, if that comes.
type Rest = Box<dyn FnOnce(&mut Snapshot) -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// A snapshot for the thread, with what it is to be filled with first if that is still to come.
struct Job {
    snapshot: Snapshot,
    rest: Option<Rest>,
}

/// A thread that writes snapshots, so that the step does not wait for a disk.
///
/// ```text
/// submit: fill -> thread:       write, read back, delete the oldest -> outcomes -> poll, settle
/// expect: fill -> thread: rest, write, read back, delete the oldest
///    ^                        |
///    +------- snapshot -------+
/// ```
///
/// One snapshot goes round, so a run holds one copy of its state and no step allocates. [`Writer::submit`] and [`Writer::expect`]
/// wait for the one before, which is waiting only where the disk takes longer than the steps between two checkpoints. Dropping a
/// writer waits for what was submitted.
#[derive(Debug)]
pub struct Writer {
    /// The snapshot, while it is not with the thread.
    spare: Option<Snapshot>,
    jobs: Option<Sender<Job>>,
    written: Receiver<Snapshot>,
    outcomes: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. It writes to `root`, which is made if it is not there, and after each write
    /// deletes all but the newest `keep` as [`prune`] does.
    ///
    /// - `spare`: a snapshot whose memory the first one may take: the one that the run resumed from
    ///
    /// # Errors
    ///
    /// When the root cannot be made, or no thread can be had.
    pub fn spawn(
        root: &Path,
        keep: NonZeroUsize,
        spare: Option<Snapshot>,
    ) -> Result<Self, CheckpointError> {
        atomic::make_dir(root)?;
        let to = root.to_path_buf();
        let writer = Self::start(move |snapshot, outcomes| {
            let written = write_in(&to, snapshot);
            let go_on = written.is_ok();
            // Nobody listens when the writer was dropped; the work is done all the same.
            let _ = outcomes.send(written);
            if go_on && let Err(error) = prune(&to, keep) {
                let _ = outcomes.send(Err(error));
            }
        });
        let mut writer = writer.map_err(|found| {
            CheckpointError::io(root, "start the thread that writes to it", found)
        })?;
        if spare.is_some() {
            writer.spare = spare;
        }
        Ok(writer)
    }

    fn start(
        mut save: impl FnMut(&Snapshot, &Sender<Outcome>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, to_do) = bounded::<Job>(1);
        let (done, written) = bounded(1);
        let (report, outcomes) = unbounded();
        let thread = thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || {
                for Job { mut snapshot, rest } in to_do {
                    match rest.map_or(Ok(()), |rest| rest(&mut snapshot)) {
                        Ok(()) => save(&snapshot, &report),
                        Err(found) => {
                            let _ = report.send(Err(CheckpointError::Source { found }));
                        }
                    }
                    let _ = done.send(snapshot);
                }
            })?;
        Ok(Self {
            spare: Some(Snapshot::default()),
            jobs: Some(jobs),
            written,
            outcomes,
            thread: Some(thread),
        })
    }

    /// Fills the snapshot, which holds what it held before, and has it written. Waits for the one before.
    pub fn submit(&mut self, fill: impl FnOnce(&mut Snapshot)) {
        self.settle();
        let mut snapshot = self.spare.take().unwrap_or_default();
        fill(&mut snapshot);
        self.send(Job {
            snapshot,
            rest: None,
        });
    }

    /// The same where something is still to come: `fill` fills in what is here, and the thread runs `rest`, which waits for the
    /// others. Where these do not come, nothing is written, and [`Writer::poll`] tells why.
    pub fn expect(
        &mut self,
        fill: impl FnOnce(&mut Snapshot),
        rest: impl FnOnce(&mut Snapshot) -> Result<(), Box<dyn Error + Send + Sync>> + Send + 'static,
    ) {
        self.settle();
        let mut snapshot = self.spare.take().unwrap_or_default();
        fill(&mut snapshot);
        self.send(Job {
            snapshot,
            rest: Some(Box::new(rest)),
        });
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            jobs.send(job)
                .expect("the thread ends after its channel does");
        }
    }

    /// Waits until what was submitted is written; [`Writer::poll`] then tells what came of it.
    ///
    /// # Panics
    ///
    /// When the thread has.
    pub fn settle(&mut self) {
        if self.spare.is_some() {
            return;
        }
        match self.written.recv() {
            Ok(snapshot) => self.spare = Some(snapshot),
            Err(_) => self.end(),
        }
    }

    /// What has come of a snapshot since the last call, oldest first; none when there is no news.
    ///
    /// `Ok` means that the directory has its final name and is synced. An error may follow it, when it
    /// does not read back or an older one cannot be deleted. After an error training may go on: the
    /// checkpoints that were there are as they were.
    pub fn poll(&self) -> Option<Result<PathBuf, CheckpointError>> {
        self.outcomes.try_recv().ok()
    }

    fn end(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use spd_files::fault::{self, Then};

    use super::*;
    use crate::latest::steps;
    use crate::{Dtype, Tensor, newest};

    fn snapshot(step: u64) -> Snapshot {
        let tensor = |index: u64, step: u64, is_frozen| Tensor {
            name: format!("t{index}"),
            dtype: Dtype::U64,
            shape: vec![2],
            bytes: [step, index]
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
            is_frozen,
        };
        Snapshot {
            step,
            meta: [("step".to_owned(), step.into())].into(),
            tensors: vec![tensor(0, step, false), tensor(1, step, false)],
        }
    }

    /// One with an array that all have.
    fn with_frozen(step: u64) -> Snapshot {
        let mut snapshot = snapshot(step);
        snapshot.tensors.insert(
            1,
            Tensor {
                name: "frozen".into(),
                is_frozen: true,
                ..self::snapshot(7).tensors[0].clone()
            },
        );
        snapshot
    }

    #[test]
    fn stopped_anywhere_a_new_step_is_there_whole_or_not_at_all() {
        stop_everywhere(1, 2);
    }

    #[test]
    fn stopped_anywhere_a_rewritten_step_is_the_old_or_the_new() {
        stop_everywhere(2, 2);
    }

    /// Writes `new` over a root that holds `old`, stopped before each operation in turn.
    fn stop_everywhere(old: u64, new: u64) {
        let old = Snapshot {
            step: old,
            ..snapshot(1)
        };
        let new = with_frozen(new);
        for then in [Then::Fail, Then::Crash] {
            for operation in 0.. {
                let root = tempfile::tempdir().unwrap();
                write(root.path(), &old).unwrap();
                let (outcome, fired) = fault::at(operation, then, || write(root.path(), &new));
                let left = atomic::sweep(root.path()).unwrap();
                let found = newest(root.path()).unwrap();

                assert!(
                    found.set_aside.is_empty(),
                    "{then:?} {operation}: {found:?}"
                );
                let snapshot = found.snapshot.unwrap();
                assert!(
                    snapshot == old || snapshot == new,
                    "{then:?} {operation}: {snapshot:?}"
                );
                assert!(outcome.is_err() || snapshot == new, "{then:?} {operation}");
                assert!(
                    then == Then::Crash || left.is_empty(),
                    "{then:?} {operation}: {left:?}"
                );
                if !fired {
                    outcome.unwrap();
                    break;
                }
            }
        }
    }

    #[test]
    fn a_failed_write_is_reported_and_the_next_one_works() {
        let root = tempfile::tempdir().unwrap();
        let to = root.path().to_path_buf();
        let mut writer = Writer::start(move |snapshot, outcomes| {
            let stop = if snapshot.step == 2 { 4 } else { usize::MAX };
            let (written, _) = fault::at(stop, Then::Fail, || write(&to, snapshot));
            outcomes.send(written).unwrap();
        })
        .unwrap();
        (1..=3).for_each(|step| writer.submit(|to| *to = snapshot(step)));
        let outcomes = outcomes(&mut writer);

        assert_eq!(outcomes[0].as_ref().unwrap(), &step_path(root.path(), 1));
        let error = outcomes[1].as_ref().unwrap_err().to_string();
        let start = format!("no space left on {}: ", step_path(root.path(), 2).display());
        assert!(error.starts_with(&start), "{error}");
        assert_eq!(outcomes[2].as_ref().unwrap(), &step_path(root.path(), 3));
        assert_eq!(
            atomic::names(root.path()).unwrap(),
            ["step-00000001", "step-00000003"]
        );
    }

    #[test]
    fn what_is_still_to_come_is_filled_in_by_the_thread() {
        let root = tempfile::tempdir().unwrap();
        let keep = NonZeroUsize::new(9).unwrap();
        let mut writer = Writer::spawn(root.path(), keep, Some(snapshot(1))).unwrap();
        let (go, gate) = bounded::<()>(1);
        let beside = thread::current().id();
        let now = move |to: &mut Snapshot| {
            assert_eq!(thread::current().id(), beside);
            assert_eq!(*to, snapshot(1));
        };
        writer.expect(now, move |to| {
            gate.recv()?;
            assert_eq!(thread::current().name(), Some("checkpoint"));
            assert_eq!(*to, snapshot(1));
            *to = snapshot(2);
            Ok(())
        });
        // Whoever asked goes on meanwhile.
        assert!(writer.poll().is_none());
        go.send(()).unwrap();
        writer.expect(
            |_| {},
            |to| {
                to.step = 3;
                Err("the GPU is gone".into())
            },
        );
        writer.submit(|to| *to = snapshot(4));
        let outcomes = outcomes(&mut writer);

        assert_eq!(outcomes[0].as_ref().unwrap(), &step_path(root.path(), 2));
        assert_eq!(
            outcomes[1].as_ref().unwrap_err().to_string(),
            "the GPU is gone"
        );
        assert_eq!(outcomes[2].as_ref().unwrap(), &step_path(root.path(), 4));
        assert_eq!(steps(root.path()).unwrap(), [2, 4]);
        assert_eq!(newest(root.path()).unwrap().snapshot, Some(snapshot(4)));
    }

    #[test]
    fn a_writer_that_is_dropped_waits_for_what_is_still_to_come() {
        let root = tempfile::tempdir().unwrap();
        let mut writer = Writer::spawn(root.path(), NonZeroUsize::MIN, None).unwrap();
        writer.expect(
            |_| {},
            |to| {
                thread::sleep(Duration::from_millis(20));
                *to = snapshot(1);
                Ok(())
            },
        );
        drop(writer);
        assert_eq!(steps(root.path()).unwrap(), [1]);
    }

    fn outcomes(writer: &mut Writer) -> Vec<Outcome> {
        writer.settle();
        std::iter::from_fn(|| writer.poll()).collect()
    }

    #[test]
    fn the_newest_are_kept_and_one_snapshot_goes_round() {
        let root = tempfile::tempdir().unwrap();
        let keep = NonZeroUsize::new(2).unwrap();
        let mut writer = Writer::spawn(root.path(), keep, Some(snapshot(0))).unwrap();
        for step in 1..=5 {
            writer.submit(|to| {
                assert_eq!(*to, snapshot(step - 1));
                *to = snapshot(step);
            });
        }
        let outcomes = outcomes(&mut writer);
        assert!(
            outcomes.len() == 5 && outcomes.iter().all(Result::is_ok),
            "{outcomes:?}"
        );
        assert_eq!(steps(root.path()).unwrap(), [4, 5]);
        assert_eq!(newest(root.path()).unwrap().snapshot, Some(snapshot(5)));
    }

    #[test]
    fn the_second_waits_for_the_first() {
        let (go, gate) = bounded::<()>(0);
        let mut writer = Writer::start(move |_, _| gate.recv().unwrap_or(())).unwrap();
        let submitted = Arc::new(Mutex::new(0));
        thread::scope(|scope| {
            // Dropped with this closure: a failed assertion opens the gate.
            let go = go;
            scope.spawn(|| {
                for step in 1..=2 {
                    writer.submit(|to| *to = snapshot(step));
                    *submitted.lock().unwrap() = step;
                }
            });
            let wait_for = |count| {
                while *submitted.lock().unwrap() < count {
                    thread::yield_now();
                }
            };
            wait_for(1);
            thread::sleep(Duration::from_millis(50));
            assert_eq!(*submitted.lock().unwrap(), 1, "the second did not wait");
            go.send(()).unwrap();
            wait_for(2);
            go.send(()).unwrap();
        });
    }

    #[test]
    fn a_root_that_cannot_be_made_is_refused_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        atomic::write_file(&file, b"").unwrap();
        let error = Writer::spawn(&file, NonZeroUsize::MIN, None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("file: cannot make the directory: File exists"),
            "{error}"
        );
    }
}
