//! Atomic writes: files and directories that exist whole or not at all. No other module creates or
//! replaces them.
//!
//! [`write_file`], [`write_private`], [`write_shared`], [`write_dir`], [`new_dir`] and [`cut_file`]
//! write the new content under a temporary name, sync it, rename it and sync the parent directory.
//! On a file system with atomic renames and a working fsync:
//!
//! - At every moment, also after a crash of the process or the machine, a name refers to its
//!   complete new content or to its previous content, which may be none.
//! - After `Ok` the new content survives a crash.
//! - After `Err` the name refers to its previous content; if only the last sync failed, to either.
//! - Unfinished content has a name that starts with `.tmp-`, in the same directory. An error
//!   removes it. After a crash the next write of that name removes it, or the caller of
//!   [`unfinished`].
//!
//! One process at a time may write a name, except with [`write_shared`]; any number may read it.
//! Errors are those of the operating system, without context, which the caller adds.
//!
//! The functions from [`unfinished`] on are the single steps, for callers that need another order.
//! They promise none of the above.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};

use crate::{fault, found, making};

/// Prefix of temporary names.
const UNFINISHED: &str = ".tmp-";

/// Writes a file, the pieces in order, and replaces one at `path`.
pub fn write_file(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    replace(path, |unfinished| create_file(unfinished, pieces))
}

/// Like [`write_file`], readable by its owner only.
pub fn write_private(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    replace(path, |unfinished| {
        fault::before("create file", || ())?;
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        fill(file.open(unfinished)?, pieces)
    })
}

/// Like [`write_file`] where other processes may write the same name, as in a cache: the last
/// writer wins. Temporary files of a crash stay.
pub fn write_shared(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    let _making = making();
    let mut number = 0_u64;
    loop {
        let unfinished = beside(path, &format!("{number}-"));
        match new_file(&unfinished) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            file => return finish(&unfinished, path, || fill(file?, pieces)),
        }
    }
}

/// Writes a directory of these files, each with its name and its pieces in order, and replaces one
/// at `path`.
pub fn write_dir(path: &Path, files: &[(&str, &[&[u8]])]) -> io::Result<()> {
    replace(path, |unfinished| {
        create_dir(unfinished)?;
        for (name, pieces) in files {
            create_file(&unfinished.join(name), pieces)?;
        }
        sync_dir(unfinished)
    })
}

/// Creates a directory at the free name `path`. `fill` creates and syncs its content under the
/// temporary name that it is given.
pub fn new_dir<E: From<io::Error>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let _making = making();
    if fs::symlink_metadata(path).is_ok() {
        return Err(io::Error::from(ErrorKind::AlreadyExists).into());
    }
    let unfinished = beside(path, "");
    remove(&unfinished)?;
    create_dir(&unfinished)?;
    fill(&unfinished)
        .and_then(|()| Ok(sync_dir(&unfinished)?))
        .and_then(|()| Ok(rename_synced(&unfinished, path)?))
        .inspect_err(|_| drop(remove(&unfinished)))
}

/// Truncates a file at byte `end` by replacing it with a shorter copy, so that readers of the old
/// file can tell.
pub fn cut_file(path: &Path, end: u64) -> io::Result<()> {
    replace(path, |unfinished| {
        let mut copy = new_file(unfinished)?;
        fault::before("write", || ())?;
        io::copy(&mut crate::open(path)?.take(end), &mut copy)?;
        sync(&copy)
    })
}

/// Creates a directory where it is missing; its parent must exist.
pub fn make_dir(path: &Path) -> io::Result<()> {
    match create_dir(path) {
        // It existed, or another process has just made it.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made.and_then(|()| sync_name(path)),
    }
}

/// Creates a directory and its parents where they are missing.
pub fn make_dirs(path: &Path) -> io::Result<()> {
    match make_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.parent().is_some() => {
            make_dirs(parent(path))?;
            make_dir(path)
        }
        made => made,
    }
}

