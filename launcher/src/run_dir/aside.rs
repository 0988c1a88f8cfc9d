//! Moves an existing run aside, and back.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use spd_checkpoint::{CheckpointError, Lock};
use spd_files::atomic::first_free;

use super::{RunDir, entries, is_apart, there};

impl RunDir {
    /// Moves the run to `<dir>.old-N`, or its content to `<dir>/old-N` if the directory cannot be
    /// moved, and returns the new path.
    ///
    /// # Errors
    ///
    /// One line, when a launcher holds it or the file system refuses. Nothing has then been moved.
    pub(crate) fn set_aside(&self) -> Result<RunDir, String> {
        self.set_aside_by(&|from, to| fs::rename(from, to))
    }

    fn set_aside_by(&self, rename: Rename<'_>) -> Result<RunDir, String> {
        let _hold = if there(&self.config())? {
            match Lock::take(&self.logs()) {
                Err(error @ CheckpointError::Held { .. }) => return Err(error.to_string()),
                // If something else has the lock's name, no launcher holds the lock.
                hold => hold.ok(),
            }
        } else {
            None
        };
        let whole = match self.stays() {
            true => Ok(None),
            false => self.move_whole(rename),
        };
        whole
            .and_then(|whole| match whole {
                Some(aside) => Ok(aside),
                None => self.move_contents(rename),
            })
            .map_err(|error| format!("{}: cannot be moved aside: {error}", self.0.display()))
    }

    /// Whether the path itself has to stay: `.`, or a link, whose target is the user's choice.
    fn stays(&self) -> bool {
        self.0.file_name().is_none() || self.0.is_symlink()
    }

    /// `None` if the directory cannot be moved: a mount point, or in a directory that this user may
    /// not change.
    fn move_whole(&self, rename: Rename<'_>) -> io::Result<Option<RunDir>> {
        use ErrorKind::{
            CrossesDevices, InvalidInput, PermissionDenied, ReadOnlyFilesystem, ResourceBusy,
        };
        let aside = first_free(|number| {
            let mut path = OsString::from(&self.0);
            path.push(format!(".old-{number}"));
            path.into()
        })?;
        match rename(&self.0, &aside) {
            Ok(()) => Ok(Some(Self(aside))),
            Err(error) => match error.kind() {
                ResourceBusy | InvalidInput | CrossesDevices | PermissionDenied
                | ReadOnlyFilesystem => Ok(None),
                _ => Err(error),
            },
        }
    }

    fn move_contents(&self, rename: Rename<'_>) -> io::Result<RunDir> {
        let aside = first_free(|number| self.0.join(format!("old-{number}")))?;
        let parts = entries(&self.0)?;
        fs::create_dir(&aside)?;
        move_all(parts, &aside, rename).inspect_err(|_| drop(fs::remove_dir(&aside)))?;
        Ok(Self(aside))
    }

    /// Moves a run that was set aside back.
    pub(crate) fn put_back(&self, aside: &RunDir) -> io::Result<()> {
        if aside.0.parent() != Some(&self.0) {
            return fs::rename(&aside.0, &self.0);
        }
        move_all(entries(&aside.0)?, &self.0, &|from, to| {
            fs::rename(from, to)
        })?;
        fs::remove_dir(&aside.0)
    }
}

/// The rename function: the file system's, or a failing one in tests.
type Rename<'a> = &'a dyn Fn(&Path, &Path) -> io::Result<()>;

/// Moves the parts of a run to `to`: all of them, or none.
fn move_all(mut parts: Vec<PathBuf>, to: &Path, rename: Rename<'_>) -> io::Result<()> {
    parts.retain(|part| !is_apart(part));
    // `config.toml` is moved last: a launcher that is killed on the way leaves it, so that the move
    // can be repeated.
    parts.sort_by_key(|part| part.ends_with("config.toml"));
    for (index, part) in parts.iter().enumerate() {
        let place = |part: &Path| to.join(part.file_name().unwrap_or_default());
        if let Err(error) = rename(part, &place(part)) {
            for part in parts[..index].iter().rev() {
                rename(&place(part), part)?;
            }
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use spd_checkpoint::atomic;

    use super::super::DirState;
    use super::super::tests::{names, tms};
    use super::*;

    #[test]
    fn old_directories_are_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x/"));
        for number in 1..=3 {
            fs::create_dir(run_dir.path()).unwrap();
            let aside = run_dir.set_aside().unwrap();
            assert_eq!(aside.path(), dir.path().join(format!("x.old-{number}")));
        }
    }

    #[test]
    fn the_content_is_moved_if_the_directory_cannot_be() {
        use rustix::io::Errno;
        for refusal in [
            Errno::BUSY,
            Errno::XDEV,
            Errno::INVAL,
            Errno::ACCESS,
            Errno::ROFS,
        ] {
            let dir = tempfile::tempdir().unwrap();
            let run_dir = RunDir::at(dir.path().join("x"));
            fs::create_dir_all(dir.path().join("x/lost+found")).unwrap();
            drop(run_dir.prepare(&tms()).unwrap());
            let rename = |from: &Path, to: &Path| {
                if from == run_dir.path() {
                    return Err(refusal.into());
                }
                fs::rename(from, to)
            };
            let old = run_dir.set_aside_by(&rename).unwrap();
            assert_eq!(old.path(), run_dir.path().join("old-1"));
            assert_eq!(names(old.path()), ["checkpoints", "config.toml", "logs"]);
            assert_eq!(run_dir.find(&tms()), Ok(DirState::Nothing));
            drop(run_dir.prepare(&tms()).unwrap());
            let older = run_dir.set_aside_by(&rename).unwrap();
            assert_eq!(older.path(), run_dir.path().join("old-2"));
            run_dir.put_back(&older).unwrap();
            let all = ["checkpoints", "config.toml", "logs", "lost+found", "old-1"];
            assert_eq!(names(run_dir.path()), all);
            assert_eq!(run_dir.find(&tms()), Ok(DirState::Begun));
        }
    }

    #[test]
    fn a_partial_move_is_undone() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x"));
        drop(run_dir.prepare(&tms()).unwrap());
        let before = names(run_dir.path());
        let rename = |from: &Path, to: &Path| {
            if from == run_dir.path() || from.ends_with("config.toml") {
                return Err(rustix::io::Errno::BUSY.into());
            }
            fs::rename(from, to)
        };
        let error = run_dir.set_aside_by(&rename).unwrap_err();
        let refused = "cannot be moved aside: Device or resource busy (os error 16)";
        assert!(error.ends_with(refused), "{error}");
        assert_eq!(names(run_dir.path()), before);
    }

    #[test]
    fn a_link_keeps_its_target() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("disk")).unwrap();
        std::os::unix::fs::symlink("disk", dir.path().join("x")).unwrap();
        let run_dir = RunDir::at(dir.path().join("x/"));
        drop(run_dir.prepare(&tms()).unwrap());
        let aside = run_dir.set_aside().unwrap();
        assert_eq!(aside.path(), dir.path().join("x/old-1"));
        drop(run_dir.prepare(&tms()).unwrap());
        assert_eq!(names(dir.path()), ["disk", "x"]);
        let all = ["checkpoints", "config.toml", "logs", "old-1"];
        assert_eq!(names(&dir.path().join("disk")), all);
    }

    #[test]
    fn a_held_directory_is_not_moved() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().join("x"));
        fs::create_dir(run_dir.path()).unwrap();
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
}
