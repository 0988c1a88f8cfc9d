//! Whether a run directory still has its name. Ranks go on writing to the files that they have open when the directory is removed, and
//! nobody ever sees what they write.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use spd_checkpoint::CheckpointError;

use crate::threads;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// Looks after a directory for as long as it lives. A thread of its own looks, as a disk may not answer.
pub(crate) struct Standing {
    dir: PathBuf,
    first: Arc<File>,
    is_gone: Arc<AtomicBool>,
    /// The thread ends with it.
    _over: Sender<()>,
}

impl Standing {
    /// Begins to look after the directory that stands there now.
    ///
    /// # Errors
    ///
    /// When it cannot be looked at, or no thread can be had.
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

    /// The line to say once the directory is gone.
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

/// A disk that does not answer has not lost it.
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
            // File systems give a number that is free to the next directory.
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
