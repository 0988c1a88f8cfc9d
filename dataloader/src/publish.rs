//! The only place that creates files: a directory is written under another name, and appears whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::DataError;

/// A directory being written beside its final place, as `.NAME.partial`.
///
/// A process that dies leaves the partial directory, which the next one with the same `out` removes. Two
/// that live at the same time are kept apart by a lock on it.
#[derive(Debug)]
pub(crate) struct Staging {
    out: PathBuf,
    partial: PathBuf,
    /// What was at `out`, while it is being replaced.
    old: PathBuf,
    parent: PathBuf,
    overwrite: bool,
    /// Locked until this is dropped; None where directories cannot be locked, as on some network disks.
    _lock: Option<File>,
}

impl Staging {
    /// Makes the empty partial directory.
    ///
    /// - `members`: names of what a published directory holds; `overwrite` replaces nothing that holds
    ///   anything else
    ///
    /// # Errors
    ///
    /// When `out` holds something and `overwrite` is not set, another process is writing it, or the place
    /// cannot be written.
    pub(crate) fn begin(out: &Path, members: &[&str], overwrite: bool) -> Result<Self, DataError> {
        let Some(name) = out.file_name() else {
            return Err(DataError::Request(format!(
                "{}: is no name for a new directory; end it in one",
                out.display()
            )));
        };
        let parent = match out.parent() {
            Some(parent) if parent != Path::new("") => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        fs::create_dir_all(&parent).map_err(DataError::io("create", &parent))?;
        let beside = |ending: &str| {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(ending);
            parent.join(hidden)
        };
        let (partial, old) = (beside(".partial"), beside(".old"));
        create_dir_if_absent(&partial)?;
        let lock = lock(&partial, out)?;
        restore_old(&old, out)?;
        check_free(out, members, overwrite).inspect_err(|_| drop(fs::remove_dir(&partial)))?;
        empty(&partial)?;
        Ok(Self {
            out: out.to_owned(),
            partial,
            old,
            parent,
            overwrite,
            _lock: lock,
        })
    }

    /// Makes a directory in the partial one.
    pub(crate) fn create_dir(&self, name: &str) -> Result<PathBuf, DataError> {
        let dir = self.partial.join(name);
        fs::create_dir(&dir).map_err(DataError::io("create", &dir))?;
        Ok(dir)
    }

    /// Gives the directory its name, once all in it is on disk: `out` is complete or not there.
    ///
    /// What is replaced is set aside as `.NAME.old` first, and removed last. A process that dies between
    /// the two renames leaves it there, and the next one with the same `out` puts it back.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        for entry in read_dir(&self.partial)? {
            sync_dir(&entry)?;
        }
        sync_dir(&self.partial)?;
        // Not allowed to replace: what has come into being meanwhile makes the rename fail.
        let replaced = self.overwrite && !read_dir_if_there(&self.out)?.is_empty();
        if replaced {
            fs::rename(&self.out, &self.old).map_err(DataError::io("set aside", &self.out))?;
        }
        fs::rename(&self.partial, &self.out).map_err(DataError::io("create", &self.out))?;
        sync_dir(&self.parent)?;
        if replaced {
            fs::remove_dir_all(&self.old).map_err(DataError::io("remove", &self.old))?;
        }
        Ok(())
    }
}

/// Writes a new file, all parts in order, and waits until the disk has it.
pub(crate) fn write_new(path: &Path, parts: &[&[u8]]) -> Result<(), DataError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(DataError::io("create", path))?;
    write_parts(file, parts).map_err(DataError::io("write", path))
}

fn write_parts(mut file: File, parts: &[&[u8]]) -> io::Result<()> {
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_all()
}

fn create_dir_if_absent(dir: &Path) -> Result<(), DataError> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(DataError::io("create", dir)(error))
        }
        _ => Ok(()),
    }
}

