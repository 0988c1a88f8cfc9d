//! A mapped file whose changes are noticed. Rows are copied out of the map; headers and whole files
//! are read by position.

use std::fs::{File, Metadata};
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

use crate::DataError;
use crate::mapped::Mapped;

/// An open file of known length.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) path: PathBuf,
    file: File,
    /// `None` if it cannot be mapped; it is then read.
    mapped: Option<Mapped>,
    /// Length at the time of opening.
    pub(crate) bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Opened {
    /// Opens a regular file that is not empty.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = spd_files::open(path).map_err(DataError::io("open", path))?;
        let found = file.metadata().map_err(DataError::io("open", path))?;
        if found.len() == 0 {
            return Err(DataError::damaged(
                path,
                "is empty; was it still being written?",
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            mapped: Mapped::new(&file, found.len()),
            file,
            bytes: found.len(),
            modified: modified(&found),
        })
    }

    /// Metadata of the open file, whichever file its path names now.
    pub(crate) fn metadata(&self) -> Result<Metadata, DataError> {
        let found = self.file.metadata();
        found.map_err(DataError::io("stat", &self.path))
    }

    /// Fills `out` with the bytes from `start` on, which were inside the file when it was opened.
    ///
    /// # Errors
    ///
    /// When the file has become shorter, or the disk cannot read it.
    pub(crate) fn read(&self, start: u64, out: &mut [u8]) -> Result<(), DataError> {
        self.file.read_exact_at(out, start).map_err(|error| {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                return DataError::io("read", &self.path)(error);
            }
            let now = self.metadata().map_or(0, |found| found.len());
            self.shrunk(now)
        })
    }

    /// As [`Self::read`], through the map. The caller runs [`Opened::check_unchanged`] afterwards:
    /// after a cut, the last page continues with zeros.
    pub(crate) fn copy(&self, start: u64, out: &mut [u8]) -> Result<(), DataError> {
        match &self.mapped {
            Some(mapped) if mapped.copy(start, out) => Ok(()),
            // A read tells apart what the map cannot: a file that was cut, a disk that fails, a
            // server that is gone.
            _ => self.read(start, out),
        }
    }

    /// The bytes of a range, in pieces of at most [`PIECE_BYTES`].
    ///
    /// # Errors
    ///
    /// As [`Opened::read`], and the errors of `each`.
    pub(crate) fn read_pieces(
        &self,
        bytes: Range<u64>,
        mut each: impl FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut buffer = Vec::new();
        let mut start = bytes.start;
        while start < bytes.end {
            #[expect(clippy::cast_possible_truncation, reason = "at most a piece")]
            let piece = (bytes.end - start).min(PIECE_BYTES as u64) as usize;
            buffer.resize(piece, 0);
            self.read(start, &mut buffer)?;
            each(&buffer)?;
            start += piece as u64;
        }
        Ok(())
    }

    /// Asks the kernel to read a range ahead of time.
    pub(crate) fn will_need(&self, bytes: Range<u64>) {
        // Some network disks ignore this; the read then waits.
        match &self.mapped {
            Some(mapped) => mapped.will_need(&bytes),
            None => {
                let length = NonZero::new(bytes.end - bytes.start);
                let _ = fadvise(&self.file, bytes.start, length, Advice::WillNeed);
            }
        }
    }

    /// Checks that everything read so far came from the file as it was opened. A file that was
    /// replaced by renaming is still the open one.
    ///
    /// # Errors
    ///
    /// When the file was written to or cut.
    pub(crate) fn check_unchanged(&self) -> Result<(), DataError> {
        let now = self.metadata()?;
        if now.len() != self.bytes {
            return Err(self.shrunk(now.len()));
        }
        if modified(&now) != self.modified {
            return Err(DataError::damaged(
                &self.path,
                "was written to while it was read; restore it, and replace files in use by renaming, never \
                 in place",
            ));
        }
        Ok(())
    }

    fn shrunk(&self, now: u64) -> DataError {
        DataError::damaged(
            &self.path,
            format!(
                "had {} bytes when it was opened, has {now} now; restore it, and replace files in use by \
                 renaming, never in place",
                self.bytes
            ),
        )
    }
}

/// Bytes of one read of a long range. A multiple of the size of every stored number.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

fn modified(found: &Metadata) -> (i64, i64) {
    (found.mtime(), found.mtime_nsec())
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "tests make the files that others would leave"
)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = Opened::open(dir.path()).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{}: cannot open: expected a file, found a directory",
                dir.path().display()
            )
        );
    }

    #[test]
    fn a_file_that_is_cut_or_written_to_is_an_error_and_one_that_lost_its_name_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, [7; 3000]).unwrap();
        let opened = Opened::open(&path).unwrap();
        let mut out = [0; 2000];
        opened.read(1000, &mut out).unwrap();
        assert_eq!(out, [7; 2000]);
        std::fs::rename(&path, dir.path().join("y")).unwrap();
        opened.check_unchanged().unwrap();
        let place = path.display();
        let file = File::options()
            .write(true)
            .open(dir.path().join("y"))
            .unwrap();
        file.set_times(std::fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH))
            .unwrap();
        assert_eq!(
            opened.check_unchanged().unwrap_err().to_string(),
            format!(
                "{place}: was written to while it was read; restore it, and replace files in use by renaming, \
                 never in place"
            )
        );
        file.set_len(1500).unwrap();
        let shrunk = format!(
            "{place}: had 3000 bytes when it was opened, has 1500 now; restore it, and replace files in use \
             by renaming, never in place"
        );
        assert_eq!(opened.check_unchanged().unwrap_err().to_string(), shrunk);
        assert_eq!(opened.read(1000, &mut out).unwrap_err().to_string(), shrunk);
    }
}
