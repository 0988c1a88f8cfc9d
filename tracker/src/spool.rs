//! The append side: where rank 0 hands its rows over.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};

use crate::error::SpoolError;
use crate::files::{self, Files};
use crate::lines::MOST_WAITING;
use crate::mark::Mark;
use crate::row::Row;
use crate::starts::now;
use crate::value::Value;

/// Time between two looks of the writing thread at what was handed over: what a process that is killed may take with it.
const LOOK: Duration = Duration::from_millis(20);

/// Time until the disk is asked to keep what was written.
const SYNC: Duration = Duration::from_secs(1);

/// Time between two tries to write what the disk did not take.
const RETRY: Duration = Duration::from_millis(500);

/// The files of a run, appended to by a thread of its own.
///
/// [`Spool::append`] hands a row over and returns: it makes no system call and waits for nobody. The thread writes the row within 20
/// milliseconds, and has the disk keep it within a second. Appending never fails a run: rows that the disk does not take wait in memory,
/// at most 16 MiB for each file and as much before them, and are tried again; rows beyond that are lost, and [`Spool::dropped`] counts
/// them. Clones hand over to the same thread; when the last one is dropped, all is written.
#[derive(Clone)]
pub struct Spool(Arc<Handle>);

/// What all clones share.
struct Handle {
    hand_over: Option<Sender<Message>>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// What both sides look at.
#[derive(Default)]
struct State {
    /// Bytes of the rows that are handed over and not taken yet, roughly.
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

enum Message {
    Row(Row, f64),
    /// The thread syncs, and says how far the metrics go, or why not all is written.
    Mark(Sender<Result<Mark, String>>),
}

/// A mark that the thread has still to set, when the rows before it are on the disk.
#[must_use]
pub struct PendingMark(Receiver<Result<Mark, String>>);

impl PendingMark {
    /// Waits for it.
    ///
    /// # Errors
    ///
    /// Why rows before it are not on the disk, in one line.
    pub fn wait(self) -> Result<Mark, String> {
        let mark = self.0.recv();
        mark.unwrap_or_else(|_| Err("the thread that writes the rows is gone".to_owned()))
    }
}

impl Spool {
    /// Opens the spool in the run directory `dir` as it was when the checkpoint was made that holds `mark`, after `step` steps: later
    /// train and eval rows are cut, and `starts.jsonl` says so. System rows, events and alerts stay. What is not there is made.
    ///
    /// A run that starts without a checkpoint starts at `Mark::default()`.
    ///
    /// # Errors
    ///
    /// When the file is shorter than the mark or begins with other rows, and when the disk refuses. Nothing has then been cut but a torn
    /// last line.
    pub fn start(dir: &Path, mark: &Mark, step: u64) -> Result<Self, SpoolError> {
        Self::run(dir, Files::start(dir, mark, step)?)
    }

    /// Opens the system file of `dir` alone, for system rows, events and alerts.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn system(dir: &Path) -> Result<Self, SpoolError> {
        Self::run(dir, Files::system(dir)?)
    }

    /// Whether [`Spool::start`] would find the rows that `mark` proves; nothing is changed.
    ///
    /// # Errors
    ///
    /// As [`Spool::start`].
    pub fn check(dir: &Path, mark: &Mark) -> Result<(), SpoolError> {
        files::check(dir, mark)
    }

    fn run(dir: &Path, files: Files) -> Result<Self, SpoolError> {
        let (hand_over, handed_over) = unbounded();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let thread = thread::Builder::new()
            .name("spool".into())
            .spawn(move || Writer::new(files, shared).run(&handed_over))
            .map_err(|found| SpoolError::io(dir, "start the thread that writes its rows", found))?;
        Ok(Self(Arc::new(Handle {
            hand_over: Some(hand_over),
            state,
            thread: Some(thread),
        })))
    }

    /// Hands a row over.
    pub fn append(&self, row: Row) {
        let (bytes, state) = (size(&row), &self.0.state);
        if state.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST_WAITING {
            state.waiting.fetch_sub(bytes, Ordering::Relaxed);
            state.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.send(Message::Row(row, now()));
    }

    fn send(&self, message: Message) {
        if let Some(hand_over) = &self.0.hand_over {
            // The thread is gone only after a panic, and then the mark says so.
            let _ = hand_over.send(message);
        }
    }

    /// Asks how far the metrics go after the rows that were handed over so far: for the `meta` of the checkpoint that is being made.
    ///
    /// The disk has these rows when the mark is there: a checkpoint must not outlive, in a power cut, rows that it counts on.
    pub fn mark(&self) -> PendingMark {
        let (sender, receiver) = bounded(1);
        self.send(Message::Mark(sender));
        if let Some(thread) = &self.0.thread {
            thread.thread().unpark();
        }
        PendingMark(receiver)
    }

    /// Waits until the disk has all rows.
    ///
    /// # Errors
    ///
    /// Why it has not, in one line.
    pub fn sync(&self) -> Result<(), String> {
        self.mark().wait().map(|_| ())
    }

    /// Rows lost since the spool was opened.
    pub fn dropped(&self) -> u64 {
        self.0.state.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.hand_over = None;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends when all is tried; a panic of it has been printed.
            let _ = thread.join();
        }
    }
}

/// Bytes of a row in memory, roughly.
fn size(row: &Row) -> usize {
    let value = |value: &Value| match value {
        Value::Number(_) => 0,
        Value::Text(text) | Value::File(text) => text.len(),
        Value::Histogram(histogram) => 8 * (histogram.edges.len() + histogram.counts.len()),
    };
    let values = row.values.iter();
    let values = values.map(|(name, held)| name.len() + value(held) + size_of::<(String, Value)>());
    let note = row.note.as_ref().map_or(0, String::len);
    size_of::<Message>() + note + values.sum::<usize>()
}

/// The thread's side.
struct Writer {
    files: Files,
    state: Arc<State>,
    /// When the disk was last asked to keep what it has; there is something newer where that is due.
    synced: Instant,
    is_dirty: bool,
    tried: Instant,
    /// Rows lost before they came here are counted by the other side.
    dropped: u64,
}

impl Writer {
    fn new(files: Files, state: Arc<State>) -> Self {
        Self {
            files,
            state,
            synced: Instant::now(),
            is_dirty: false,
            tried: Instant::now(),
            dropped: 0,
        }
    }