/// Renames `from` to the free name `to` in the same directory, and syncs that.
pub fn rename_synced(from: &Path, to: &Path) -> io::Result<()> {
    rename(from, to).and_then(|()| sync_name(to))
}

/// Renames the damaged `path` to [`aside`], and returns that.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let aside = aside(path)?;
    rename_synced(path, &aside)?;
    Ok(aside)
}

/// A free name for a damaged file or directory: `path.bad`, then `path.bad-2`, and so on.
pub fn aside(path: &Path) -> io::Result<PathBuf> {
    first_free(|count| {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        match count {
            1 => name.push(".bad"),
            _ => name.push(format!(".bad-{count}")),
        }
        path.with_file_name(name)
    })
}

/// The first free one of the paths that `place` gives for 1, 2, and so on.
pub fn first_free(place: impl Fn(u64) -> PathBuf) -> io::Result<PathBuf> {
    for place in (1..).map(place) {
        if found(fs::symlink_metadata(&place))?.is_none() {
            return Ok(place);
        }
    }
    unreachable!("a directory does not hold 2^64 names");
}

/// Removes a directory: it is renamed first, so that no reader finds it half empty. After an error
/// the rest is among [`unfinished`].
pub fn remove_dir(path: &Path) -> io::Result<()> {
    let unfinished = beside(path, "");
    remove(&unfinished)?;
    rename_synced(path, &unfinished)?;
    remove(&unfinished)
}

/// The temporary names in a directory, sorted. They may be removed only while nothing writes there.
pub fn unfinished(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut names = names(dir)?;
    names.retain(|name| name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()));
    Ok(names.iter().map(|name| dir.join(name)).collect())
}

/// The names in a directory, sorted; none when there is no such directory.
pub fn names(dir: &Path) -> io::Result<Vec<OsString>> {
    let Some(entries) = found(fs::read_dir(dir))? else {
        return Ok(Vec::new());
    };
    let mut names = entries
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Creates and syncs a file, the pieces in order.
pub fn create_file(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    fill(new_file(path)?, pieces)
}

/// Creates a directory.
pub fn create_dir(path: &Path) -> io::Result<()> {
    fault::before("create directory", || ())?;
    fs::create_dir(path)
}

/// Syncs a directory, so that its names survive a crash.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    fault::before("sync directory", || ())?;
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that syncs"
    )]
    File::open(path)?.sync_all()
}

/// Syncs the parent directory of `path`, so that its name survives a crash.
pub fn sync_name(path: &Path) -> io::Result<()> {
    sync_dir(parent(path))
}

/// Renames without a sync: it survives a crash once both directories are synced.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fault::before("rename", || ())?;
    fs::rename(from, to)
}

/// Removes a file, or a directory with its content, if it exists.
pub fn remove(path: &Path) -> io::Result<()> {
    let Some(there) = found(fs::symlink_metadata(path))? else {
        return Ok(());
    };
    fault::before("remove", || {
        let first = names(path).ok().and_then(|names| names.into_iter().next());
        let _ = first.map(|name| remove(&path.join(name)));
    })?;
    if there.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// The temporary name for `path`.
fn beside(path: &Path, own: &str) -> PathBuf {
    let mut name = OsString::from(UNFINISHED);
    name.push(own);
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

/// The directory of a path.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != "" => parent,
        _ => Path::new("."),
    }
}

/// Gives `path` what `make` writes under the temporary name that it is given.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let _making = making();
    let unfinished = beside(path, "");
    remove(&unfinished)?;
    finish(&unfinished, path, || make(&unfinished))
}

/// Renames what `make` writes to `path`. Only the first error is reported: a temporary file that
/// cannot be removed is found later.
fn finish(unfinished: &Path, path: &Path, make: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let give = || match rename(unfinished, path) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
            exchange(unfinished, path)?;
            sync_name(path)?;
            remove(unfinished)
        }
        renamed => renamed.and_then(|()| sync_name(path)),
    };
    make()
        .and_then(|()| give())
        .inspect_err(|_| drop(remove(unfinished)))
}

