//! The lock file of a run directory, which its owner holds.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::{CheckpointError, atomic};

/// The exclusive right to write in a run directory, until it is dropped.
///
/// The kernel releases the lock when the process ends in any way: a leftover lock file means
/// nothing and need not be deleted.
#[derive(Debug)]
pub struct Lock {
    // Closing the file releases the lock.
    file: File,
}

/// The content of a lock file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holder {
    /// Whether the lock is held now, as far as the file system tells this machine.
    pub is_held: bool,
    /// The process id of the last holder, if recorded; it is valid on `host`, and may since have
    /// been reused.
    pub pid: Option<u32>,
    /// The host name of the last holder.
    pub host: Option<String>,
    /// The line written by [`Lock::leave`].
    pub word: Option<String>,
    /// Modification time: when the lock was taken or [`Lock::leave`] was called.
    pub written: Option<SystemTime>,
}

impl Lock {
    /// Takes the lock of the directory `dir`, which is created if missing; its parent must
    /// exist.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Held`] names the current holder. And when the disk refuses.
    pub fn take(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = loop {
            atomic::make_dir(dir)?;
            let mut file = spd_files::open_with(&mut options, &path).map_err(refused)?;
            // A process that only inspects the lock holds it for a moment.
            match spd_files::lock_within(GLANCE, || file.try_lock()) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let holder = holder(&mut file);
                    return Err(CheckpointError::Held { path, holder });
                }
                Err(TryLockError::Error(found)) => return Err(refused(found)),
            }
            // The directory may have been renamed, with its lock, while this waited.
            if spd_files::has_name(&file, &path).map_err(refused)? {
                break file;
            }
        };
        let text = format!("process {} on {}\n", std::process::id(), Self::host());
        file.set_len(0)
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(refused)?;
        Ok(Self { file })
    }

    /// Checks that the directory of this lock is still called `dir`. A disk that does not answer
    /// has not lost it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Gone`].
    pub fn check(&self, dir: &Path) -> Result<(), CheckpointError> {
        match spd_files::has_name(&self.file, &dir.join("lock")) {
            Ok(false) => Err(CheckpointError::Gone {
                path: dir.to_path_buf(),
            }),
            _ => Ok(()),
        }
    }

    /// Writes a line into the lock file, which stays until the next [`Lock::take`].
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn leave(&self, word: &str) -> io::Result<()> {
        let line = format!("{}\n", word.replace(['\n', '\r'], " "));
        (&self.file).write_all(line.as_bytes())
    }

    /// The current or last holder of the lock of `dir`; `None` if it was never taken. Writes
    /// nothing and does not wait.
    ///
    /// # Errors
    ///
    /// When the lock file cannot be read, or is not a regular file.
    pub fn holder(dir: &Path) -> Result<Option<Holder>, CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let Some(file) = spd_files::found(spd_files::open(&path)).map_err(refused)? else {
            return Ok(None);
        };
        let is_held = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(found)) => return Err(refused(found)),
        };
        let mut text = String::new();
        let read = (&file).take(LONGEST).read_to_string(&mut text);
        let _ = file.unlock();
        // Bytes that are not UTF-8 were not written by us.
        if let Err(found) = read
            && found.kind() != ErrorKind::InvalidData
        {
            return Err(refused(found));
        }
        let mut lines = text
            .split_inclusive('\n')
            .map_while(|line| line.strip_suffix('\n'));
        let named = lines
            .next()
            .and_then(|line| line.strip_prefix("process ")?.split_once(" on "));
        Ok(Some(Holder {
            is_held,
            pid: named.and_then(|(pid, _)| pid.parse().ok()),
            host: named.map(|(_, host)| host.to_owned()),
            word: lines.next().map(str::to_owned),
            written: file.metadata().and_then(|found| found.modified()).ok(),
        }))
    }

    /// The name of this machine, as in lock files.
    pub fn host() -> String {
        let system = rustix::system::uname();
        system.nodename().to_string_lossy().into_owned()
    }

    /// Checks that the lock of `dir` could be taken. Writes nothing. It waits a moment, since a
    /// killed process keeps its lock a little longer.
    ///
    /// # Errors
    ///
    /// As [`Self::take`].
    pub fn look(dir: &Path) -> Result<(), CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let Some(mut file) = spd_files::found(spd_files::open(&path)).map_err(refused)? else {
            return Ok(());
        };
        match spd_files::lock_within(spd_files::PATIENCE, || file.try_lock_shared()) {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                let holder = holder(&mut file);
                Err(CheckpointError::Held { path, holder })
            }
            Err(TryLockError::Error(found)) => Err(refused(found)),
        }
    }

    /// Removes and returns the unfinished files of earlier processes under `root`.
    ///
    /// `root` is in the locked directory: the lock ensures that no process is still writing them.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn sweep(&self, root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        atomic::sweep(root)
    }
}