    fn run(mut self, handed_over: &Receiver<Message>) {
        loop {
            let mut is_new = false;
            let is_over = loop {
                match handed_over.try_recv() {
                    Ok(Message::Row(row, time)) => {
                        self.files.append(&row, time);
                        self.state.waiting.fetch_sub(size(&row), Ordering::Relaxed);
                        is_new = true;
                    }
                    Ok(Message::Mark(answer)) => {
                        let mark = self.files.mark();
                        self.told(true);
                        // Whoever asked may be gone.
                        let _ = answer.send(mark);
                    }
                    Err(TryRecvError::Empty) => break false,
                    Err(TryRecvError::Disconnected) => break true,
                }
            };
            let waits = self.files.trouble().is_some();
            if is_over || (is_new && !waits) || (waits && self.tried.elapsed() >= RETRY) {
                self.files.flush();
                self.is_dirty |= is_new || waits;
                self.told(false);
            }
            if is_over {
                return;
            }
            if self.is_dirty && self.synced.elapsed() >= SYNC {
                self.files.sync();
                self.told(true);
            }
            thread::park_timeout(LOOK);
        }
    }

    /// Says how the last write went.
    fn told(&mut self, synced: bool) {
        self.tried = Instant::now();
        if synced {
            (self.is_dirty, self.synced) = (false, self.tried);
        }
        let lost = self.files.dropped();
        self.state
            .dropped
            .fetch_add(lost - self.dropped, Ordering::Relaxed);
        self.dropped = lost;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Kind, METRICS, STARTS, SYSTEM, Start};

    fn train(step: u64) -> Row {
        Row::new(step, Kind::Train).with("loss/total", 1.0 / step as f64)
    }

    fn metrics(dir: &Path) -> String {
        fs::read_to_string(dir.join(METRICS)).unwrap()
    }

    fn begin(dir: &Path) -> Spool {
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

        // Saves every 10 steps, dies at 37, 45, 45 and 99: before, after and long after a save.
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
    fn a_run_without_a_checkpoint_starts_over() {
        let run = tempfile::tempdir().unwrap();
        let spool = begin(run.path());
        spool.append(train(1));
        drop(spool);
        drop(begin(run.path()));
        assert_eq!(metrics(run.path()), "");
    }

    #[test]
    fn rows_that_a_checkpoint_counts_on_must_be_there() {
        let run = tempfile::tempdir().unwrap();
        let spool = begin(run.path());
        (1..=2).for_each(|step| spool.append(train(step)));
        let mark = marked(&spool);
        drop(spool);
        let path = run.path().join(METRICS);
        let refusal = || {
            let seen = Spool::check(run.path(), &mark).unwrap_err().to_string();
            let error = Spool::start(run.path(), &mark, 2).err();
            assert_eq!(error.expect("a spool that differs").to_string(), seen);
            seen
        };
        let all = metrics(run.path());
        let put = |bytes: &[u8]| spd_files::atomic::write_file(&path, &[bytes]).unwrap();
        put(all.replace("0.5", "0.6").as_bytes());
        assert_eq!(
            refusal(),
            format!(
                "{}: its first {} bytes are not those the checkpoint saw; \
                 put the file back or start in another run directory",
                path.display(),
                all.len()
            )
        );
        put(all.lines().next().unwrap().as_bytes());
        assert_eq!(
            refusal(),
            format!(
                "{}: the checkpoint marks {} bytes, the file has 0; \
                 put the file back or start in another run directory",
                path.display(),
                all.len()
            )
        );
        fs::remove_file(&path).unwrap();
        assert!(refusal().contains("the file has 0;"));
        assert_eq!(Start::all(run.path()).unwrap().len(), 1);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_refused() {
        let run = tempfile::tempdir().unwrap();
        drop(begin(run.path()));
        let below_a_file = run.path().join(METRICS).join("run");
        assert_eq!(
            Spool::system(&below_a_file)
                .err()
                .expect("a refusal")
                .to_string(),
            format!(
                "{}: cannot make the directory: Not a directory (os error 20); \
                 is the disk there, writable and not full?",
                below_a_file.display()
            )
        );
    }

    #[test]
    fn what_is_no_file_is_not_appended_to() {
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

    #[test]
    fn rows_beyond_what_memory_holds_are_lost_and_counted() {
        let run = tempfile::tempdir().unwrap();
        let (hand_over, handed_over) = unbounded();
        // Nobody takes them: a thread that waits for a disk for ever.
        let spool = Spool(Arc::new(Handle {
            hand_over: Some(hand_over),
            state: Arc::default(),
            thread: None,
        }));
        let text = "x".repeat(1 << 20);
        for step in 0..20 {
            spool.append(Row::new(step, Kind::Event).with_note(text.clone()));
        }
        assert_eq!((handed_over.len(), spool.dropped()), (15, 5));
        drop(run);
    }
}
