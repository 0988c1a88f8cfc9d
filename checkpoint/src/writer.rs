//! Writes checkpoints, immediately or on a thread.

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::manifest::{FROZEN_SINCE, Files, MANIFEST, META, Manifest, TENSORS, entries};
use crate::step_path::step_path;
use crate::{CheckpointError, Snapshot, atomic, frozen, prune, tensors};

/// Writes a snapshot to `<root>/step-00001200`, synced, and returns that path. `root` is created if
/// missing; its parent must exist.
///
/// An existing checkpoint of that name is replaced atomically. Hashes are computed from the
/// snapshot in memory before the first byte is written.
///
/// # Errors
///
/// When a tensor does not fill its shape, the disk is full, or it refuses. Unfinished files are
/// then removed, and an existing checkpoint is unchanged.
pub fn write(root: &Path, snapshot: &Snapshot) -> Result<PathBuf, CheckpointError> {
    atomic::make_dir(root)?;
    write_in(root, snapshot)
}

/// Like [`write()`] for an existing root: a root that was removed during a run is not created
/// again.
fn write_in(root: &Path, snapshot: &Snapshot) -> Result<PathBuf, CheckpointError> {
    let entries = entries(snapshot)?;
    // The file must exist before the manifest that refers to it.
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
    let files: [(&str, &[&[u8]]); 3] = [
        (TENSORS, &tensor_pieces),
        (META, &[&meta]),
        (MANIFEST, &[&manifest]),
    ];
    atomic::write_dir(&path, &files)?;
    Ok(path)
}

/// The path of a written checkpoint, or the reason why there is none.
type Outcome = Result<PathBuf, CheckpointError>;

/// Fills in the rest of a snapshot, once that arrives.
type Rest = Box<dyn FnOnce(&mut Snapshot) -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// A snapshot for the thread, and the callback that fills in its rest.
struct Job {
    snapshot: Snapshot,
    rest: Rest,
}