fn new_file(path: &Path) -> io::Result<File> {
    fault::before("create file", || ())?;
    File::create_new(path)
}

fn fill(mut file: File, pieces: &[&[u8]]) -> io::Result<()> {
    for piece in pieces {
        fault::before("write", || drop(file.write_all(&piece[..piece.len() / 2])))?;
        file.write_all(piece)?;
    }
    sync(&file)
}

/// Syncs a file.
pub fn sync(file: &File) -> io::Result<()> {
    fault::before("sync file", || ())?;
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that syncs"
    )]
    file.sync_all()
}

/// Exchanges two names atomically, so that neither is ever free.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    fault::before("exchange", || ())?;
    let swap = RenameFlags::EXCHANGE;
    Ok(rustix::fs::renameat_with(CWD, one, CWD, other, swap)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_dir_is_complete_or_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dir");
        let fill = |dir: &Path| -> io::Result<()> {
            make_dirs(&dir.join("a"))?;
            create_file(&dir.join("a/b"), &[b"c"])
        };
        let refused = new_dir(&path, |dir| {
            fill(dir)?;
            Err(io::Error::other("no more"))
        });
        assert_eq!(refused.unwrap_err().to_string(), "no more");
        assert_eq!(names(folder.path()).unwrap(), [""; 0]);
        // A crash has left this temporary directory.
        fill(&folder.path().join(".tmp-dir")).unwrap();
        new_dir(&path, fill).unwrap();
        assert_eq!(names(folder.path()).unwrap(), ["dir"]);
        assert_eq!(crate::read(&path.join("a/b")).unwrap(), b"c");
        let found = new_dir(&path, fill).unwrap_err();
        assert_eq!(found.kind(), ErrorKind::AlreadyExists);
        assert_eq!(names(folder.path()).unwrap(), ["dir"]);
    }

    #[test]
    fn temporary_files_of_a_crash_do_not_block_a_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for name in [".tmp-file", ".tmp-0-file", ".tmp-1-file"] {
            create_file(&folder.path().join(name), &[b"half of something"]).unwrap();
        }
        write_shared(&path, &[b"shared"]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"shared");
        write_file(&path, &[b"own"]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"own");
        let left = [".tmp-0-file", ".tmp-1-file", "file"];
        assert_eq!(names(folder.path()).unwrap(), left);
    }

    #[test]
    fn a_shared_file_is_complete_with_concurrent_writers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let contents = [b'a', b'b', b'c', b'd'].map(|letter| vec![letter; 1 << 16]);
        std::thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| {
                    for _ in 0..20 {
                        write_shared(&path, &[content]).unwrap();
                        assert!(contents.contains(&fs::read(&path).unwrap()));
                    }
                });
            }
        });
        assert_eq!(names(folder.path()).unwrap(), ["file"]);
    }

    #[test]
    fn concurrent_make_dirs_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let deep = folder.path().join(format!("{round}/a/b"));
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                let make = || {
                    both.wait();
                    make_dirs(&deep)
                };
                let other = scope.spawn(make);
                make().unwrap();
                other.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn make_dirs_makes_parents_and_make_dir_none() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        assert_eq!(make_dir(&deep).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(names(folder.path()).unwrap().is_empty());
        make_dirs(&deep).unwrap();
        make_dirs(&deep).unwrap();
        assert!(deep.is_dir());

        write_file(&deep.join("file"), &[]).unwrap();
        for (path, kind) in [
            ("file/d", ErrorKind::NotADirectory),
            ("file", ErrorKind::AlreadyExists),
        ] {
            assert_eq!(make_dirs(&deep.join(path)).unwrap_err().kind(), kind);
        }
    }
}
