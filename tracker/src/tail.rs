//! The end of a spool file, read without the rest: a run of days has hundreds of megabytes of rows.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::ReadError;
use crate::files::METRICS;
use crate::lines::MOST_WAITING;
use crate::mark::{Mark, Prefix};
use crate::reader::Cursor;
use crate::row::Row;
use crate::starts::Start;

/// Bytes of one read.
const CHUNK: u64 = 16 << 10;

/// Bytes of the end that [`LastRows`] reads: more than any usual row, and quickly read.
const MOST: u64 = 2 << 20;

/// The rows in the last two megabytes of a spool file, the last one first.
///
/// A line without its end is ignored. A line that is not a row is an error of the kind
/// [`ErrorKind::InvalidData`], and is skipped.
#[derive(Debug)]
pub struct LastRows {
    lines: LastLines,
    left: u64,
}

impl LastRows {
    /// The rows of a file; none if it does not exist.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, or is not a file.
    pub fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            lines: LastLines::of(path)?,
            left: MOST,
        })
    }
}

impl Iterator for LastRows {
    type Item = io::Result<Row>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.lines.next(self.left) {
            Ok(None) => None,
            Ok(Some(line)) => {
                self.left = self.left.saturating_sub(line.len() as u64 + 1);
                let row = Row::parse(&line);
                Some(row.map_err(|why| io::Error::new(ErrorKind::InvalidData, why)))
            }
            Err(found) => {
                // Every further call returns the same error.
                self.left = 0;
                Some(Err(found))
            }
        }
    }
}

impl Cursor {
    /// The place before the last few rows of the metrics of the run in `dir`.
    ///
    /// # Errors
    ///
    /// When a file exists and cannot be read.
    pub fn before_last(dir: &Path, rows: usize) -> Result<Self, ReadError> {
        // Before the rows, so that a cut in between is noticed.
        let starts = Start::all(dir).map_err(|found| ReadError::Starts { found })?;
        Ok(Self {
            generation: starts.last().map_or(0, |start| start.generation),
            mark: Mark::before_last(&dir.join(METRICS), rows)?,
        })
    }
}

impl Mark {
    /// The place before the last few lines of a spool file.
    ///
    /// # Errors
    ///
    /// When the file exists and cannot be read.
    pub fn before_last(path: &Path, rows: usize) -> Result<Self, ReadError> {
        let refused = |found| ReadError::Io {
            path: path.to_path_buf(),
            found,
        };
        let mut lines = LastLines::of(path).map_err(refused)?;
        for _ in 0..rows {
            if lines
                .next(MOST_WAITING as u64 + 1)
                .map_err(refused)?
                .is_none()
            {
                return Ok(Self::default());
            }
        }
        let offset = lines.offset();
        match lines.file {
            Some(file) => {
                let prefix = Prefix::of(BufReader::new(file), offset).map_err(refused)?;
                Ok(prefix.mark())
            }
            None => Ok(Self::default()),
        }
    }
}

/// Whole lines from the last to the first.
#[derive(Debug)]
struct LastLines {
    file: Option<File>,
    /// Bytes of the file from `begin` on, without the lines that were returned.
    buffer: Vec<u8>,
    begin: u64,
    /// The unfinished last line is cut from the buffer.
    is_whole: bool,
}

impl LastLines {
    fn of(path: &Path) -> io::Result<Self> {
        let file = spd_files::found(spd_files::open(path))?;
        let begin = match &file {
            Some(file) => file.metadata()?.len(),
            None => 0,
        };
        Ok(Self {
            file,
            buffer: Vec::new(),
            begin,
            is_whole: false,
        })
    }

    /// The line before, without its end; `None` at the beginning of the file, or if it is longer
    /// than about `most` bytes.
    fn next(&mut self, most: u64) -> io::Result<Option<Vec<u8>>> {
        let newline = |bytes: &[u8]| bytes.iter().rposition(|&byte| byte == b'\n');
        while !self.is_whole {
            if let Some(at) = newline(&self.buffer) {
                self.buffer.truncate(at + 1);
                self.is_whole = true;
            } else if !self.more(most)? {
                return Ok(None);
            }
        }
        loop {
            let last = self.buffer.len().saturating_sub(1);
            if let Some(at) = newline(&self.buffer[..last]) {
                let mut line = self.buffer.split_off(at + 1);
                line.pop();
                return Ok(Some(line));
            }
            if self.more(most)? {
                continue;
            }
            if self.begin > 0 || self.buffer.is_empty() {
                return Ok(None);
            }
            let mut line = std::mem::take(&mut self.buffer);
            line.pop();
            return Ok(Some(line));
        }
    }

