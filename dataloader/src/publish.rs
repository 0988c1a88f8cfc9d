//! Datasets are written inside the output directory, and get their names when all of them are on
//! disk.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use spd_files::atomic;

use crate::DataError;

/// Datasets that are being written.
const PARTIAL: &str = ".partial";
/// Datasets that are on disk and get their names.
const NEW: &str = ".new";
/// Datasets that are replaced.
const OLD: &str = ".old";

/// Datasets being written in `out`, which may be a mount point, a link or `.`: nothing outside of
/// it is used.
///
/// The datasets are written in `.partial`; the ones that they replace are moved into `.old`;
/// `.partial` becomes `.new`; the members of `.new` get their names, the last member last; `.new`
/// and `.old` are removed. If a process dies before `.new` exists, the next one restores `.old`;
/// after that, the next one finishes. So all named members come from one tokenization, which is
/// complete if the last member is there. A lock on `out` keeps two processes apart.
#[derive(Debug)]
pub(crate) struct Staging {
    out: PathBuf,
    /// The members of a published directory, in the order in which they get their names.
    members: &'static [&'static str],
    /// Directories that were made for it, `out` first. They are removed if nothing is published.
    made: Vec<PathBuf>,
    /// Whether `.partial` stays for the next process if nothing is published.
    pub(crate) is_kept: bool,
    /// Locked until this is dropped; `None` if directories cannot be locked, as on some network
    /// disks.
    _lock: Option<File>,
}

impl Staging {
    /// Makes the partial directory: an empty one, or the existing one if `keep` says so.
    ///
    /// - `members`: names in a published directory; `overwrite` refuses to replace a directory that
    ///   holds anything else
    ///
    /// # Errors
    ///
    /// When `out` is not empty and `overwrite` is not set, another process is writing it, or it
    /// cannot be written. `out` is then unchanged.
    pub(crate) fn begin(
        out: &Path,
        members: &'static [&'static str],
        overwrite: bool,
        keep: impl FnOnce(&Path) -> bool,
    ) -> Result<Self, DataError> {
        let above = out.ancestors();
        let made: Vec<PathBuf> = above
            .take_while(|path| !path.as_os_str().is_empty() && !path.is_dir())
            .map(Path::to_owned)
            .collect();
        if let Err(error) = atomic::make_dirs(out) {
            remove_empty(&made);
            return Err(DataError::io("create", out)(error));
        }
        let lock = lock(out)?;
        let mut staging = Self {
            out: out.to_owned(),
            members,
            made,
            is_kept: false,
            _lock: lock,
        };
        let partial = staging.at(PARTIAL);
        staging.is_kept = keep(&partial);
        staging.settle()?;
        if let Err(error) = check_free(out, members, overwrite) {
            staging.is_kept = false;
            return Err(error);
        }
        if !staging.is_kept {
            atomic::create_dir(&partial).map_err(DataError::io("create", &partial))?;
        }
        Ok(staging)
    }

    /// The partial directory.
    pub(crate) fn partial(&self) -> PathBuf {
        self.at(PARTIAL)
    }

    /// Makes a directory in the partial one, unless it exists.
    pub(crate) fn create_dir(&self, name: &str) -> Result<PathBuf, DataError> {
        let dir = self.at(PARTIAL).join(name);
        if there(&dir)? {
            return Ok(dir);
        }
        atomic::create_dir(&dir).map_err(DataError::io("create", &dir))?;
        Ok(dir)
    }

    /// Gives the datasets their names. All of them must be on disk.
    pub(crate) fn publish(mut self) -> Result<(), DataError> {
        let (partial, old) = (self.at(PARTIAL), self.at(OLD));
        for name in names(&partial)? {
            sync_dir(&partial.join(name))?;
        }
        sync_dir(&partial)?;
        atomic::create_dir(&old).map_err(DataError::io("create", &old))?;
        self.move_members(&self.out, &old)?;
        atomic::rename(&partial, &self.at(NEW)).map_err(DataError::io("rename", &partial))?;
        sync_dir(&self.out)?;
        // From here on this process or the next one finishes.
        self.made.clear();
        self.settle()
    }

    /// Finishes or undoes the work of an earlier process in `out`.
    fn settle(&self) -> Result<(), DataError> {
        let (new, old) = (self.at(NEW), self.at(OLD));
        if there(&new)? {
            self.move_members(&new, &self.out)?;
            sync_dir(&self.out)?;
            remove(&old)?;
            remove(&new)?;
        } else if there(&old)? {
            self.move_members(&old, &self.out)?;
            remove(&old)?;
        }
        // A published directory has no `.partial`.
        if self.is_kept {
            return Ok(());
        }
        remove(&self.at(PARTIAL))
    }

    /// Moves the members that exist, in their order.
    fn move_members(&self, from: &Path, to: &Path) -> Result<(), DataError> {
        for name in self.members {
            let member = from.join(name);
            if there(&member)? {
                atomic::rename(&member, &to.join(name))
                    .map_err(DataError::io("rename", &member))?;
            }
        }
        Ok(())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.out.join(name)
    }
}

