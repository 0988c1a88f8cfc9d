//! The append side: where rank 0 puts its rows.

use std::fs;
use std::path::Path;

use crate::error::SpoolError;
use crate::lines::{self, Lines};
use crate::mark::Mark;
use crate::row::{Kind, Row};

/// Name of the file that holds [`Kind::Train`] and [`Kind::Eval`] rows.
pub const METRICS: &str = "metrics.jsonl";

/// Name of the file that holds [`Kind::System`] and [`Kind::Event`] rows.
pub const SYSTEM: &str = "system.jsonl";

/// The two files of a run, open for appending.
///
/// Appending never fails a run. Rows that the disk does not take wait in memory, at most 16 MiB for each
/// file, and are tried again at every flush; rows beyond that are lost, and [`Spool::dropped`] counts
/// them. [`Spool::trouble`] says what is wrong for as long as it is. Dropping a spool flushes it.
pub struct Spool {
    metrics: Lines,
    system: Lines,
}

impl Spool {
    /// Opens the spool in the run directory `dir` after its last whole rows, and makes what is not there.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn create_or_open(dir: &Path) -> Result<Self, SpoolError> {
        make(dir)?;
        Ok(Self {
            metrics: Lines::open(&dir.join(METRICS))?,
            system: Lines::open(&dir.join(SYSTEM))?,
        })
    }

    /// Opens the spool as it was when the checkpoint was made that holds `mark`: later train and eval rows
    /// are cut. System and event rows stay.
    ///
    /// A run that starts without a checkpoint rolls back to `Mark::default()`.
    ///
    /// # Errors
    ///
    /// When the file is shorter than the mark or begins with other rows, and when the disk refuses.
    /// Nothing has then been cut but a torn last line.
    pub fn roll_back(dir: &Path, mark: &Mark) -> Result<Self, SpoolError> {
        make(dir)?;
        Ok(Self {
            metrics: Lines::open_at(&dir.join(METRICS), mark)?,
            system: Lines::open(&dir.join(SYSTEM))?,
        })
    }

    /// Whether [`Spool::roll_back`] would find the rows that `mark` proves; nothing is changed.
    ///
    /// # Errors
    ///
    /// As [`Spool::roll_back`].
    pub fn check(dir: &Path, mark: &Mark) -> Result<(), SpoolError> {
        lines::check(&dir.join(METRICS), mark)
    }

    /// Adds a row, which is in its file after the next [`Spool::flush`] at the latest.
    pub fn append(&mut self, row: &Row) {
        let lines = match row.kind {
            Kind::Train | Kind::Eval => &mut self.metrics,
            Kind::System | Kind::Event | Kind::Alert => &mut self.system,
        };
        lines.append(&row.line());
    }

    /// Writes the rows appended so far, in one write for each file; once a step is right.
    pub fn flush(&mut self) {
        self.metrics.flush();
        self.system.flush();
    }

    /// Flushes, and waits until the disk has it.
    pub fn sync(&mut self) {
        self.metrics.sync();
        self.system.sync();
    }

    /// Syncs, and returns how far the metrics file goes: for the `meta` of the checkpoint that is being
    /// made.
    ///
    /// The sync is what makes the mark safe: a checkpoint must not outlive, in a power cut, rows that it
    /// counts on. Rows that still wait for the disk are not counted, and would be cut on resume.
    pub fn mark(&mut self) -> Mark {
        self.metrics.sync();
        self.metrics.mark()
    }

    /// Bytes of whole rows in the metrics file.
    pub fn offset(&self) -> u64 {
        self.metrics.offset()
    }

    /// Rows lost since the spool was opened.
    pub fn dropped(&self) -> u64 {
        self.metrics.dropped() + self.system.dropped()
    }

    /// Why rows wait, in a line for the log; none when the last flush wrote all of them.
    pub fn trouble(&self) -> Option<String> {
        self.metrics.trouble().or_else(|| self.system.trouble())
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.flush();
    }
}

