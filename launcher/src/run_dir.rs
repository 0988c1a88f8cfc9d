//! The run directory: its files, its lock, and its atomic creation.
//!
//! All writes are inside the given directory, which may be a mount point, a link or `.`. It is a
//! run directory once it has a `config.toml`, which is written last and atomically.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use spd_checkpoint::{CheckpointError, Lock, atomic};
use spd_trainer::run_file::Run;

use crate::summary;

mod aside;

/// A run directory, which may not exist yet.
#[derive(Debug, Clone)]
pub(crate) struct RunDir(PathBuf);

/// The state of a run directory's path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DirState {
    /// Nothing, or an empty directory.
    Nothing,
    /// The same run, not finished.
    Begun,
    /// The same run, finished.
    Finished,
    /// The same run, finished; its summary cannot be read, for this reason.
    FinishedUnread(String),
}

impl RunDir {
    /// The directory at `path`.
    pub(crate) fn at(path: PathBuf) -> Self {
        // Without a trailing slash, with which a link would not be seen as one.
        Self(path.components().collect())
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The resolved run file, which makes a directory a run directory.
    pub(crate) fn config(&self) -> PathBuf {
        self.0.join("config.toml")
    }

    /// The resolved run, where it can be read.
    pub(crate) fn run(&self) -> Option<Run> {
        let text = spd_files::read_to_string(&self.config()).ok()?;
        Run::from_resolved(&text).ok()
    }

    /// Rows of training and evaluation.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    /// Rows of phase and speed.
    pub(crate) fn system(&self) -> PathBuf {
        self.0.join("system.jsonl")
    }

    /// The checkpoints, a directory for each saved step.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// The output of a rank.
    pub(crate) fn log(&self, rank: usize) -> PathBuf {
        self.logs().join(format!("rank{rank}.log"))
    }

    /// Files of the launcher: the lock, and the output of its processes.
    pub(crate) fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// The state of a sweep's runs, which makes a directory that of a sweep.
    pub(crate) fn sweep(&self) -> PathBuf {
        self.0.join("sweep.json")
    }

    /// The results of the run, which mean that it is finished.
    pub(crate) fn summary(&self) -> PathBuf {
        self.0.join("summary.json")
    }

    /// Whether the path has any content, apart from the beginnings of a killed launcher.
    ///
    /// # Errors
    ///
    /// One line, when the file system cannot say.
    pub(crate) fn stands(&self) -> Result<bool, String> {
        let stands = entries(&self.0).and_then(|all| {
            for path in all {
                if !is_apart(&path) && !is_begun(&path)? {
                    return Ok(true);
                }
            }
            Ok(false)
        });
        match stands {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotADirectory => Err(format!(
                "{}: expected a run directory, found a file; try --out",
                self.0.display()
            )),
            stands => stands.map_err(|error| format!("{}: {error}", self.0.display())),
        }
    }

    /// Whether there is a run that `--fresh` moves aside.
    ///
    /// # Errors
    ///
    /// One line, when it is not a run: foreign files are never moved.
    pub(crate) fn find_old(&self) -> Result<bool, String> {
        let stands = self.stands()?;
        // A run directory that has lost its run file still is one.
        let is_run =
            there(&self.config())? || there(&self.checkpoints())? && there(&self.system())?;
        if stands && !is_run {
            return Err(self.no_run());
        }
        Ok(stands)
    }

    fn no_run(&self) -> String {
        format!(
            "{}: holds files and no config.toml, so it is no run directory; try --out",
            self.0.display()
        )
    }

    /// The state of the path: nothing, or `run`.
    ///
    /// # Errors
    ///
    /// One line, when there is something else: a file, another run, or foreign files.
    pub(crate) fn find(&self, run: &Run) -> Result<DirState, String> {
        let place = self.0.display();
        if !self.stands()? {
            return Ok(DirState::Nothing);
        }
        if !there(&self.config())? {
            return Err(self.no_run());
        }
        let stored = Run::load_resolved(&self.config()).map_err(|faults| {
            let faults = faults.to_string();
            let first = faults.lines().next().unwrap_or_default();
            format!(
                "{first}; {place} cannot be continued without its config.toml: put it back, or start over with \
                 --fresh, which moves {place} aside, or with --out"
            )
        })?;
        let differences = run.differences(&stored);
        if !differences.is_empty() {
            return Err(format!(
                "{place}: holds a run of another config ({}); try --out, or --fresh to move it aside",
                listed(&differences)
            ));
        }
        let summary = self.summary();
        if !there(&summary)? {
            return Ok(DirState::Begun);
        }
        if !summary.is_file() {
            return Err(format!(
                "{}: expected a file for the summary, found something else; move it away, and the same \
                 command makes it again",
                summary.display()
            ));
        }
        Ok(match summary::read(&summary) {
            Ok(_) => DirState::Finished,
            Err(error) => DirState::FinishedUnread(format!("{error:#}")),
        })
    }

    /// The number of shards of a batch in an existing run, if there is one.
    pub(crate) fn shards(&self) -> Option<usize> {
        let stored = Run::load_resolved(&self.config()).ok()?;
        Some(stored.train.blocks())
    }

    /// Whether there is a sweep.
    ///
    /// # Errors
    ///
    /// One line, when there is something else.
    pub(crate) fn find_sweep(&self) -> Result<bool, String> {
        let place = self.0.display();
        if !self.stands()? {
            return Ok(false);
        }
        if there(&self.config())? {
            return Err(format!(
                "{place}: is the directory of a single run; try --out"
            ));
        }
        if !there(&self.sweep())? {
            return Err(format!(
                "{place}: holds files and no sweep.json, so it is not a sweep; try --out, or, if it is one, put an \
                 empty file of that name there: it is written again"
            ));
        }
        Ok(true)
    }

    /// Checks that a run can start there: no other process holds it, the directory can be made and
    /// written to, no other file has the name of one of its parts, and there is room for `bytes`. A
    /// `fresh` run ignores what it moves aside first.
    ///
    /// # Errors
    ///
    /// One line.
    pub(crate) fn check(&self, bytes: u64, fresh: bool) -> Result<(), String> {
        let standing = spd_files::try_dir(&self.0).map_err(|line| format!("{line}; try --out"))?;
        for dir in [self.logs(), self.0.clone()] {
            match Lock::look(&dir) {
                Err(error) if !fresh || matches!(error, CheckpointError::Held { .. }) => {
                    return Err(error.to_string());
                }
                _ => {}
            }
        }
        let parts = [
            (self.logs(), true),
            (self.checkpoints(), true),
            (self.log(0), false),
            (self.metrics(), false),
            (self.system(), false),
        ];
        for (path, is_dir) in parts.into_iter().filter(|_| !fresh) {
            let Ok(found) = fs::metadata(&path).map(|found| found.file_type()) else {
                continue;
            };
            if found.is_dir() != is_dir || !(is_dir || found.is_file()) {
                return Err(format!(
                    "{}: expected {}, found {}; move it away, or try --out",
                    path.display(),
                    if is_dir { "a directory" } else { "a file" },
                    spd_files::name(found)
                ));
            }
        }
        let place = standing.display();
        let disk = statvfs(&standing).map_err(|error| format!("{place}: {error}"))?;
        // Some file systems count no blocks and report no free space.
        let free = if disk.f_blocks == 0 {
            u64::MAX
        } else {
            disk.f_bavail.saturating_mul(disk.f_frsize)
        };
        check_free(&place.to_string(), free, bytes)
    }

    /// Makes the directory of `run`, which may be an empty one; `config.toml` is written last. The
    /// lock keeps other launchers away.
    ///
    /// # Errors
    ///
    /// One line, when another launcher holds it, or the file system refuses. Its beginnings have
    /// then been removed.
    pub(crate) fn prepare(&self, run: &Run) -> Result<Lock, String> {
        self.make(|| {
            match fs::create_dir(self.checkpoints()) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error.into()),
                _ => {}
            }
            Ok(atomic::write_file(
                &self.config(),
                run.to_toml().as_bytes(),
            )?)
        })
    }

    /// Updates in the resolved run what may differ from start to start: whether gradients make
    /// intermediates again, and the trackers and their identifiers, if there are any.
    ///
    /// # Errors
    ///
    /// One line, when the file system refuses.
    pub(crate) fn rewrite(&self, run: &Run) -> Result<(), String> {
        let Ok(stored) = Run::load_resolved(&self.config()) else {
            return Ok(());
        };
        let mut here = stored.clone();
        here.train.recompute = run.train.recompute;
        if !run.tracker.to.is_empty() {
            here.tracker = run.tracker.clone();
        }
        if here == stored {
            return Ok(());
        }
        let written = atomic::write_file(&self.config(), here.to_toml().as_bytes());
        written.map_err(|error| format!("{}: {error}", self.config().display()))
    }

    /// Makes the directory of a sweep with this text as its `sweep.json`, which is written last.
    ///
    /// # Errors
    ///
    /// As [`Self::prepare`].
    pub(crate) fn prepare_sweep(&self, text: &str) -> Result<Lock, String> {
        self.make(|| Ok(atomic::write_file(&self.sweep(), text.as_bytes())?))
    }

    /// Nothing is written beside the directory, which may be a mount point or the working
    /// directory.
    fn make(&self, fill: impl FnOnce() -> anyhow::Result<()>) -> Result<Lock, String> {
        let above = self.0.ancestors();
        let missing: Vec<&Path> = above
            .take_while(|path| !path.as_os_str().is_empty() && !path.is_dir())
            .collect();
        let has_logs = there(&self.logs())?;
        let refused = |error: anyhow::Error| {
            format!("{}: cannot be made: {error:#}; try --out", self.0.display())
        };
        let unmake = || {
            // A directory that is not empty is not ours; the error names what cannot be removed.
            let _ = fs::remove_dir(self.checkpoints());
            if !has_logs {
                let _ = fs::remove_file(self.logs().join("lock"));
                let _ = fs::remove_dir(self.logs());
            }
            for path in &missing {
                let _ = fs::remove_dir(path);
            }
        };
        if let Err(error) = fs::create_dir_all(&self.0) {
            unmake();
            return Err(refused(error.into()));
        }
        let hold = match Lock::take(&self.logs()) {
            Ok(hold) => hold,
            Err(held @ CheckpointError::Held { .. }) => return Err(held.to_string()),
            Err(error) => {
                unmake();
                return Err(refused(error.into()));
            }
        };
        if there(&self.config())? || there(&self.sweep())? {
            return Err(format!(
                "{}: another launcher has just made a run there; start again to go on with it",
                self.0.display()
            ));
        }
        fill().inspect_err(|_| unmake()).map_err(refused)?;
        Ok(hold)
    }

    /// Locks out other launchers until the value is dropped or this process ends.
    ///
    /// This is the launcher's lock, in `logs`; the one in the run directory is the rank's.
    ///
    /// # Errors
    ///
    /// One line, when another launcher holds it, or the file system refuses.
    pub(crate) fn hold(&self) -> Result<Lock, String> {
        Lock::take(&self.logs()).map_err(|error| error.to_string())
    }
}