/// Writes snapshots on a thread, so that the step does not wait for the disk.
///
/// ```text
/// submit: fill -> thread: rest, write, read back, delete the oldest -> outcomes -> poll, settle
///    ^                        |
///    +------- snapshot -------+
/// ```
///
/// One snapshot is passed back and forth, so a run has one copy of its state and no step allocates.
/// [`Writer::submit`] waits for the previous write, which takes time only where the disk is slower
/// than the steps between two checkpoints. Dropping a writer waits for the last one.
#[derive(Debug)]
pub struct Writer {
    /// The snapshot, while the thread does not have it.
    spare: Option<Snapshot>,
    jobs: Option<Sender<Job>>,
    written: Receiver<Snapshot>,
    outcomes: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. It writes to `root`, which is created if missing; its parent must exist.
    /// After each write it deletes all but the newest `keep` as [`prune`] does.
    ///
    /// - `spare`: a snapshot whose memory is reused for the first one, such as the one that the run
    ///   resumed from
    ///
    /// # Errors
    ///
    /// When the root cannot be created, or the thread cannot start.
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
            // The receiver is gone when the writer was dropped; the write and the pruning are done
            // all the same.
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
                    match rest(&mut snapshot) {
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

    /// Has `fill` update the snapshot, which has its previous content, and queues it; the thread
    /// calls `rest`, which waits for what arrives later. Waits for the previous write. If `rest`
    /// fails, nothing is written, and [`Writer::poll`] returns the error.
    pub fn submit(
        &mut self,
        fill: impl FnOnce(&mut Snapshot),
        rest: impl FnOnce(&mut Snapshot) -> Result<(), Box<dyn Error + Send + Sync>> + Send + 'static,
    ) {
        self.settle();
        let mut snapshot = self.spare.take().unwrap_or_default();
        fill(&mut snapshot);
        let rest = Box::new(rest);
        if let Some(jobs) = &self.jobs {
            jobs.send(Job { snapshot, rest })
                .expect("the thread ends after its channel does");
        }
    }

    /// Waits for the pending write, whose result [`Writer::poll`] then returns.
    ///
    /// # Panics
    ///
    /// When the thread has panicked.
    pub fn settle(&mut self) {
        if self.spare.is_some() {
            return;
        }
        match self.written.recv() {
            Ok(snapshot) => self.spare = Some(snapshot),
            Err(_) => self.end(),
        }
    }

    /// The result of a write since the last call, oldest first; `None` if there is no new one.
    ///
    /// `Ok` means that the directory has its final name and is synced. An error may follow when it
    /// does not read back or an older one cannot be deleted. After an error training may go on:
    /// earlier checkpoints are unchanged.
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

    use spd_testing::faults::{self, Then};

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

    /// A snapshot with a frozen tensor, the same for every step.
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
    fn an_interrupted_new_step_is_complete_or_absent() {
        stop_everywhere(1, 2);
    }

    #[test]
    fn an_interrupted_rewrite_leaves_the_old_or_the_new_step() {
        stop_everywhere(2, 2);
    }

    /// Writes `new` over a root that holds `old`, interrupted before each operation in turn.
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
                let (outcome, fired) = faults::at(operation, then, || write(root.path(), &new));
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
            let (written, _) = faults::at(stop, Then::Fail, || write(&to, snapshot));
            outcomes.send(written).unwrap();
        })
        .unwrap();
        (1..=3).for_each(|step| writer.submit(|to| *to = snapshot(step), |_| Ok(())));
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
    fn the_rest_is_filled_in_on_the_thread() {
        let root = tempfile::tempdir().unwrap();
        let keep = NonZeroUsize::new(9).unwrap();
        let mut writer = Writer::spawn(root.path(), keep, Some(snapshot(1))).unwrap();
        let (go, gate) = bounded::<()>(1);
        let beside = thread::current().id();
        let now = move |to: &mut Snapshot| {
            assert_eq!(thread::current().id(), beside);
            assert_eq!(*to, snapshot(1));
        };
        writer.submit(now, move |to| {
            gate.recv()?;
            assert_eq!(thread::current().name(), Some("checkpoint"));
            assert_eq!(*to, snapshot(1));
            *to = snapshot(2);
            Ok(())
        });
        // The caller goes on meanwhile.
        assert!(writer.poll().is_none());
        go.send(()).unwrap();
        writer.submit(
            |_| {},
            |to| {
                to.step = 3;
                Err("the GPU is gone".into())
            },
        );
        writer.submit(|to| *to = snapshot(4), |_| Ok(()));
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
    fn dropping_a_writer_waits_for_the_rest() {
        let root = tempfile::tempdir().unwrap();
        let mut writer = Writer::spawn(root.path(), NonZeroUsize::MIN, None).unwrap();
        writer.submit(
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
    fn the_newest_are_kept_and_one_snapshot_is_reused() {
        let root = tempfile::tempdir().unwrap();
        let keep = NonZeroUsize::new(2).unwrap();
        let mut writer = Writer::spawn(root.path(), keep, Some(snapshot(0))).unwrap();
        for step in 1..=5 {
            let fill = |to: &mut Snapshot| {
                assert_eq!(*to, snapshot(step - 1));
                *to = snapshot(step);
            };
            writer.submit(fill, |_| Ok(()));
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
    fn the_second_submit_waits_for_the_first_write() {
        let (go, gate) = bounded::<()>(0);
        let mut writer = Writer::start(move |_, _| gate.recv().unwrap_or(())).unwrap();
        let submitted = Arc::new(Mutex::new(0));
        thread::scope(|scope| {
            // Dropped with this closure, so that a failed assertion unblocks the thread.
            let go = go;
            scope.spawn(|| {
                for step in 1..=2 {
                    writer.submit(|to| *to = snapshot(step), |_| Ok(()));
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
    fn spawn_refuses_a_root_that_cannot_be_made() {
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
