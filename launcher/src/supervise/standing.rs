//! Detects that the run directory was removed or renamed. Ranks would go on writing to their open
//! files, which nobody can see.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use spd_checkpoint::CheckpointError;

use crate::threads;

/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(500);

/// Checks a directory until it is dropped. The checks have their own thread, since a disk may hang.
pub(crate) struct Standing {
    dir: PathBuf,
    first: Arc<File>,
    is_gone: Arc<AtomicBool>,
    /// Dropping it ends the thread.
    _over: Sender<()>,
}

impl Standing {
    /// Starts checking the directory that has this path now.
    ///
    /// # Errors
    ///
    /// When it cannot be examined, or the thread cannot start.
    pub(crate) fn of(dir: &Path) -> io::Result<Self> {
        // Held open, so that no other directory gets its inode number.
        let first = Arc::new(File::open(dir)?);
        let (over, ends) = channel::<()>();
        let is_gone = Arc::new(AtomicBool::new(false));
        let (place, flag) = (dir.to_owned(), Arc::clone(&is_gone));
        let held = Arc::clone(&first);
        threads::spawn("standing", move || {
            while ends.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if has_gone(&held, &place) {
                    return flag.store(true, Ordering::Relaxed);
                }
            }
        })?;
        Ok(Self {
            dir: dir.to_owned(),
            first,
            is_gone,
            _over: over,
        })
    }

    /// The message once the directory is gone.
    pub(crate) fn lost(&self) -> Option<String> {
        (self.is_gone.load(Ordering::Relaxed)).then(|| {
            let path = self.dir.clone();
            CheckpointError::Gone { path }.to_string()
        })
    }

    /// Looks at once.
    pub(crate) fn look(&self) {
        if has_gone(&self.first, &self.dir) {
            self.is_gone.store(true, Ordering::Relaxed);
        }
    }
}

/// Whether another directory, or none, has the name. Errors of a failing disk do not count as a
/// removal.
fn has_gone(first: &File, dir: &Path) -> bool {
    spd_files::has_name(first, dir).is_ok_and(|has| !has)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::thread;

    use super::*;

    fn lost(standing: &Standing) -> String {
        loop {
            if let Some(line) = standing.lost() {
                return line;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_directory_that_is_removed_renamed_or_replaced_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, other) = (folder.path().join("x"), folder.path().join("y"));
        for leave in [
            |dir: &Path, _: &Path| fs::remove_dir(dir),
            |dir: &Path, other: &Path| fs::rename(dir, other),
            |dir: &Path, other: &Path| fs::rename(other, dir),
            // File systems reuse a free inode number for the next directory.
            |dir: &Path, _: &Path| fs::remove_dir(dir).and_then(|()| fs::create_dir(dir)),
        ] {
            fs::create_dir(&dir).unwrap();
            let standing = Standing::of(&dir).unwrap();
            assert_eq!(standing.lost(), None);
            leave(&dir, &other).unwrap();
            assert!(
                lost(&standing).starts_with(&format!("{}: the run directory was ", dir.display()))
            );
            let _ = fs::remove_dir(&dir);
        }
        assert_eq!(
            Standing::of(&dir).err().unwrap().kind(),
            ErrorKind::NotFound
        );
    }
}
