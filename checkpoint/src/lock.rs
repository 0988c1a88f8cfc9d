//! Who owns a run directory: the process that holds its lock file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::{CheckpointError, atomic};

/// The right to write in a run directory, for as long as the value lives.
///
/// The kernel gives the lock back when the process ends, however it ends: a lock file that lies there
/// means nothing by itself, and never has to be deleted by hand.
#[derive(Debug)]
pub struct Lock {
    // Closing the file gives the lock back.
    file: File,
}

/// What a lock file says of the process that took it last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holder {
    /// Whether it has the lock now, as far as the file system tells this machine.
    pub is_held: bool,
    /// Its process id, where the file says one: on `host`, and maybe another process's by now.
    pub pid: Option<u32>,
    /// The name of its machine.
    pub host: Option<String>,
    /// What it left behind by [`Lock::leave`].
    pub word: Option<String>,
    /// When the file was written last: when the lock was taken, or the word left.
    pub written: Option<SystemTime>,
}

impl Lock {
    /// Takes the lock of the directory `dir`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Held`] names the process that has it. And when the disk refuses.
    pub fn take(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = loop {
            atomic::make_dir(dir)?;
            let mut file = spd_files::open_with(&mut options, &path).map_err(refused)?;
            // A process that looks whether somebody has the lock has it for a moment.
            match spd_files::lock_within(GLANCE, || file.try_lock()) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let holder = holder(&mut file);
                    return Err(CheckpointError::Held { path, holder });
                }
                Err(TryLockError::Error(found)) => return Err(refused(found)),
            }
            // The directory may have lost its name, and the lock with it, while it was waited for.
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

    /// Checks that the directory of this lock is still called `dir`. A disk that does not answer has not lost it.
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

    /// Leaves a line in the lock file for whoever reads it later, until somebody takes the lock again.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn leave(&self, word: &str) -> io::Result<()> {
        let line = format!("{}\n", word.replace(['\n', '\r'], " "));
        (&self.file).write_all(line.as_bytes())
    }

    /// Who has the lock of `dir`, or had it last; nothing where nobody ever took it. Nothing is written, and nobody is waited for.
    ///
    /// # Errors
    ///
    /// When the lock file cannot be read, or what has its place is no file.
    pub fn holder(dir: &Path) -> Result<Option<Holder>, CheckpointError> {
        let path = dir.join("lock");
        let refused = |found| CheckpointError::lock(&path, found);
        let file = match spd_files::open(&path) {
            Ok(file) => file,
            Err(found) if found.kind() == ErrorKind::NotFound => return Ok(None),
            Err(found) => return Err(refused(found)),
        };
        let is_held = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(found)) => return Err(refused(found)),
        };
        let mut text = String::new();
        let read = (&file).take(LONGEST).read_to_string(&mut text);
        let _ = file.unlock();
        // What is no text is no word of ours.
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

    /// The name of this machine, as lock files have it.
    pub fn host() -> String {
        let system = rustix::system::uname();
        system.nodename().to_string_lossy().into_owned()
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

/// How long somebody has the lock who only looks at it, on a busy machine.
const GLANCE: Duration = Duration::from_millis(200);

/// Bytes of a lock file that are read.
const LONGEST: u64 = 4 << 10;

/// How often, and how far apart, a name is looked for that is not there yet.
const LOOKS: usize = 50;
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_was_moved_away_with_its_directory_is_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let (run, aside) = (folder.path().join("run"), folder.path().join("run.bad"));
        let old = Lock::take(&run).unwrap();
        let waits = std::thread::spawn({
            let run = run.clone();
            move || Lock::take(&run).unwrap()
        });
        old.check(&run).unwrap();
        // Whether it has opened the file yet or not.
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
    fn the_second_is_told_who_holds_it() {
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
    fn who_had_it_last_is_known_with_what_it_left_behind() {
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
    fn who_looks_is_in_nobodys_way() {
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
