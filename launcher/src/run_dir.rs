//! The directory of a run: what lies where, whose it is, and how it comes to be whole or not at all.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use spd_checkpoint::{Lock, atomic};
use spd_configs::Run;

/// A run directory, which may not stand yet.
#[derive(Debug, Clone)]
pub(crate) struct RunDir(PathBuf);

/// What stands at a run directory's place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing, or an empty directory.
    Nothing,
    /// The same run, not finished.
    Begun,
    /// The same run, finished.
    Finished,
}

impl RunDir {
    /// The directory at `path`.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The resolved run file; a directory that has one is a run directory.
    pub(crate) fn config(&self) -> PathBuf {
        self.0.join("config.toml")
    }

    /// Rows of training and evaluation.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    /// Rows of phase and speed.
    pub(crate) fn system(&self) -> PathBuf {
        self.0.join("system.jsonl")
    }

    /// A directory for each saved step.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// Everything the rank prints.
    pub(crate) fn log(&self) -> PathBuf {
        self.logs().join("rank0.log")
    }

    /// What the launcher writes beside its run: the lock, and what its processes print.
    pub(crate) fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// What is known of the runs of a sweep; a directory that has it is one of a sweep.
    pub(crate) fn sweep(&self) -> PathBuf {
        self.0.join("sweep.json")
    }

    /// What the rank says at the end; its being there means that the run is finished.
    pub(crate) fn summary(&self) -> PathBuf {
        self.0.join("summary.json")
    }

    /// Whether anything but an empty directory stands there.
    ///
    /// # Errors
    ///
    /// One line, when the file system cannot say.
    pub(crate) fn stands(&self) -> Result<bool, String> {
        match fs::read_dir(&self.0) {
            Ok(mut entries) => Ok(entries.next().is_some()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotADirectory => Err(format!(
                "{}: a run directory is wanted, and a file is in its way; try --out",
                self.0.display()
            )),
            Err(error) => Err(format!("{}: {error}", self.0.display())),
        }
    }

    /// What stands there, if it is nothing or `run`.
    ///
    /// # Errors
    ///
    /// One line, when something else stands there: a file, another run, or what is no run at all.
    pub(crate) fn find(&self, run: &Run) -> Result<Found, String> {
        let place = self.0.display();
        if !self.stands()? {
            return Ok(Found::Nothing);
        }
        if !there(&self.config())? {
            return Err(format!(
                "{place}: holds files and no config.toml, so it is no run directory; try --out"
            ));
        }
        let stored = Run::load(&self.config(), &[]).map_err(|faults| {
            format!("{faults}\n{place}: cannot be continued; try --fresh or --out")
        })?;
        let differences = run.differences(&stored);
        if !differences.is_empty() {
            return Err(format!(
                "{place}: holds a run of another config ({}); try --out, or --fresh to move it aside",
                listed(&differences)
            ));
        }
        Ok(if there(&self.summary())? {
            Found::Finished
        } else {
            Found::Begun
        })
    }

    /// Whether a sweep stands there.
    ///
    /// # Errors
    ///
    /// One line, when something else does.
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
                "{place}: holds files and no sweep.json, so it is no directory of a sweep; try --out"
            ));
        }
        Ok(true)
    }

    /// Whether the directory could be made, or written to, and has room for `bytes`.
    ///
    /// # Errors
    ///
    /// One line, when not.
    pub(crate) fn check_room(&self, bytes: u64) -> Result<(), String> {
        let standing = nearest(&self.0);
        let place = standing.display();
        if !standing.is_dir() {
            return Err(format!(
                "{}: cannot be made, {place} is no directory; try --out",
                self.0.display()
            ));
        }
        try_to_make(&standing)
            .map_err(|error| format!("{place}: nothing can be made there: {error}; try --out"))?;
        let disk = statvfs(&standing).map_err(|error| format!("{place}: {error}"))?;
        // A file system that counts no blocks does not know its room.
        let free = if disk.f_blocks == 0 {
            u64::MAX
        } else {
            disk.f_bavail.saturating_mul(disk.f_frsize)
        };
        check_free(&place.to_string(), free, bytes)
    }

    /// Makes the directory with `run` in it. It appears whole, under its name, or not at all.
    ///
    /// # Errors
    ///
    /// One line, when the file system refuses.
    pub(crate) fn prepare(&self, run: &Run) -> Result<(), String> {
        self.make(|staged| {
            fs::create_dir(staged.checkpoints())?;
            fs::create_dir(staged.logs())?;
            Ok(atomic::write_file(
                &staged.config(),
                run.to_toml().as_bytes(),
            )?)
        })
    }

    /// Makes the directory of a sweep with this `sweep.json` in it, whole or not at all.
    ///
    /// # Errors
    ///
    /// One line, when the file system refuses.
    pub(crate) fn prepare_sweep(&self, text: &str) -> Result<(), String> {
        self.make(|staged| {
            fs::create_dir(staged.logs())?;
            Ok(atomic::write_file(&staged.sweep(), text.as_bytes())?)
        })
    }

    fn make(&self, fill: impl FnOnce(&RunDir) -> anyhow::Result<()>) -> Result<(), String> {
        let parent = parent(&self.0);
        let missing: Vec<&Path> = parent
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.is_dir())
            .collect();
        let staged = Self(self.sibling(&format!("new-{}", std::process::id())));
        let made = fs::create_dir_all(parent)
            .and_then(|()| fs::create_dir(&staged.0))
            .map_err(anyhow::Error::from)
            .and_then(|()| fill(&staged))
            .and_then(|()| Ok(fs::rename(&staged.0, &self.0)?));
        made.map_err(|error| {
            // What cannot be removed is not ours, or the message below says why.
            let _ = fs::remove_dir_all(&staged.0);
            for path in missing {
                let _ = fs::remove_dir(path);
            }
            format!("{}: cannot be made: {error:#}; try --out", self.0.display())
        })
    }

    /// Keeps other launchers away, until the value or this process is gone.
    ///
    /// The lock lies beside the logs, which are the launcher's; the one in the run directory is the rank's.
    ///
    /// # Errors
    ///
    /// One line, when another launcher has it, or the file system refuses.
    pub(crate) fn hold(&self) -> Result<Lock, String> {
        Lock::take(&self.logs()).map_err(|error| error.to_string())
    }

    /// Moves what stands there to `<dir>.old-N`, and returns that place.
    ///
    /// # Errors
    ///
    /// One line, when a launcher runs it or the file system refuses.
    pub(crate) fn set_aside(&self) -> Result<RunDir, String> {
        let _hold = if there(&self.config())? {
            Some(self.hold()?)
        } else {
            None
        };
        let refused =
            |error: io::Error| format!("{}: cannot be moved aside: {error}", self.0.display());
        for number in 1_u32.. {
            let aside = self.sibling(&format!("old-{number}"));
            if !aside.try_exists().map_err(refused)? {
                fs::rename(&self.0, &aside).map_err(refused)?;
                return Ok(Self(aside));
            }
        }
        Err(format!(
            "{}: has too many old ones beside it",
            self.0.display()
        ))
    }

    /// Moves a directory that was set aside back to where it was.
    pub(crate) fn put_back(&self, aside: &RunDir) -> io::Result<()> {
        fs::rename(&aside.0, &self.0)
    }

    /// `<dir>.<suffix>`, on the same file system, so that a rename is all it takes.
    fn sibling(&self, suffix: &str) -> PathBuf {
        let mut path = OsString::from(&self.0);
        path.push(".");
        path.push(suffix);
        path.into()
    }
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// The nearest of a path and its parents that stands.
fn nearest(path: &Path) -> PathBuf {
    let standing = path
        .ancestors()
        .find(|path| fs::symlink_metadata(path).is_ok());
    standing.unwrap_or(Path::new(".")).to_owned()
}