/// Whether an entry of a run directory is not part of the run: one that was moved aside, or a mount
/// point's own.
fn is_apart(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("old-");
    name == "lost+found" || number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether it is written before `config.toml`, so that a killed launcher may leave it.
fn is_begun(path: &Path) -> io::Result<bool> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match &*name {
        "checkpoints" => Ok(path.is_dir() && entries(path)?.is_empty()),
        "logs" => Ok(path.is_dir() && entries(path)?.iter().all(|entry| entry.ends_with("lock"))),
        ".tmp-config.toml" | ".tmp-sweep.json" => Ok(true),
        other => Ok(other.starts_with(spd_files::PROBE)),
    }
}

fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
}

/// Whether anything has this name, including a dangling link.
fn there(path: &Path) -> Result<bool, String> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn check_free(place: &str, free: u64, bytes: u64) -> Result<(), String> {
    if free >= bytes {
        return Ok(());
    }
    Err(format!(
        "{place}: the checkpoints need {}, and {} are free; try --out, or a smaller checkpoint.keep",
        indicatif::HumanBytes(bytes),
        indicatif::HumanBytes(free)
    ))
}

fn listed(differences: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = differences[..differences.len().min(SHOWN)].join(", ");
    match differences.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown}, and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_refused_with_the_bytes_needed() {
        assert_eq!(check_free("runs", 10, 10), Ok(()));
        assert_eq!(
            check_free("runs", 1 << 20, 3 << 20).unwrap_err(),
            "runs: the checkpoints need 3.00 MiB, and 1.00 MiB are free; \
             try --out, or a smaller checkpoint.keep"
        );
    }

    #[test]
    fn only_the_first_differences_are_listed() {
        let keys: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        assert_eq!(listed(&keys[..2]), "a, b");
        assert_eq!(listed(&keys[..3]), "a, b, c");
        assert_eq!(listed(&keys), "a, b, c, and 1 more");
    }

    pub(super) fn tms() -> Run {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tms_5-2.toml");
        Run::load(&config, &[]).unwrap()
    }

    pub(super) fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = entries(dir)
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().display().to_string())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_beginnings_of_a_killed_launcher_count_as_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().to_owned());
        fs::create_dir(run_dir.checkpoints()).unwrap();
        drop(run_dir.hold().unwrap());
        atomic::write_file(&dir.path().join(".tmp-config.toml"), b"name = ").unwrap();
        assert_eq!(run_dir.find(&tms()), Ok(DirState::Nothing));
        drop(run_dir.prepare(&tms()).unwrap());
        assert_eq!(names(dir.path()), ["checkpoints", "config.toml", "logs"]);
        assert_eq!(run_dir.find(&tms()), Ok(DirState::Begun));

        fs::remove_file(run_dir.config()).unwrap();
        atomic::write_file(&run_dir.checkpoints().join("mine"), b"").unwrap();
        let no_run = "holds files and no config.toml, so it is no run directory; try --out";
        assert!(run_dir.find(&tms()).unwrap_err().ends_with(no_run));
        assert!(run_dir.find_old().unwrap_err().ends_with(no_run));
    }

    #[test]
    fn of_two_launchers_one_makes_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x"));
        let hold = run_dir.prepare(&tms()).unwrap();
        let error = run_dir.prepare(&tms()).unwrap_err();
        assert!(error.contains("logs/lock: held by process "), "{error}");
        assert_eq!(run_dir.check(0, false).unwrap_err(), error);
        drop(hold);
        assert_eq!(
            run_dir.prepare(&tms()).unwrap_err(),
            format!(
                "{}: another launcher has just made a run there; start again to go on with it",
                run_dir.path().display()
            )
        );
        run_dir.check(0, false).unwrap();
        assert_eq!(
            names(run_dir.path()),
            ["checkpoints", "config.toml", "logs"]
        );
    }

    #[test]
    fn a_file_in_the_place_of_a_part_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().to_owned());
        atomic::write_file(&run_dir.checkpoints(), b"").unwrap();
        assert_eq!(
            run_dir.check(0, false).unwrap_err(),
            format!(
                "{}: expected a directory, found a file; move it away, or try --out",
                run_dir.checkpoints().display()
            )
        );
        fs::remove_file(run_dir.checkpoints()).unwrap();
        std::os::unix::fs::symlink("/dev/null", run_dir.metrics()).unwrap();
        let error = run_dir.check(0, false).unwrap_err();
        let expected = "expected a file, found a character device; move it away, or try --out";
        assert!(error.ends_with(expected), "{error}");
    }

    #[test]
    fn a_failed_creation_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        // The parents can be made, but no file system allows the name itself.
        let path = dir.path().join("runs/today").join("x".repeat(300));
        let error = RunDir::at(path.clone()).prepare(&tms()).unwrap_err();
        assert_eq!(
            error,
            format!(
                "{}: cannot be made: File name too long (os error 36); try --out",
                path.display()
            )
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
