//! A file of whole lines, appended to by one process, whose errors never stop the caller.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

use spd_files::atomic;

use crate::error::SpoolError;
use crate::mark::{Mark, Prefix};

/// Most bytes of lines that wait for the disk, and so of a single line.
pub(crate) const MOST_WAITING: usize = 16 << 20;

/// Bytes that wait before they are written without a flush.
const BATCH: usize = 64 << 10;

/// The append side of one file.
pub(crate) struct Lines {
    path: PathBuf,
    file: File,
    /// The whole lines on disk.
    written: Prefix,
    /// The lines after them.
    waiting: Vec<u8>,
    /// Bytes of `waiting` that are in the file: part of a line after a short write.
    begun: usize,
    /// Lines that are lost.
    pub(crate) dropped: u64,
    trouble: Option<String>,
}

impl Lines {
    /// Opens a file after its last whole line. A torn line of a killed process is cut.
    pub(crate) fn open(path: &Path) -> Result<Self, SpoolError> {
        let failed = |found| SpoolError::io(path, "open", found);
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        let file = spd_files::open_with(&mut options, path).map_err(failed)?;
        let written = Prefix::of(BufReader::new(&file), u64::MAX).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() > written.offset {
            drop(file);
            cut(path, written.offset)?;
            return Self::open(path);
        }
        atomic::sync_name(path).map_err(failed)?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            written,
            waiting: Vec::new(),
            begun: 0,
            dropped: 0,
            trouble: None,
        })
    }

    /// Opens a file at the offset of a mark that [holds](holds) for it; the lines after it are cut.
    pub(crate) fn open_at(path: &Path, offset: u64) -> Result<Self, SpoolError> {
        let lines = Self::open(path)?;
        if lines.written.offset == offset {
            return Ok(lines);
        }
        drop(lines);
        cut(path, offset)?;
        Self::open(path)
    }

    /// Adds a line; returns whether memory had room for it.
    pub(crate) fn append(&mut self, line: &[u8]) -> bool {
        if self.waiting.len() + line.len() > MOST_WAITING {
            self.flush();
        }
        if self.waiting.len() + line.len() > MOST_WAITING {
            self.dropped += 1;
            return false;
        }
        self.waiting.extend_from_slice(line);
        if self.waiting.len() >= BATCH {
            self.flush();
        }
        true
    }

    /// Opens a file and cuts all of its lines.
    pub(crate) fn open_empty(path: &Path) -> Result<Self, SpoolError> {
        cut(path, 0)?;
        Self::open(path)
    }

    /// Writes the waiting lines. Lines that cannot be written keep waiting.
    pub(crate) fn flush(&mut self) {
        let outcome = self.write();
        let end = self.waiting[..self.begun]
            .iter()
            .rposition(|&byte| byte == b'\n');
        let whole = end.map_or(0, |end| end + 1);
        self.written.push(&self.waiting[..whole]);
        self.waiting.drain(..whole);
        self.begun -= whole;
        self.trouble = outcome.err().map(|found| format!("cannot append: {found}"));
    }

    fn write(&mut self) -> io::Result<()> {
        while self.begun < self.waiting.len() {
            match self.file.write(&self.waiting[self.begun..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => self.begun += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes the waiting lines and syncs the file.
    pub(crate) fn sync(&mut self) {
        self.flush();
        if let Err(found) = self.file.sync_data() {
            self.trouble
                .get_or_insert_with(|| format!("cannot sync: {found}"));
        }
    }

    pub(crate) fn mark(&self) -> Mark {
        self.written.mark()
    }

    /// Bytes of the whole lines on disk.
    pub(crate) fn offset(&self) -> u64 {
        self.written.offset
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.as_ref()?;
        let (path, waiting, dropped) = (self.path.display(), self.waiting.len(), self.dropped);
        Some(format!(
            "{path}: {trouble}; {waiting} bytes of rows wait and are tried again, \
             {dropped} rows are lost; free some space"
        ))
    }
}

/// Cuts the lines past an offset.
fn cut(path: &Path, offset: u64) -> Result<(), SpoolError> {
    atomic::cut_file(path, offset)
        .map_err(|found| SpoolError::io(path, "cut the rows past the checkpoint", found))
}

/// Keeps a copy of a damaged file, and returns its path.
pub(crate) fn keep_aside(path: &Path, bytes: &[u8]) -> Result<PathBuf, SpoolError> {
    let kept = atomic::aside(path).and_then(|aside| {
        atomic::write_file(&aside, &[bytes])?;
        Ok(aside)
    });
    kept.map_err(|found| SpoolError::io(path, "keep a copy of it", found))
}

/// Whether a file begins with the lines of a mark.
pub(crate) fn holds(path: &Path, mark: &Mark) -> Result<bool, SpoolError> {
    if mark.offset == 0 {
        return Ok(true);
    }
    let prefix = match spd_files::open(path) {
        Err(found) if found.kind() == ErrorKind::NotFound => return Ok(false),
        opened => opened.and_then(|file| Prefix::of(BufReader::new(file), mark.offset)),
    };
    let prefix = prefix.map_err(|found| SpoolError::io(path, "read", found))?;
    Ok(prefix.mark() == *mark)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn full() -> File {
        OpenOptions::new().write(true).open("/dev/full").unwrap()
    }

    #[test]
    fn a_full_disk_keeps_the_rows_waiting_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let mut lines = Lines::open(&path).unwrap();
        lines.append(b"first\n");
        lines.flush();
        assert_eq!(lines.trouble(), None);

        let disk = std::mem::replace(&mut lines.file, full());
        lines.append(b"second\n");
        lines.flush();
        lines.append(b"third\n");
        lines.flush();
        assert_eq!(
            lines.trouble().unwrap(),
            format!(
                "{}: cannot append: No space left on device (os error 28); \
                 13 bytes of rows wait and are tried again, 0 rows are lost; free some space",
                path.display()
            )
        );
        assert_eq!(lines.offset(), 6);

        lines.file = disk;
        lines.flush();
        assert_eq!(
            (lines.trouble(), lines.offset(), lines.dropped),
            (None, 19, 0)
        );
        assert_eq!(fs::read(&path).unwrap(), b"first\nsecond\nthird\n");
        assert_eq!(lines.mark(), Lines::open(&path).unwrap().mark());
    }

    #[test]
    fn waiting_lines_are_bounded_and_lost_lines_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut lines = Lines::open(&folder.path().join("a.jsonl")).unwrap();
        let disk = std::mem::replace(&mut lines.file, full());
        let line = [vec![b'x'; (1 << 20) - 1], vec![b'\n']].concat();
        for _ in 0..20 {
            lines.append(&line);
        }
        assert_eq!((lines.waiting.len(), lines.dropped), (MOST_WAITING, 4));
        assert!(lines.trouble().unwrap().contains("4 rows are lost"));

        lines.file = disk;
        lines.append(b"again\n");
        lines.flush();
        assert_eq!(
            (lines.offset(), lines.dropped),
            (MOST_WAITING as u64 + 6, 4)
        );
    }

    // The socket takes the bytes that fit into its buffer and then refuses: every write is cut
    // short.
    #[test]
    fn a_write_cut_short_is_finished_where_it_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let mut lines = Lines::open(&folder.path().join("a.jsonl")).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        lines.file = File::from(OwnedFd::from(ours));

        let mut sent = Vec::new();
        for number in 0..200_000 {
            let line = format!("{{\"number\":{number}}}\n");
            lines.append(line.as_bytes());
            sent.extend_from_slice(line.as_bytes());
        }
        let mut received = Vec::new();
        let mut short = 0;
        while received.len() < sent.len() {
            let whole = usize::try_from(lines.offset()).unwrap();
            assert!(whole == 0 || sent[whole - 1] == b'\n');
            short += usize::from(lines.begun > 0);
            // A socket that does not block ends its data with an error.
            let _ = theirs.read_to_end(&mut received);
            lines.flush();
        }
        assert!(received == sent);
        assert!(short > 0, "no write was cut short");
        assert_eq!(
            lines.mark(),
            Prefix::of(sent.as_slice(), u64::MAX).unwrap().mark()
        );
    }

    #[test]
    fn a_torn_line_is_cut_wherever_it_was_torn() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        for torn in 0..8 {
            let mut lines = Lines::open(&path).unwrap();
            lines
                .file
                .write_all(&b"whole 1\nwhole 2\n"[..8 + torn])
                .unwrap();
            drop(lines);
            let mut lines = Lines::open(&path).unwrap();
            assert_eq!(
                (lines.offset(), fs::read(&path).unwrap()),
                (8, b"whole 1\n".to_vec())
            );
            lines.append(b"next\n");
            lines.flush();
            assert_eq!(fs::read(&path).unwrap(), b"whole 1\nnext\n");
            fs::remove_file(&path).unwrap();
        }
    }
}