impl Drop for Staging {
    /// Cleans up after an error. The next process cleans up what this one cannot.
    fn drop(&mut self) {
        let _ = self.settle();
        if !self.is_kept {
            remove_empty(&self.made);
        }
    }
}

fn remove_empty(dirs: &[PathBuf]) {
    for dir in dirs {
        let _ = fs::remove_dir(dir);
    }
}

fn there(path: &Path) -> Result<bool, DataError> {
    path.try_exists().map_err(DataError::io("look at", path))
}

fn remove(dir: &Path) -> Result<(), DataError> {
    atomic::remove(dir).map_err(DataError::io("remove", dir))
}

/// Writes a new file, all parts in order, and syncs it.
pub(crate) fn write_new(path: &Path, parts: &[&[u8]]) -> Result<(), DataError> {
    atomic::create_file(path, parts).map_err(DataError::io("write", path))
}

/// Replaces a file, whole or not at all.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    atomic::write_file(path, &[bytes]).map_err(DataError::io("write", path))
}

/// Removes a file or a directory.
pub(crate) fn discard(path: &Path) -> Result<(), DataError> {
    remove(path)
}

fn lock(out: &Path) -> Result<Option<File>, DataError> {
    let dir = File::open(out).map_err(DataError::io("open", out))?;
    match spd_files::lock_within(spd_files::PATIENCE, || dir.try_lock()) {
        Ok(()) => Ok(Some(dir)),
        Err(TryLockError::WouldBlock) => Err(DataError::Request(format!(
            "{}: another process is writing it now; wait for it, or use another name",
            out.display()
        ))),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

fn check_free(out: &Path, members: &[&str], overwrite: bool) -> Result<(), DataError> {
    let mut there = names(out)?;
    // The root of a disk has `lost+found`; a partial directory is continued.
    there.retain(|entry| entry != "lost+found" && entry != PARTIAL);
    if let Some(stranger) = there
        .iter()
        .find(|entry| !members.iter().any(|name| entry == name))
    {
        return Err(DataError::Request(format!(
            "{}: holds {}, which is not ours to replace; use another name",
            out.display(),
            stranger.display()
        )));
    }
    if !there.is_empty() && !overwrite {
        return Err(DataError::Request(format!(
            "{}: already holds a dataset; overwrite it by request, or use another name",
            out.display()
        )));
    }
    Ok(())
}

fn names(dir: &Path) -> Result<Vec<OsString>, DataError> {
    atomic::names(dir).map_err(DataError::io("list", dir))
}

fn sync_dir(dir: &Path) -> Result<(), DataError> {
    atomic::sync_dir(dir).map_err(DataError::io("sync", dir))
}

#[cfg(test)]
mod tests {
    use spd_testing::faults::{self, Then};

    use super::*;

    const MEMBERS: &[&str] = &["val", "train"];

    fn publish_one(out: &Path, content: &[u8], overwrite: bool) -> Result<(), DataError> {
        let staging = Staging::begin(out, MEMBERS, overwrite, |_| false)?;
        for name in MEMBERS {
            write_new(&staging.create_dir(name)?.join("a"), &[content])?;
        }
        staging.publish()
    }

    fn names(dir: &Path) -> Vec<OsString> {
        super::names(dir).unwrap()
    }

    fn content(out: &Path) -> [Vec<u8>; 2] {
        ["train/a", "val/a"].map(|file| fs::read(out.join(file)).unwrap())
    }

    #[test]
    fn a_directory_that_is_given_is_worked_in() {
        let parent = tempfile::tempdir().unwrap();
        let disk = parent.path().join("disk");
        fs::create_dir_all(disk.join("lost+found")).unwrap();
        std::os::unix::fs::symlink("disk", parent.path().join("link")).unwrap();
        for out in ["disk", "disk/", "link", "link/.", "disk/../disk/."] {
            publish_one(&parent.path().join(out), out.as_bytes(), true).unwrap();
            assert_eq!(content(&disk), [out.as_bytes(); 2]);
            assert_eq!(names(&disk), ["lost+found", "train", "val"]);
            assert_eq!(names(parent.path()), ["disk", "link"]);
        }
    }

    #[test]
    fn abandoned_staging_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("new/data");
        let staging = Staging::begin(&out, MEMBERS, false, |_| false).unwrap();
        write_new(&staging.create_dir("val").unwrap().join("x"), &[b"half"]).unwrap();
        drop(staging);
        assert!(names(parent.path()).is_empty());
        publish_one(&out, b"first", false).unwrap();
        drop(Staging::begin(&out, MEMBERS, true, |_| false).unwrap());
        assert_eq!(names(&out), ["train", "val"]);
        assert_eq!(content(&out), [b"first"; 2]);
    }

    #[test]
    fn remains_of_a_killed_process_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("data");
        fs::create_dir_all(out.join(".partial/half")).unwrap();
        publish_one(&out, b"whole", false).unwrap();
        assert_eq!(names(parent.path()), ["data"]);
        assert_eq!(names(&out), ["train", "val"]);
    }

    #[test]
    fn stopped_anywhere_while_replacing_nothing_is_lost() {
        for then in [Then::Fail, Then::Crash] {
            for operation in 0.. {
                let parent = tempfile::tempdir().unwrap();
                let out = parent.path().join("data");
                publish_one(&out, b"old", false).unwrap();
                let (outcome, fired) =
                    faults::at(operation, then, || publish_one(&out, b"new", true));
                // The next process finds the old or the new datasets.
                let error = publish_one(&out, b"third", false).unwrap_err().to_string();
                assert!(error.ends_with(
                    "data: already holds a dataset; overwrite it by request, or use another name"
                ));
                let found = content(&out);
                assert!(
                    found == [b"new"; 2] || fired && found == [b"old"; 2],
                    "{then:?} {operation}: {found:?}"
                );
                assert_eq!(names(&out), ["train", "val"]);
                assert_eq!(outcome.is_err(), fired);
                if !fired {
                    break;
                }
            }
        }
    }

    #[test]
    fn two_at_a_time_are_kept_apart() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("data");
        let _first = Staging::begin(&out, MEMBERS, false, |_| false).unwrap();
        assert_eq!(
            Staging::begin(&out, MEMBERS, true, |_| false)
                .unwrap_err()
                .to_string(),
            format!(
                "{}: another process is writing it now; wait for it, or use another name",
                out.display()
            )
        );
    }

    #[test]
    fn a_directory_with_other_things_is_never_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("home");
        fs::create_dir_all(out.join("photos")).unwrap();
        assert_eq!(
            publish_one(&out, b"", true).unwrap_err().to_string(),
            format!(
                "{}: holds photos, which is not ours to replace; use another name",
                out.display()
            )
        );
        assert_eq!(names(&out), ["photos"]);
    }
}
