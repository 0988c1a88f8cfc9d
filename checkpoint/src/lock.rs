//! Who owns a run directory: the process that holds its lock file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{CheckpointError, atomic};

/// The right to write in a run directory, for as long as the value lives.
///
/// The kernel gives the lock back when the process ends, however it ends: a lock file that lies there
/// means nothing by itself, and never has to be deleted by hand.
#[derive(Debug)]
pub struct Lock {
    // Closing the file gives the lock back.
    _file: File,
}

impl Lock {
    /// Takes the lock of the directory `dir`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Held`] names the process that has it. And when the disk refuses.
    pub fn take(dir: &Path) -> Result<Self, CheckpointError> {
        atomic::make_dir(dir)?;
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = spd_files::open_with(&mut options, &path).map_err(refused)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = holder(&mut file);
                return Err(CheckpointError::Held { path, holder });
            }
            Err(TryLockError::Error(found)) => return Err(refused(found)),
        }
        let system = rustix::system::uname();
        let text = format!(
            "process {} on {}\n",
            std::process::id(),
            system.nodename().to_string_lossy()
        );
        file.set_len(0)
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(refused)?;
        Ok(Self { _file: file })
    }

    /// Whether the lock of `dir` could be taken, as far as others go. Nothing is made or written. A process that was killed has it for a
    /// moment longer, so it is waited for.
    ///
    /// # Errors
    ///
    /// As [`Self::take`].
    pub fn look(dir: &Path) -> Result<(), CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let mut file = match spd_files::open(&path) {
            Ok(file) => file,
            Err(found) if found.kind() == ErrorKind::NotFound => return Ok(()),
            Err(found) => return Err(refused(found)),
        };
        match spd_files::lock_patiently(|| file.try_lock_shared()) {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                let holder = holder(&mut file);
                Err(CheckpointError::Held { path, holder })
            }
            Err(TryLockError::Error(found)) => Err(refused(found)),
        }
    }

    /// Removes what earlier processes began under `root` and never finished, and says what that was.
    ///
    /// `root` lies in the locked directory: it is the lock that makes sure nobody is still at it.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn sweep(&self, root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        atomic::sweep(root)
    }
}

/// Who has the lock: its name, which it writes as soon as it has it.
fn holder(file: &mut File) -> String {
    for _ in 0..LOOKS {
        let mut holder = String::new();
        let read = file
            .rewind()
            .and_then(|()| file.take(200).read_to_string(&mut holder));
        if read.is_ok() && holder.ends_with('\n') {
            return holder.trim().to_owned();
        }
        std::thread::sleep(LOOK_EVERY);
    }
    "another process".to_owned()
}

/// How often, and how far apart, a name is looked for that is not there yet.
const LOOKS: usize = 50;
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let lock = Lock::take(&run).unwrap();
        let error = Lock::take(&run).unwrap_err().to_string();
        assert_eq!(Lock::look(&run).unwrap_err().to_string(), error);
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
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
    fn who_is_about_to_go_is_waited_for() {
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
    fn a_name_that_is_written_a_moment_later_is_told() {
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
    fn what_was_never_finished_is_swept() {
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