fn make(dir: &Path) -> Result<(), SpoolError> {
    fs::create_dir_all(dir).map_err(|found| SpoolError::io(dir, "make the directory", found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64) -> Row {
        Row::new(step, Kind::Train).with("loss/total", 1.0 / step as f64)
    }

    fn metrics(dir: &Path) -> String {
        fs::read_to_string(dir.join(METRICS)).unwrap()
    }

    #[test]
    fn rows_go_to_the_file_of_their_kind() {
        let run = tempfile::tempdir().unwrap();
        let dir = run.path().join("new/run");
        let mut spool = Spool::create_or_open(&dir).unwrap();
        spool.append(&train(2));
        spool.append(&Row::new(2, Kind::System).with("time/unix_s", 1.5));
        spool.append(&Row::new(2, Kind::Eval).with("ci_l0", 3.0));
        spool.append(&Row::new(2, Kind::Event).with_note("saved"));
        assert_eq!((metrics(&dir).as_str(), spool.offset()), ("", 0));
        spool.flush();
        assert_eq!(
            metrics(&dir),
            "{\"step\":2,\"kind\":\"train\",\"loss/total\":0.5}\n\
             {\"step\":2,\"kind\":\"eval\",\"ci_l0\":3.0}\n"
        );
        assert_eq!(
            fs::read_to_string(dir.join(SYSTEM)).unwrap(),
            "{\"step\":2,\"kind\":\"system\",\"time/unix_s\":1.5}\n\
             {\"step\":2,\"kind\":\"event\",\"note\":\"saved\"}\n"
        );
        assert_eq!(spool.offset(), metrics(&dir).len() as u64);
    }

    #[test]
    fn a_resumed_run_has_the_rows_of_one_that_never_stopped() {
        let straight = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(straight.path()).unwrap();
        (1..=100).for_each(|step| spool.append(&train(step)));
        drop(spool);

        // Saves every 10 steps, dies at 37, 45, 45 and 99: before, after and long after a save.
        let run = tempfile::tempdir().unwrap();
        let (mut saved, mut mark) = (0, Mark::default());
        for dies_at in [37, 45, 45, 99, 100] {
            let mut spool = Spool::roll_back(run.path(), &mark).unwrap();
            spool.append(&Row::new(saved, Kind::Event).with_note("resumed"));
            for step in saved + 1..=dies_at {
                spool.append(&train(step));
                if step % 10 == 0 {
                    (saved, mark) = (step, spool.mark());
                }
            }
        }
        assert_eq!(metrics(run.path()), metrics(straight.path()));
        let events = fs::read_to_string(run.path().join(SYSTEM)).unwrap();
        assert_eq!(events.lines().count(), 5);
    }

    #[test]
    fn an_opened_spool_goes_on_with_the_same_mark() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        (1..=3).for_each(|step| spool.append(&train(step)));
        let mark = spool.mark();
        drop(spool);
        Spool::check(run.path(), &mark).unwrap();
        assert_eq!(Spool::create_or_open(run.path()).unwrap().mark(), mark);
        assert_eq!(Spool::roll_back(run.path(), &mark).unwrap().mark(), mark);
        assert_eq!(mark.lines, 3);
    }

    #[test]
    fn a_run_without_a_checkpoint_starts_over() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        spool.append(&train(1));
        drop(spool);
        Spool::roll_back(run.path(), &Mark::default()).unwrap();
        assert_eq!(metrics(run.path()), "");
    }

    #[test]
    fn rows_that_a_checkpoint_counts_on_must_be_there() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        (1..=2).for_each(|step| spool.append(&train(step)));
        let mark = spool.mark();
        drop(spool);
        let path = run.path().join(METRICS);
        let refusal = || {
            let seen = Spool::check(run.path(), &mark).unwrap_err().to_string();
            let error = Spool::roll_back(run.path(), &mark).err();
            assert_eq!(error.expect("a spool that differs").to_string(), seen);
            seen
        };
        let all = metrics(run.path());

        let put = |text: &str| {
            let mut lines = Spool::roll_back(run.path(), &Mark::default()).unwrap();
            lines.metrics.append(text.as_bytes());
        };
        put(&all.replace("0.5", "0.6"));
        assert_eq!(
            refusal(),
            format!(
                "{}: its first {} bytes are not those the checkpoint saw; \
                 put the file back or start in another run directory",
                path.display(),
                all.len()
            )
        );
        put(all.lines().next().unwrap());
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
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_refused() {
        let run = tempfile::tempdir().unwrap();
        drop(Spool::create_or_open(run.path()).unwrap());
        let below_a_file = run.path().join(METRICS).join("run");
        assert_eq!(
            Spool::create_or_open(&below_a_file)
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
        let error = Spool::create_or_open(dir.path()).err().unwrap().to_string();
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
