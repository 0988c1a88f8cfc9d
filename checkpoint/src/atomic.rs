//! The only place that creates files: temporary name, write, sync, rename, sync the directory.
//!
//! Whatever stops the process, a name made here holds all of its new content or what it held before.
//! What was begun and not finished lies beside it under a name that starts with `.tmp-`.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};

use crate::CheckpointError;
#[cfg(test)]
use crate::fault;

/// How the name of unfinished things begins.
const UNFINISHED: &str = ".tmp-";

/// Puts a file of these bytes at `path`, in place of one that may be there.
///
/// # Errors
///
/// When the disk is full or refuses. `path` then holds what it held before, unless only the last sync
/// failed.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let unfinished = unfinished(path);
    let written = create_file(&unfinished, &[bytes])
        .and_then(|()| rename(&unfinished, path))
        .and_then(|()| sync_dir(parent(path)));
    written.map_err(|found| give_up(&unfinished, path, bytes.len() as u64, found))
}

/// A file of a directory that is yet to be: its name, and its content in pieces.
pub(crate) struct NewFile<'a> {
    pub(crate) name: &'static str,
    pub(crate) pieces: Vec<&'a [u8]>,
}

/// Puts a directory of these files at `path`, in place of one that may be there.
///
/// # Errors
///
/// As [`write_file`].
pub(crate) fn write_dir(path: &Path, files: &[NewFile<'_>]) -> Result<(), CheckpointError> {
    let unfinished = unfinished(path);
    let write = || {
        remove(&unfinished)?;
        create_dir(&unfinished)?;
        for file in files {
            create_file(&unfinished.join(file.name), &file.pieces)?;
        }
        sync_dir(&unfinished)?;
        match rename(&unfinished, path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                exchange(&unfinished, path)?;
                sync_dir(parent(path))?;
                remove(&unfinished)
            }
            Err(error) => Err(error),
            Ok(()) => sync_dir(parent(path)),
        }
    };
    let bytes = files
        .iter()
        .flat_map(|file| &file.pieces)
        .map(|piece| piece.len() as u64)
        .sum();
    write().map_err(|found| give_up(&unfinished, path, bytes, found))
}

/// Makes sure that there is a directory at `path`, with those above it.
///
/// # Errors
///
/// When the disk refuses, or something else has the name.
pub(crate) fn make_dir(path: &Path) -> Result<(), CheckpointError> {
    let made = match create_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.parent().is_some() => {
            make_dir(parent(path))?;
            create_dir(path)
        }
        outcome => outcome,
    };
    match made {
        // It was there, or another process has made it just now.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        outcome => outcome
            .and_then(|()| sync_dir(parent(path)))
            .map_err(|found| CheckpointError::io(path, "make the directory", found)),
    }
}

/// Gives the directory at `from` the name `to`, which is free.
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn rename_dir(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    rename(from, to)
        .and_then(|()| sync_dir(parent(to)))
        .map_err(|found| CheckpointError::io(from, "rename the directory", found))
}

/// Removes a directory, which loses its name before it loses its first file.
///
/// # Errors
///
/// When the disk refuses. What is left has a name that [`sweep`] removes.
pub(crate) fn remove_dir(path: &Path) -> Result<(), CheckpointError> {
    let unfinished = unfinished(path);
    remove(&unfinished)
        .and_then(|()| rename(path, &unfinished))
        .and_then(|()| sync_dir(parent(path)))
        .and_then(|()| remove(&unfinished))
        .map_err(|found| CheckpointError::io(path, "remove the directory", found))
}

/// Removes from a directory what was begun and never finished, and says what that was.
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn sweep(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut swept = Vec::new();
    for name in names(dir)? {
        if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            let path = dir.join(name);
            remove(&path).map_err(|found| CheckpointError::io(&path, "remove", found))?;
            swept.push(path);
        }
    }
    Ok(swept)
}

/// The names in a directory, sorted; none when there is no such directory.
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn names(dir: &Path) -> Result<Vec<OsString>, CheckpointError> {
    let list = || -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            names.push(entry?.file_name());
        }
        names.sort();
        Ok(names)
    };
    match list() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(|found| CheckpointError::io(dir, "list the directory", found)),
    }
}

fn unfinished(path: &Path) -> PathBuf {
    let mut name = OsString::from(UNFINISHED);
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != "" => parent,
        _ => Path::new("."),
    }
}

