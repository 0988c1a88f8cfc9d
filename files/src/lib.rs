//! Opens files without blocking, writes them [atomically](atomic), and makes
//! [text from other programs](foreign) safe to show.
//!
//! A path may name something else: opening a named pipe waits for its writer, and a device may
//! never end. Every file that we read or append to is opened here; anything else is refused with
//! its kind.

use std::fmt::Display;
use std::fs::{self, File, FileType, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

pub mod atomic;
#[doc(hidden)]
pub mod fault;
pub mod foreign;

/// Opens a file for reading.
///
/// # Errors
///
/// When the file does not exist, the operating system refuses, or something else has that name:
/// [`ErrorKind::IsADirectory`] for a directory, otherwise [`ErrorKind::InvalidInput`].
pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Opens a file with these options.
///
/// # Errors
///
/// As [`open`]; a missing file is one only where `options` does not create it.
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Checked first, because opening a device may already affect it.
    if let Some(found) = found(fs::metadata(path))? {
        is_file(found.file_type())?;
    }
    // Checked again: the name may have been replaced meanwhile.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = options.custom_flags(flags).open(path)?;
    is_file(file.metadata()?.file_type())?;
    Ok(file)
}

/// The result of an operation on a path, or `None` if nothing has that name.
///
/// # Errors
///
/// Every other error of the operation.
pub fn found<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// Whether `path` names this open file.
///
/// # Errors
///
/// When the operating system cannot say.
pub fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let there = match fs::metadata(path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        found => found?,
    };
    let here = file.metadata()?;
    Ok((here.dev(), here.ino()) == (there.dev(), there.ino()))
}

/// How long to wait for a lock: a killed process keeps its locks for a moment, which is longer on a
/// busy machine.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Tries to lock a file, for `limit` while another process holds it.
///
/// # Errors
///
/// When another process still holds it, or the file system refuses.
pub fn lock_within(
    limit: Duration,
    try_lock: impl Fn() -> Result<(), TryLockError>,
) -> Result<(), TryLockError> {
    let began = Instant::now();
    loop {
        match try_lock() {
            Err(TryLockError::WouldBlock) if began.elapsed() < limit => {
                thread::sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

/// Reads a file.
///
/// # Errors
///
/// As [`open`], and when it cannot be read.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a file of at most `most` bytes: parsing takes a multiple of its length.
///
/// # Errors
///
/// As [`read`], and [`ErrorKind::FileTooLarge`] for a longer file.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let mut bytes = Vec::new();
    // The length in the metadata may be stale: another process may be writing the file.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let told = format!("larger than the limit of {most} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, told));
    }
    Ok(bytes)
}

/// Reads a text file.
///
/// # Errors
///
/// As [`read`], and when it is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|found| io::Error::new(ErrorKind::InvalidData, found))
}

/// Checks that a directory can be made at `path`, or written to if it exists, by making a file
/// without a name there, or where file systems have none, by making and removing a probe directory:
/// access bits do not hold for root, nor in `/proc`. Returns the nearest existing ancestor, or
/// `path` itself.
///
/// # Errors
///
/// One line.
pub fn try_dir(path: &Path) -> Result<PathBuf, String> {
    let refused = |found: &dyn Display| format!("{}: cannot be made: {found}", path.display());
    if let Err(error) = fs::symlink_metadata(path)
        && error.kind() != ErrorKind::NotFound
        && error.kind() != ErrorKind::NotADirectory
    {
        return Err(refused(&error));
    }
    let mut above = path.ancestors();
    let standing = above.find(|path| fs::symlink_metadata(path).is_ok());
    let standing = standing.unwrap_or(Path::new(".")).to_owned();
    let place = standing.display();
    match fs::metadata(&standing) {
        Ok(found) if found.is_dir() => {}
        Ok(found) => {
            let found = name(found.file_type());
            return Err(refused(&format!("{place} is {found}, not a directory")));
        }
        Err(error) => return Err(refused(&format!("{place}: {error}"))),
    }
    // A kill leaves nothing of it.
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    if rustix::fs::open(&standing, flags, Mode::RUSR | Mode::WUSR).is_ok() {
        return Ok(standing);
    }
    let _making = making();
    let probe = standing.join(format!("{PROBE}{}", std::process::id()));
    fs::create_dir(&probe)
        .and_then(|()| fs::remove_dir(&probe))
        .map_err(|error| format!("{place}: nothing can be made there: {error}"))?;
    Ok(standing)
}

/// Prefix of the probe directories of [`try_dir`].
pub const PROBE: &str = ".spd-probe-";

/// Read-locked while a temporary name exists.
static MAKING: RwLock<()> = RwLock::new(());

fn making() -> RwLockReadGuard<'static, ()> {
    MAKING.read().unwrap_or_else(PoisonError::into_inner)
}

fn settled() -> RwLockWriteGuard<'static, ()> {
    MAKING.write().unwrap_or_else(PoisonError::into_inner)
}

