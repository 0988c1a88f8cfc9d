//! The append side, used by rank 0.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::SpoolError;
use crate::files::Files;
use crate::lines::MOST_WAITING;
use crate::mark::Mark;
use crate::queue::{Message, Queue, size};
use crate::row::{Kind, Row};
use crate::starts::now;

/// Time between two polls of the writing thread. Rows of that time may be lost if the process is
/// killed.
const LOOK: Duration = Duration::from_millis(20);

/// Time until written rows are synced.
const SYNC: Duration = Duration::from_secs(1);

/// Time between two tries to write rows that the disk refused.
const RETRY: Duration = Duration::from_millis(500);

/// The files of a run, appended to by a thread of its own.
///
/// [`Spool::append`] queues a row and returns. It waits for no disk and no other program, only for
/// another append at the same moment. The thread writes the row within 20 milliseconds, and syncs
/// it within a second. Appending never fails a run: rows that the disk refuses wait in memory, at
/// most 16 MiB for each file and as much in the queue, and are tried again. Rows beyond that are
/// lost, and [`Spool::dropped`] counts them. Clones append to the same thread; dropping the last
/// one writes all rows.
#[derive(Clone)]
pub struct Spool(Arc<Handle>);

/// The shared state of all clones.
struct Handle {
    mended: Vec<String>,
    queue: Arc<Queue<Asked>>,
    /// `None` once it is joined.
    thread: Option<JoinHandle<()>>,
}

/// The channel for the mark of the synced metrics, or for the reason why not all is written.
type Asked = SyncSender<Result<Mark, String>>;

/// A mark that the thread sets once the rows before it are on disk.
#[must_use]
pub struct PendingMark(Receiver<Result<Mark, String>>);

impl PendingMark {
    /// Waits for the mark.
    ///
    /// # Errors
    ///
    /// The reason why rows before it are not on disk, in one line.
    pub fn wait(self) -> Result<Mark, String> {
        let mark = self.0.recv();
        mark.unwrap_or_else(|_| Err("the thread that writes the rows is gone".to_owned()))
    }
}

impl Spool {
    /// Opens the spool in the run directory `dir` as it was at the checkpoint that holds `mark`,
    /// after `step` steps. Later train and eval rows are cut, which `starts.jsonl` records. System
    /// rows, events and alerts stay. Missing files are made.
    ///
    /// A run without a checkpoint starts at `Mark::default()`. A damaged file is kept under another
    /// name and written again from its readable rows, and an alert says so.
    ///
    /// # Errors
    ///
    /// When the directory does not exist, or the disk refuses.
    pub fn start(dir: &Path, mark: &Mark, step: u64) -> Result<Self, SpoolError> {
        let (files, notes) = Files::start(dir, mark, step)?;
        let spool = Self::run(dir, files, notes)?;
        for note in spool.mended() {
            let row = Row::new(step, Kind::Alert).with_note(note);
            spool.append(row.with("time", now()));
        }
        Ok(spool)
    }

    /// The lines about damaged files, from the start.
    pub fn mended(&self) -> &[String] {
        &self.0.mended
    }

    /// Opens only the system file of `dir`, for system rows, events and alerts.
    ///
    /// # Errors
    ///
    /// When the directory does not exist, or the disk refuses.
    pub fn system(dir: &Path) -> Result<Self, SpoolError> {
        Self::run(dir, Files::system(dir)?, Vec::new())
    }

    fn run(dir: &Path, files: Files, mended: Vec<String>) -> Result<Self, SpoolError> {
        let queue = Arc::new(Queue::of(MOST_WAITING));
        let shared = Arc::clone(&queue);
        let thread = thread::Builder::new()
            .name("spool".into())
            .spawn(move || {
                // After a panic too, so that a pending mark fails instead of waiting.
                let _close = Close(&shared);
                Writer::new(files).run(&shared);
            })
            .map_err(|found| SpoolError::io(dir, "start the thread that writes its rows", found))?;
        Ok(Self(Arc::new(Handle {
            mended,
            queue,
            thread: Some(thread),
        })))
    }