fn lock(partial: &Path, out: &Path) -> Result<Option<File>, DataError> {
    let dir = File::open(partial).map_err(DataError::io("open", partial))?;
    match dir.try_lock() {
        Ok(()) => Ok(Some(dir)),
        Err(TryLockError::WouldBlock) => Err(DataError::Request(format!(
            "{}: another process is writing it now; wait for it, or use another name",
            out.display()
        ))),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Puts back, or removes, what a process that died while it replaced `out` had set aside.
fn restore_old(old: &Path, out: &Path) -> Result<(), DataError> {
    if !old.try_exists().map_err(DataError::io("look at", old))? {
        return Ok(());
    }
    if out.try_exists().map_err(DataError::io("look at", out))? {
        fs::remove_dir_all(old).map_err(DataError::io("remove", old))
    } else {
        fs::rename(old, out).map_err(DataError::io("put back", old))
    }
}

fn check_free(out: &Path, members: &[&str], overwrite: bool) -> Result<(), DataError> {
    let there = read_dir_if_there(out)?;
    if let Some(stranger) = there
        .iter()
        .find(|entry| !members.iter().any(|name| entry.ends_with(name)))
    {
        return Err(DataError::Request(format!(
            "{}: holds {}, which is not ours to replace; use another name",
            out.display(),
            stranger.file_name().unwrap_or_default().display()
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

/// Removes what an earlier process left.
fn empty(partial: &Path) -> Result<(), DataError> {
    for entry in read_dir(partial)? {
        let is_dir = fs::symlink_metadata(&entry)
            .map_err(DataError::io("look at", &entry))?
            .is_dir();
        if is_dir {
            fs::remove_dir_all(&entry)
        } else {
            fs::remove_file(&entry)
        }
        .map_err(DataError::io("remove", &entry))?;
    }
    Ok(())
}

fn read_dir_if_there(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    match read_dir(dir) {
        Err(DataError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        other => other,
    }
}

/// What a directory holds, by name.
fn read_dir(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut entries = fs::read_dir(dir)
        .and_then(|entries| {
            entries
                .map(|entry| Ok(entry?.path()))
                .collect::<io::Result<Vec<_>>>()
        })
        .map_err(DataError::io("list", dir))?;
    entries.sort();
    Ok(entries)
}

fn sync_dir(dir: &Path) -> Result<(), DataError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(DataError::io("sync", dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish_one(out: &Path, content: &[u8], overwrite: bool) -> Result<(), DataError> {
        let staging = Staging::begin(out, &["train"], overwrite)?;
        write_new(&staging.create_dir("train")?.join("a"), &[content])?;
        staging.publish()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = read_dir(dir).unwrap();
        entries
            .iter()
            .map(|path| path.file_name().unwrap().display().to_string())
            .collect()
    }

    #[test]
    fn what_a_dead_process_left_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("data");
        let staging = Staging::begin(&out, &["train"], false).unwrap();
        write_new(&staging.create_dir("half").unwrap().join("x"), &[b"half"]).unwrap();
        drop(staging);
        assert_eq!(names(parent.path()), [".data.partial"]);
        publish_one(&out, b"whole", false).unwrap();
        assert_eq!(names(parent.path()), ["data"]);
        assert_eq!(names(&out), ["train"]);
    }

    #[test]
    fn a_process_that_died_while_replacing_has_lost_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("data");
        publish_one(&out, b"first", false).unwrap();
        fs::rename(&out, parent.path().join(".data.old")).unwrap();
        let error = publish_one(&out, b"second", false).unwrap_err().to_string();
        assert!(error.ends_with(
            "data: already holds a dataset; overwrite it by request, or use another name"
        ));
        assert_eq!(names(parent.path()), ["data"]);
        publish_one(&out, b"second", true).unwrap();
        assert_eq!(fs::read(out.join("train/a")).unwrap(), b"second");
        assert_eq!(names(parent.path()), ["data"]);
    }

    #[test]
    fn two_at_a_time_are_kept_apart() {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("data");
        let _first = Staging::begin(&out, &["train"], false).unwrap();
        assert_eq!(
            Staging::begin(&out, &["train"], true)
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
        assert_eq!(names(parent.path()), ["home"]);
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = write_parts(full, &[b"tokens"]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}