/// How long [`settle`] waits for a disk.
const DISK: Duration = Duration::from_secs(60);

/// Waits until no write of this crate has a temporary name, and holds off all later ones: for a
/// process that is about to end, which would leave a write of another thread half made. A disk that
/// does not answer for a minute is not waited for.
pub fn settle() {
    let (settling, is_settled) = mpsc::channel();
    let wait = move || {
        std::mem::forget(settled());
        let _ = settling.send(());
    };
    // Without a thread to wait in, the process ends at once.
    if thread::Builder::new().spawn(wait).is_ok() {
        let _ = is_settled.recv_timeout(DISK);
    }
}

fn is_file(found: FileType) -> io::Result<()> {
    if found.is_file() {
        return Ok(());
    }
    let kind = if found.is_dir() {
        ErrorKind::IsADirectory
    } else {
        ErrorKind::InvalidInput
    };
    Err(io::Error::new(
        kind,
        format!("expected a file, found {}", name(found)),
    ))
}

/// Advice for an error of the operating system that is not about the disk; `None` where it may be.
pub fn advice(found: &io::Error) -> Option<&'static str> {
    match found.kind() {
        ErrorKind::OutOfMemory => {
            Some("is there memory left, and may this process take it (ulimit -v)?")
        }
        // Linux returns this when no further thread can start.
        ErrorKind::WouldBlock => {
            Some("is there memory and room for another thread (ulimit -v, ulimit -u)?")
        }
        ErrorKind::FileTooLarge => Some("may this process write files of that size (ulimit -f)?"),
        ErrorKind::InvalidInput | ErrorKind::IsADirectory => Some("move it away"),
        _ => None,
    }
}

/// The kind of a file, in words.
pub fn name(found: FileType) -> &'static str {
    if found.is_file() {
        "a file"
    } else if found.is_dir() {
        "a directory"
    } else if found.is_fifo() {
        "a named pipe"
    } else if found.is_socket() {
        "a socket"
    } else if found.is_char_device() {
        "a character device"
    } else if found.is_block_device() {
        "a block device"
    } else {
        "something else"
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, mkfifoat};

    use super::*;

    #[test]
    fn other_kinds_of_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let socket = dir.path().join("socket");
        let _listens = UnixListener::bind(&socket).unwrap();
        for (path, kind, found) in [
            (dir.path(), ErrorKind::IsADirectory, "a directory"),
            (&pipe, ErrorKind::InvalidInput, "a named pipe"),
            (&socket, ErrorKind::InvalidInput, "a socket"),
            (
                Path::new("/dev/null"),
                ErrorKind::InvalidInput,
                "a character device",
            ),
        ] {
            let errors = [
                read(path).unwrap_err(),
                open_with(OpenOptions::new().append(true).create(true), path).unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.kind(), kind);
                assert_eq!(error.to_string(), format!("expected a file, found {found}"));
            }
        }
    }

    #[test]
    fn try_dir_probes_the_nearest_existing_directory() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(try_dir(dir.path()), Ok(dir.path().to_owned()));
        assert_eq!(try_dir(&at("a/b")), Ok(dir.path().to_owned()));
        File::create_new(at("file")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("link")).unwrap();
        let file = at("file");
        for (path, found) in [
            (
                at("file"),
                format!("{} is a file, not a directory", file.display()),
            ),
            (
                at("file/a"),
                format!("{} is a file, not a directory", file.display()),
            ),
            (
                at("link"),
                format!(
                    "{}: No such file or directory (os error 2)",
                    at("link").display()
                ),
            ),
            (
                at(&"x".repeat(300)),
                "File name too long (os error 36)".to_owned(),
            ),
        ] {
            let expected = format!("{}: cannot be made: {found}", path.display());
            assert_eq!(try_dir(&path), Err(expected));
        }
        let error = try_dir(Path::new("/proc/1/x")).unwrap_err();
        assert!(
            error.starts_with("/proc/1: nothing can be made there: "),
            "{error}"
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn settled_waits_for_pending_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let settled = settled();
        std::thread::scope(|scope| {
            let write = scope.spawn(|| atomic::write_file(&path, &[b"text"]));
            let tried = scope.spawn(|| try_dir(dir.path()));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
            drop(settled);
            write.join().unwrap().unwrap();
            tried.join().unwrap().unwrap();
        });
        assert_eq!(atomic::names(dir.path()).unwrap(), ["file"]);
    }

    #[test]
    fn files_are_read_created_and_limited() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let mut made = open_with(OpenOptions::new().append(true).create(true), &path).unwrap();
        made.write_all(b"text").unwrap();
        assert_eq!(read_to_string(&path).unwrap(), "text");
        assert_eq!(read_at_most(&path, 4).unwrap(), b"text");
        let error = read_at_most(&path, 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "larger than the limit of 3 bytes");
        made.write_all(&[0xff]).unwrap();
        let error = read_to_string(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