    /// Queues a row.
    pub fn append(&self, row: Row) {
        self.0.queue.push(row, now());
    }

    /// Requests the mark of the metrics after the rows so far, for the `meta` of a checkpoint.
    ///
    /// The rows are on disk once the mark is set: after a power cut, a checkpoint must not count on
    /// rows that were lost.
    pub fn mark(&self) -> PendingMark {
        let (sender, receiver) = sync_channel(1);
        self.0.queue.ask(sender);
        if let Some(thread) = &self.0.thread {
            thread.thread().unpark();
        }
        PendingMark(receiver)
    }

    /// Waits until all rows are on disk.
    ///
    /// # Errors
    ///
    /// The reason why they are not, in one line.
    pub fn sync(&self) -> Result<(), String> {
        self.mark().wait().map(|_| ())
    }

    /// Rows lost since the spool was opened.
    pub fn dropped(&self) -> u64 {
        self.0.queue.dropped()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.queue.end();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread tries everything once and ends. A panic has been printed.
            let _ = thread.join();
        }
    }
}

/// Closes a queue at the end of the writing thread.
struct Close<'q>(&'q Queue<Asked>);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The thread's side.
struct Writer {
    files: Files,
    /// Time of the last sync.
    synced: Instant,
    is_dirty: bool,
    tried: Instant,
}

impl Writer {
    fn new(files: Files) -> Self {
        Self {
            files,
            synced: Instant::now(),
            is_dirty: false,
            tried: Instant::now(),
        }
    }

    fn run(mut self, queue: &Queue<Asked>) {
        let mut taken = Vec::new();
        loop {
            let is_over = queue.take(&mut taken);
            let lost = self.files.dropped();
            let (mut bytes, mut is_new) = (0, false);
            for message in taken.drain(..) {
                match message {
                    Message::Row(row, time) => {
                        self.files.append(&row, time);
                        bytes += size::<Asked>(&row);
                        is_new = true;
                    }
                    Message::Asked(answer) => {
                        let mark = self.files.mark();
                        self.tried(true);
                        // The receiver may be gone.
                        let _ = answer.send(mark);
                    }
                }
            }
            let waits = self.files.trouble().is_some();
            if is_over || (is_new && !waits) || (waits && self.tried.elapsed() >= RETRY) {
                self.files.flush();
                self.is_dirty |= is_new || waits;
                self.tried(false);
            }
            queue.done(bytes, self.files.dropped() - lost);
            if is_over {
                return;
            }
            if self.is_dirty && self.synced.elapsed() >= SYNC {
                self.files.sync();
                self.tried(true);
            }
            thread::park_timeout(LOOK);
        }
    }