/// Removes what was begun. The first error is the one to report: what cannot be removed either is swept
/// at the next start.
fn give_up(unfinished: &Path, path: &Path, bytes: u64, found: io::Error) -> CheckpointError {
    let _ = remove(unfinished);
    CheckpointError::write(path, bytes, found)
}

fn create_file(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    #[cfg(test)]
    fault::before("create file", || ())?;
    #[expect(
        clippy::disallowed_methods,
        reason = "a temporary name: nobody reads what it truncates"
    )]
    let mut file = File::create(path)?;
    for piece in pieces {
        #[cfg(test)]
        fault::before("write", || drop(file.write_all(&piece[..piece.len() / 2])))?;
        file.write_all(piece)?;
    }
    #[cfg(test)]
    fault::before("sync file", || ())?;
    file.sync_all()
}

fn create_dir(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    fault::before("create directory", || ())?;
    fs::create_dir(path)
}

fn sync_dir(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    fault::before("sync directory", || ())?;
    File::open(path)?.sync_all()
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(test)]
    fault::before("rename", || ())?;
    fs::rename(from, to)
}

/// Swaps two names at once, so that at no time either is free.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    #[cfg(test)]
    fault::before("exchange", || ())?;
    Ok(rustix::fs::renameat_with(
        CWD,
        one,
        CWD,
        other,
        RenameFlags::EXCHANGE,
    )?)
}

/// Removes a file, or a directory with all that is in it, if it is there.
fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(metadata) => {
            #[cfg(test)]
            fault::before("remove", || drop(fs::remove_file(path.join("meta.json"))))?;
            if metadata.is_dir() {
                fs::remove_dir_all(path)
            } else {
                fs::remove_file(path)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Then;

    fn files(content: &[u8]) -> Vec<NewFile<'_>> {
        vec![
            NewFile {
                name: "a",
                pieces: vec![content, content],
            },
            NewFile {
                name: "b",
                pieces: vec![content],
            },
        ]
    }

    // A rename may reach the disk before the bytes do, and a name is only kept by its directory's sync.
    #[test]
    fn all_is_synced_before_the_name_and_the_name_after() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dir");
        let ((), first) = fault::record(|| write_dir(&path, &files(b"old")).unwrap());
        assert_eq!(
            first,
            [
                "create directory",
                "create file",
                "write",
                "write",
                "sync file",
                "create file",
                "write",
                "sync file",
                "sync directory",
                "rename",
                "sync directory",
            ]
        );
        let ((), again) = fault::record(|| write_dir(&path, &files(b"new")).unwrap());
        assert_eq!(
            again[8..],
            [
                "sync directory",
                "rename",
                "exchange",
                "sync directory",
                "remove"
            ]
        );
        assert_eq!(fs::read(path.join("b")).unwrap(), b"new");
        assert_eq!(names(folder.path()).unwrap(), ["dir"]);
    }

    #[test]
    fn a_file_stopped_anywhere_is_old_or_new() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for then in [Then::Fail, Then::Crash] {
            for operation in 0.. {
                write_file(&path, b"old content").unwrap();
                let (outcome, fired) = fault::at(operation, then, || write_file(&path, b"new"));
                let found = fs::read(&path).unwrap();
                assert!(
                    found == b"old content" || found == b"new",
                    "{operation}: {found:?}"
                );
                if outcome.is_ok() {
                    assert_eq!(found, b"new");
                }
                if !fired {
                    break;
                }
                assert!(outcome.is_err());
                let left = sweep(folder.path()).unwrap();
                assert!(
                    then == Then::Crash || left.is_empty(),
                    "{operation}: {left:?}"
                );
            }
        }
    }

    #[test]
    fn many_may_make_the_same_directory_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let deep = folder.path().join(format!("{round}/a/b"));
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                let make = || {
                    both.wait();
                    make_dir(&deep)
                };
                let other = scope.spawn(make);
                make().unwrap();
                other.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn directories_above_are_made_too() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        make_dir(&deep).unwrap();
        make_dir(&deep).unwrap();
        assert!(deep.is_dir());

        write_file(&deep.join("file"), b"").unwrap();
        let error = make_dir(&deep.join("file/d")).unwrap_err().to_string();
        assert!(error.ends_with(
            "a/b/c/file/d: cannot make the directory: Not a directory (os error 20); \
             is the disk there and in order?"
        ));
        let error = make_dir(&deep.join("file")).unwrap_err().to_string();
        assert!(
            error.contains("cannot make the directory: File exists"),
            "{error}"
        );
    }
}