fn there(path: &Path) -> Result<bool, String> {
    path.try_exists()
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Makes a directory and removes it: what access bits say does not hold for root, nor in `/proc`.
fn try_to_make(dir: &Path) -> io::Result<()> {
    let probe = dir.join(format!(".spd-probe-{}", std::process::id()));
    fs::create_dir(&probe)?;
    fs::remove_dir(&probe)
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
    let shown = differences
        .iter()
        .take(SHOWN)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match differences.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown}, and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_with_what_is_needed() {
        assert_eq!(check_free("runs", 10, 10), Ok(()));
        assert_eq!(
            check_free("runs", 1 << 20, 3 << 20).unwrap_err(),
            "runs: the checkpoints need 3.00 MiB, and 1.00 MiB are free; \
             try --out, or a smaller checkpoint.keep"
        );
    }

    #[test]
    fn the_first_differences_stand_for_all() {
        let keys: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        assert_eq!(listed(&keys[..2]), "a, b");
        assert_eq!(listed(&keys[..3]), "a, b, c");
        assert_eq!(listed(&keys), "a, b, c, and 1 more");
    }

    #[test]
    fn old_directories_are_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x"));
        for number in 1..=3 {
            fs::create_dir(run_dir.path()).unwrap();
            let aside = run_dir.set_aside().unwrap();
            assert_eq!(aside.path(), dir.path().join(format!("x.old-{number}")));
        }
    }

    #[test]
    fn a_directory_that_is_run_is_not_moved() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x"));
        let hold = run_dir.hold().unwrap();
        atomic::write_file(&run_dir.config(), b"").unwrap();
        let error = run_dir.set_aside().unwrap_err();
        let held = format!(
            "{}: held by process {} ",
            run_dir.logs().join("lock").display(),
            std::process::id()
        );
        assert!(error.starts_with(&held), "{error}");
        drop(hold);
        run_dir.set_aside().unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_made_leaves_nothing_half_made() {
        let dir = tempfile::tempdir().unwrap();
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tms_5-2.toml");
        let run = Run::load(&config, &[]).unwrap();
        // Its parents can be made; no file system takes the name itself.
        let path = dir.path().join("runs/today").join("x".repeat(300));
        let error = RunDir::at(path.clone()).prepare(&run).unwrap_err();
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