    /// Records a write, or a sync, at this moment.
    fn tried(&mut self, synced: bool) {
        self.tried = Instant::now();
        if synced {
            (self.is_dirty, self.synced) = (false, self.tried);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{METRICS, STARTS, SYSTEM, Start};

    fn train(step: u64) -> Row {
        Row::new(step, Kind::Train).with("loss/total", 1.0 / step as f64)
    }

    fn metrics(dir: &Path) -> String {
        fs::read_to_string(dir.join(METRICS)).unwrap()
    }

    fn begin(dir: &Path) -> Spool {
        spd_files::atomic::make_dirs(dir).unwrap();
        Spool::start(dir, &Mark::default(), 0).unwrap()
    }

    fn marked(spool: &Spool) -> Mark {
        spool.mark().wait().unwrap()
    }

    #[test]
    fn rows_go_to_the_file_of_their_kind() {
        let run = tempfile::tempdir().unwrap();
        let dir = run.path().join("new/run");
        let spool = begin(&dir);
        spool.append(train(2));
        spool.append(Row::new(2, Kind::System).with("time", 1.5));
        spool.append(Row::new(2, Kind::Eval).with("ci_l0", 3.0));
        spool.append(Row::new(2, Kind::Event).with_note("saved"));
        let mark = marked(&spool);
        assert_eq!(
            metrics(&dir),
            "{\"step\":2,\"kind\":\"train\",\"loss/total\":0.5}\n\
             {\"step\":2,\"kind\":\"eval\",\"ci_l0\":3.0}\n"
        );
        assert_eq!(
            fs::read_to_string(dir.join(SYSTEM)).unwrap(),
            "{\"step\":2,\"kind\":\"system\",\"time\":1.5}\n\
             {\"step\":2,\"kind\":\"event\",\"note\":\"saved\"}\n"
        );
        assert_eq!((mark.offset, mark.lines), (metrics(&dir).len() as u64, 2));
    }

    #[test]
    fn a_row_is_in_its_file_soon_and_nobody_asked() {
        let run = tempfile::tempdir().unwrap();
        let spool = begin(run.path());
        spool.append(train(1));
        let begun = Instant::now();
        while metrics(run.path()).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20));
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_resumed_run_has_the_rows_of_one_that_never_stopped() {
        let straight = tempfile::tempdir().unwrap();
        let spool = begin(straight.path());
        (1..=100).for_each(|step| spool.append(train(step)));
        drop(spool);

        // Saves every 10 steps, and is killed at 37, 45, 45 and 99: before, after and long after a
        // save.
        let run = tempfile::tempdir().unwrap();
        let (mut saved, mut mark) = (0, Mark::default());
        for dies_at in [37, 45, 45, 99, 100] {
            let spool = Spool::start(run.path(), &mark, saved).unwrap();
            spool.append(Row::new(saved, Kind::Event).with_note("resumed"));
            for step in saved + 1..=dies_at {
                spool.append(train(step));
                if step % 10 == 0 {
                    (saved, mark) = (step, marked(&spool));
                }
            }
        }
        assert_eq!(metrics(run.path()), metrics(straight.path()));
        let events = fs::read_to_string(run.path().join(SYSTEM)).unwrap();
        assert_eq!(events.lines().count(), 5);
        let starts = Start::all(run.path()).unwrap();
        let steps: Vec<_> = starts
            .iter()
            .map(|start| (start.generation, start.step))
            .collect();
        assert_eq!(steps, [(0, 0), (1, 30), (2, 40), (3, 40), (4, 90)]);
    }

    #[test]
    fn the_system_file_has_a_spool_of_its_own() {
        let run = tempfile::tempdir().unwrap();
        let spool = Spool::system(run.path()).unwrap();
        spool.append(Row::new(0, Kind::Event).with_note("waiting"));
        assert_eq!(spool.sync(), Ok(()));
        let there = |name: &str| run.path().join(name).try_exists().unwrap();
        assert!(there(SYSTEM) && !there(METRICS) && !there(STARTS));
    }

    #[test]
    fn a_directory_that_was_removed_is_not_made_again() {
        let run = tempfile::tempdir().unwrap();
        let dir = run.path().join("x");
        assert!(Spool::system(&dir).is_err() && !dir.try_exists().unwrap());
    }

    #[test]
    fn a_run_without_a_checkpoint_starts_over() {
        let run = tempfile::tempdir().unwrap();
        let spool = begin(run.path());
        spool.append(train(1));
        drop(spool);
        drop(begin(run.path()));
        assert_eq!(metrics(run.path()), "");
    }

    #[test]
    fn damaged_rows_are_set_aside_and_the_run_goes_on_with_the_others() {
        // The rows of the checkpoint, the damage, and the steps of the remaining rows.
        type Damage = fn(&mut Vec<u8>);
        let cases: [(Damage, &[u64]); 6] = [
            (|rows| rows[3] ^= 0x40, &[2, 3, 4, 5, 6, 7]),
            // The end of a line, which joins two.
            (|rows| rows[54] ^= 1, &[3, 4, 5, 6, 7]),
            // A digit of a value: no row can be trusted.
            (|rows| rows[52] ^= 1, &[1, 2, 3, 4, 5, 6, 7]),
            (|rows| rows.truncate(130), &[1, 2, 6, 7]),
            (Vec::clear, &[6, 7]),
            (|rows| rows[..200].fill(0), &[5, 6, 7]),
        ];
        for (damage, left) in cases {
            let run = tempfile::tempdir().unwrap();
            let spool = begin(run.path());
            (1..=5).for_each(|step| spool.append(train(step).with("value", 0.5)));
            let mark = marked(&spool);
            drop(spool);
            let path = run.path().join(METRICS);
            let mut rows = fs::read(&path).unwrap();
            assert_eq!(rows[54], b'\n');
            damage(&mut rows);
            spd_files::atomic::write_file(&path, &[&rows]).unwrap();
            // Two starts from one checkpoint report the damage once.
            for last in [6, 7] {
                let spool = Spool::start(run.path(), &mark, 6).unwrap();
                (6..=last).for_each(|step| spool.append(train(step)));
            }
            let found = fs::read_to_string(&path).unwrap();
            let steps = found
                .lines()
                .map(|line| Row::parse(line.as_bytes()).unwrap().step);
            assert_eq!(steps.collect::<Vec<_>>(), left);
            assert_eq!(
                fs::read(run.path().join("metrics.jsonl.bad")).unwrap(),
                rows
            );
            let told = fs::read_to_string(run.path().join(SYSTEM)).unwrap();
            let note = format!(
                "{0}: not the rows that the checkpoint saw; the file is kept as {0}.bad, and is written again from the {1} of 5 rows \
                 that can be read",
                path.display(),
                left.len() - 2
            );
            assert!(
                told.contains(&note) && told.lines().count() == 1,
                "{told}\n{note}"
            );
            let times = fs::read_to_string(run.path().join("metrics.times")).unwrap();
            assert_eq!(times.lines().count(), left.len());
        }
    }

    #[test]
    fn discarded_rows_are_reported() {
        let run = tempfile::tempdir().unwrap();
        let spool = begin(run.path());
        spool.append(train(1));
        let mark = marked(&spool);
        drop(spool);
        let path = run.path().join(METRICS);
        fs::remove_file(&path).unwrap();
        drop(Spool::start(run.path(), &mark, 2).unwrap());
        let told = fs::read_to_string(run.path().join(SYSTEM)).unwrap();
        let note = format!(
            "{}: gone; it is written again from the 0 of 1 rows that can be read",
            path.display()
        );
        assert!(told.contains(&note), "{told}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_refused_and_not_made() {
        let run = tempfile::tempdir().unwrap();
        let gone = run.path().join("gone");
        assert_eq!(
            Spool::start(&gone, &Mark::default(), 0)
                .err()
                .expect("a refusal")
                .to_string(),
            format!(
                "{}: cannot open: No such file or directory (os error 2); \
                 is the disk there, writable and not full?",
                gone.join(METRICS).display()
            )
        );
        assert!(!gone.try_exists().unwrap());
    }

    #[test]
    fn device_is_not_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let error = Spool::start(dir.path(), &Mark::default(), 0);
        let error = error.err().unwrap().to_string();
        assert_eq!(
            error,
            format!(
                "{}: cannot open: expected a file, found a character device; move it away",
                path.display()
            )
        );
        let full = SpoolError::io(&path, "open", std::io::Error::from_raw_os_error(12));
        assert_eq!(
            full.to_string(),
            format!(
                "{}: cannot open: Cannot allocate memory (os error 12); \
                 is there memory left, and may this process take it (ulimit -v)?",
                path.display()
            )
        );
    }
}