/// The name of the lock's holder, which it writes right after taking the lock.
fn holder(file: &mut File) -> String {
    for _ in 0..LOOKS {
        let mut holder = String::new();
        let read = file
            .rewind()
            .and_then(|()| file.take(LONGEST).read_to_string(&mut holder));
        if read.is_ok()
            && let Some((name, _)) = holder.split_once('\n')
        {
            return name.trim().to_owned();
        }
        std::thread::sleep(LOOK_EVERY);
    }
    "another process".to_owned()
}

/// Time for which a process that inspects the lock may hold it, on a busy machine.
const GLANCE: Duration = Duration::from_millis(200);

/// Maximum bytes of a lock file that are read.
const LONGEST: u64 = 4 << 10;

/// Number and interval of the attempts to read the holder's name.
const LOOKS: usize = 50;
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_renamed_with_its_directory_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let (run, aside) = (folder.path().join("run"), folder.path().join("run.bad"));
        let old = Lock::take(&run).unwrap();
        let waits = std::thread::spawn({
            let run = run.clone();
            move || Lock::take(&run).unwrap()
        });
        old.check(&run).unwrap();
        // The thread may or may not have opened the file yet.
        std::fs::rename(&run, &aside).unwrap();
        let gone = old.check(&run).unwrap_err().to_string();
        assert!(gone.starts_with(&format!(
            "{}: the run directory was removed or renamed",
            run.display()
        )));
        old.check(&aside).unwrap();
        drop(old);
        let new = waits.join().unwrap();
        assert!(matches!(
            Lock::take(&run),
            Err(CheckpointError::Held { .. })
        ));
        drop(new);
        Lock::take(&aside).unwrap();
    }

    #[test]
    fn a_held_lock_names_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let lock = Lock::take(&run).unwrap();
        let error = Lock::take(&run).unwrap_err().to_string();
        assert_eq!(Lock::look(&run).unwrap_err().to_string(), error);
        let host = Lock::host();
        assert_eq!(
            error,
            format!(
                "{}: held by process {} on {host}; \
                 wait for it, stop it or choose another run directory",
                run.join("lock").display(),
                std::process::id(),
            )
        );
        drop(lock);
        Lock::look(&run).unwrap();
        Lock::take(&run).unwrap();
        let none = folder.path().join("none");
        Lock::look(&none).unwrap();
        assert!(!none.try_exists().unwrap());
    }

    #[test]
    fn the_last_holder_and_its_line_are_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Lock::holder(folder.path()).unwrap(), None);
        let seen = |word: Option<&str>, is_held| Holder {
            is_held,
            pid: Some(std::process::id()),
            host: Some(Lock::host()),
            word: word.map(str::to_owned),
            written: None,
        };
        let found = || Holder {
            written: None,
            ..Lock::holder(folder.path()).unwrap().unwrap()
        };
        let lock = Lock::take(folder.path()).unwrap();
        assert_eq!(found(), seen(None, true));
        lock.leave("stopped\nafter step 7").unwrap();
        let refused = Lock::take(folder.path()).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("on {};", Lock::host())),
            "{refused}"
        );
        drop(lock);
        assert_eq!(found(), seen(Some("stopped after step 7"), false));
        drop(Lock::take(folder.path()).unwrap());
        assert_eq!(found(), seen(None, false));
        atomic::write_file(&folder.path().join("lock"), b"\xff\x00no name").unwrap();
        assert_eq!(found(), Holder::default());
    }

    #[test]
    fn inspecting_a_lock_does_not_block_taking_it() {
        let folder = tempfile::tempdir().unwrap();
        drop(Lock::take(folder.path()).unwrap());
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    Lock::holder(folder.path()).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for _ in 0..200 {
                Lock::take(folder.path()).unwrap();
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn look_waits_for_a_holder_that_is_exiting() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::take(folder.path()).unwrap();
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| Lock::look(folder.path()));
            std::thread::sleep(20 * LOOK_EVERY);
            drop(lock);
            looks.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_holder_name_written_late_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let mut options = OpenOptions::new();
        let mut held = options.write(true).create_new(true).open(&path).unwrap();
        held.try_lock().unwrap();
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| Lock::take(folder.path()));
            std::thread::sleep(3 * LOOK_EVERY);
            held.write_all(b"process 7 on a host\n").unwrap();
            let error = taken.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("held by process 7 on a host;"), "{error}");
        });
    }

    #[test]
    fn unfinished_files_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join(".tmp-step-00000007/deep")).unwrap();
        std::fs::create_dir(root.join("step-00000006")).unwrap();
        atomic::write_file(&root.join(".tmp-file"), b"half").unwrap();
        let swept = Lock::take(root).unwrap().sweep(root).unwrap();
        assert_eq!(
            swept,
            [root.join(".tmp-file"), root.join(".tmp-step-00000007")]
        );
        assert_eq!(atomic::names(root).unwrap(), ["lock", "step-00000006"]);
    }
}