    /// The end of the lines that are still to be returned.
    fn offset(&self) -> u64 {
        self.begin + self.buffer.len() as u64
    }

    /// Reads more of the file in front of the buffer. Returns false at the beginning of the file,
    /// or if the buffer has `most` bytes.
    fn more(&mut self, most: u64) -> io::Result<bool> {
        let held = self.buffer.len() as u64;
        let bytes = CHUNK.max(held).min(self.begin);
        let Some(file) = self.file.as_ref().filter(|_| bytes > 0 && held < most) else {
            return Ok(false);
        };
        let mut chunk = vec![0; usize::try_from(bytes).unwrap_or_default()];
        file.read_exact_at(&mut chunk, self.begin - bytes)?;
        self.begin -= bytes;
        chunk.append(&mut self.buffer);
        self.buffer = chunk;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Read, Reader, Spool};

    fn row(step: u64, note: &str) -> Row {
        Row::new(step, Kind::Train).with_note(note)
    }

    /// A file of rows of different lengths, and its contents.
    fn file(rows: &[Row]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines: Vec<Vec<u8>> = rows.iter().map(Row::line).collect();
        let pieces: Vec<&[u8]> = lines.iter().map(Vec::as_slice).collect();
        spd_files::atomic::write_file(file.path(), &pieces).unwrap();
        file
    }

    #[test]
    fn rows_come_from_the_last_to_the_first_however_long_they_are() {
        for length in [0, 10, 5000, 20_000, 70_000] {
            let rows: Vec<Row> = (0..20).map(|step| row(step, &"x".repeat(length))).collect();
            let file = file(&rows);
            let found: Result<Vec<Row>, _> = LastRows::of(file.path()).unwrap().collect();
            let mut found = found.unwrap();
            found.reverse();
            assert_eq!(found, rows, "{length}");
        }
    }

    #[test]
    fn an_incomplete_line_is_not_read_and_junk_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        assert_eq!(LastRows::of(&path).unwrap().count(), 0);
        let write = |text: &[u8]| spd_files::atomic::write_file(&path, &[text]).unwrap();
        write(b"");
        assert_eq!(LastRows::of(&path).unwrap().count(), 0);
        write(b"{\"step\":1,\"kind\":\"train\"}");
        assert_eq!(LastRows::of(&path).unwrap().count(), 0);
        write(b"{\"step\":1,\"kind\":\"train\"}\n\njunk\n{\"step\":2");
        let found: Vec<_> = LastRows::of(&path).unwrap().collect();
        let steps: Vec<_> = found
            .iter()
            .map(|row| row.as_ref().ok().map(|row| row.step))
            .collect();
        assert_eq!(steps, [None, None, Some(1)]);
        assert_eq!(
            found[0].as_ref().unwrap_err().kind(),
            ErrorKind::InvalidData
        );
        // A file that is no spool is given up quickly.
        write(&vec![b'x'; 5 << 20]);
        assert_eq!(LastRows::of(&path).unwrap().count(), 0);
        assert_eq!(Mark::before_last(&path, 1).unwrap(), Mark::default());
    }

    #[test]
    fn a_reader_may_begin_a_few_rows_before_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
        (0..9).for_each(|step| spool.append(row(step, "")));
        spool.sync().unwrap();
        for (rows, first) in [(3, Some(6)), (0, None), (9, Some(0)), (usize::MAX, Some(0))] {
            let cursor = Cursor::before_last(dir.path(), rows).unwrap();
            let mut reader = Reader::of_metrics(dir.path(), &cursor).unwrap();
            let found = reader.next().unwrap().map(|read| match read {
                Read::Row { row, time } => {
                    assert!(time > 1e9);
                    row.step
                }
                Read::RolledBack(_) => panic!("nothing was"),
            });
            assert_eq!(found, first, "{rows}");
        }
    }
}
