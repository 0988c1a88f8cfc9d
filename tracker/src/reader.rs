//! The read side: rows by offset, while they are being written.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spd_files::{found, open};

use crate::error::{ReadError, SpoolError};
use crate::files::METRICS;
use crate::lines::MOST_WAITING;
use crate::mark::{Mark, Prefix};
use crate::row::Row;
use crate::starts::{STARTS, Start};
use crate::times::{TIMES, time_of};

/// Bytes of one read.
const CHUNK: usize = 64 << 10;

/// A result of a reader.
#[derive(Debug, Clone, PartialEq)]
pub enum Read {
    /// The next row.
    Row {
        /// The row.
        row: Row,
        /// The time at which it was first made, in seconds since 1970; 0 if that is unknown.
        time: f64,
    },
    /// The run resumed from a checkpoint and then made other rows. Rows from that place on are
    /// void, and the next row is the one there. Rows that were made again with the same bytes are
    /// not void, and not reported.
    RolledBack(Start),
}

/// The place of a reader: a start of the run, and the rows that were read. The default is the
/// beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The newest start that the reader knows.
    pub generation: u64,
    /// The place after the rows that were read.
    pub mark: Mark,
}

/// Follows one spool file, which need not exist yet.
pub struct Reader {
    path: PathBuf,
    file: Option<File>,
    /// The lines that were returned.
    done: Prefix,
    /// Bytes of the file from `done.offset` on; those before `begin` are done too.
    buffer: Vec<u8>,
    begin: usize,
    /// The lines that were returned, while it is unknown whether the file still begins with them.
    unproven: Option<Mark>,
    /// Only for metrics.
    metrics: Option<Metrics>,
}

/// Times and starts of metrics.
struct Metrics {
    dir: PathBuf,
    times: Option<File>,
    /// The inode and the length of the known `starts.jsonl`.
    starts: (u64, u64),
    run: Option<String>,
    /// The newest start that is known.
    generation: u64,
    /// The newest start after which the returned rows are known to hold.
    proven: u64,
    /// The start that kept the fewest rows, of those between the two.
    kept: Option<Start>,
    /// Starts between the two that kept rows of a damaged file.
    mended: Vec<Start>,
    /// The directory now holds another run.
    is_other: bool,
}

impl Reader {
    /// Follows the metrics of the run in `dir` from a cursor of an earlier reader.
    ///
    /// # Errors
    ///
    /// When a file exists and cannot be read.
    pub fn of_metrics(dir: &Path, cursor: &Cursor) -> Result<Self, ReadError> {
        let mut reader = Self::open(&dir.join(METRICS), &cursor.mark)?;
        reader.metrics = Some(Metrics {
            dir: dir.to_path_buf(),
            times: None,
            starts: (0, 0),
            run: None,
            generation: cursor.generation,
            proven: cursor.generation,
            kept: None,
            mended: Vec::new(),
            is_other: false,
        });
        reader.look_at_starts()?;
        Ok(reader)
    }

    /// Follows a file of rows that only grows, such as `system.jsonl`, from a mark of an earlier
    /// reader. The time of a row is its value `time`.
    ///
    /// # Errors
    ///
    /// When the file exists and cannot be read.
    pub fn open(path: &Path, mark: &Mark) -> Result<Self, ReadError> {
        let mut reader = Self {
            path: path.to_path_buf(),
            file: None,
            done: Prefix::default(),
            buffer: Vec::new(),
            begin: 0,
            unproven: Some(mark.clone()).filter(|mark| mark.offset > 0),
            metrics: None,
        };
        reader.reopen().map_err(|found| reader.refused(found))?;
        Ok(reader)
    }

    /// The next row, or `None` if there is none yet.
    ///
    /// # Errors
    ///
    /// When the line is not a row, or a file cannot be read. The reader may be called again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator that ends must not go on, this does"
    )]
    pub fn next(&mut self) -> Result<Option<Read>, ReadError> {
        let mut searched = self.begin;
        loop {
            let end = self.buffer[searched..]
                .iter()
                .position(|&byte| byte == b'\n');
            if let Some(length) = end {
                return self.take_line(searched + length + 1);
            }
            if self.buffer.len() - self.begin > MOST_WAITING {
                return Err(ReadError::Endless {
                    path: self.path.clone(),
                    line: self.done.lines + 1,
                    longest: MOST_WAITING,
                });
            }
            self.buffer.drain(..self.begin);
            self.begin = 0;
            searched = self.buffer.len();
            match self.more()? {
                More::Bytes => searched = searched.min(self.buffer.len()),
                More::Nothing => return Ok(None),
                More::Back(start) => return Ok(Some(Read::RolledBack(start))),
            }
        }
    }

    /// The place to continue after a restart: after the last row that was returned, junk included.
    pub fn cursor(&self) -> Cursor {
        let metrics = self.metrics.as_ref();
        Cursor {
            generation: metrics.map_or(0, |metrics| metrics.proven),
            mark: self.mark(),
        }
    }

    /// The place after the last row that was returned.
    pub fn mark(&self) -> Mark {
        let unproven = self.unproven.clone();
        unproven.unwrap_or_else(|| self.done.mark())
    }

    /// Whether the file is known to begin with the rows that were returned. After the run resumed
    /// from a checkpoint, this is unknown until it has made as many rows again.
    pub fn is_proven(&self) -> bool {
        self.unproven.is_none()
    }

    /// The start that the run resumed from, while it makes the rows after it again and it is
    /// unknown whether the returned rows hold. A reader that only shows rows need not wait for
    /// that, and reads again from there.
    pub fn went_back(&self) -> Option<&Start> {
        self.metrics.as_ref()?.kept.as_ref()
    }

    /// Bytes that were returned.
    fn offset(&self) -> u64 {
        let unproven = self.unproven.as_ref();
        unproven.map_or(self.done.offset, |mark| mark.offset)
    }

    /// Marks it as unknown whether the file still begins with the returned rows.
    fn doubt(&mut self) {
        self.unproven = Some(self.mark()).filter(|mark| mark.offset > 0);
    }

    fn take_line(&mut self, end: usize) -> Result<Option<Read>, ReadError> {
        let line = &self.buffer[self.begin..end];
        let row = Row::parse(&line[..line.len() - 1]);
        let time = match &row {
            Ok(row) => match &mut self.metrics {
                Some(metrics) => match metrics.time_of(self.done.lines) {
                    Ok(Some(time)) => time,
                    Ok(None) => return Ok(None),
                    Err(found) => return Err(self.refused(found)),
                },
                None => row.number("time").unwrap_or(0.0),
            },
            Err(_) => 0.0,
        };
        self.done.push(line);
        self.begin = end;
        let junk = |reason| ReadError::Junk {
            path: self.path.clone(),
            line: self.done.lines,
            reason,
        };
        row.map(|row| Some(Read::Row { row, time })).map_err(junk)
    }

    /// Reads more bytes into the buffer, if there are more that hold.
    fn more(&mut self) -> Result<More, ReadError> {
        if let Some(mark) = self.unproven.clone()
            && let Some(answer) = self.prove(&mark)?
        {
            return Ok(answer);
        }
        let read = self.fill().map_err(|found| self.refused(found))?;
        // After the bytes, since those of a file that was cut meanwhile do not count.
        if self.look_at_starts()? {
            return Ok(More::Bytes);
        }
        if read > 0 {
            return Ok(More::Bytes);
        }
        let is_new = self
            .is_another_file()
            .map_err(|found| self.refused(found))?;
        if is_new {
            self.reopen().map_err(|found| self.refused(found))?;
            return Ok(More::Bytes);
        }
        Ok(More::Nothing)
    }

    /// Adds the bytes of the file after the buffer; returns their number.
    fn fill(&mut self) -> io::Result<usize> {
        let Some(file) = &self.file else { return Ok(0) };
        let held = self.buffer.len();
        self.buffer.resize(held + CHUNK, 0);
        let read = loop {
            match file.read_at(&mut self.buffer[held..], self.done.offset + held as u64) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        self.buffer.truncate(held + *read.as_ref().unwrap_or(&0));
        read
    }

    /// Looks for new starts of the run. After one, rows that were not returned yet are read again.
    fn look_at_starts(&mut self) -> Result<bool, ReadError> {
        let offset = self.offset();
        let Some(metrics) = &mut self.metrics else {
            return Ok(false);
        };
        let is_new = metrics.look_at_starts();
        let Some(starts) = is_new.map_err(|found| ReadError::Starts { found })? else {
            return Ok(false);
        };
        let mut place = metrics.place(offset);
        for start in starts {
            if start.mended.is_some() {
                place = start.place(place);
                metrics.mended.push(start.clone());
                metrics.times = None;
            }
            let fewer = |known: &Start| known.offset <= start.offset;
            if start.offset < place && !metrics.kept.as_ref().is_some_and(fewer) {
                metrics.kept = Some(start);
            }
        }
        if offset == 0 {
            metrics.mended.clear();
        }
        if metrics.mended.is_empty() && metrics.kept.is_none() {
            metrics.proven = metrics.generation;
        }
        self.doubt();
        self.reopen().map_err(|found| self.refused(found))?;
        Ok(true)
    }

    /// Checks whether the file still begins with the returned rows, if that is unknown. Waits while
    /// rows are being made again.
    fn prove(&mut self, mark: &Mark) -> Result<Option<More>, ReadError> {
        let Some(file) = &self.file else {
            return Ok(Some(self.wait()));
        };
        let there = file.metadata().map_err(|found| self.refused(found))?.len();
        let metrics = self.metrics.as_ref();
        let is_other = metrics.is_none_or(|metrics| metrics.is_other);
        let place = metrics.map_or(mark.offset, |metrics| metrics.place(mark.offset));
        // A damaged file cannot be compared with its former self: the rows that were read stay.
        let is_mended = metrics.is_some_and(|metrics| !metrics.mended.is_empty());
        if there < place && !is_other {
            return Ok(Some(self.wait()));
        }
        let prefix = |limit| Prefix::of(from_start(file)?, limit);
        let same = prefix(place).map_err(|found| self.refused(found))?;
        let kept = self.metrics.as_mut().and_then(Metrics::proven);
        if is_mended || same.mark() == *mark {
            (self.done, self.unproven) = (same, None);
            return Ok(None);
        }
        // Without a start that gives the place, no row that was read is known to hold.
        let back = kept.unwrap_or_default();
        self.done = prefix(back.offset).map_err(|found| self.refused(found))?;
        self.unproven = None;
        self.buffer.clear();
        self.begin = 0;
        Ok(Some(More::Back(back)))
    }

    /// No row for now. The file may be another one at the next call.
    fn wait(&mut self) -> More {
        if self.look_at_starts().is_err() || self.reopen().is_err() {
            // The next call tries again.
            self.file = None;
        }
        More::Nothing
    }

    /// Whether the name now has another file.
    fn is_another_file(&mut self) -> io::Result<bool> {
        let Some(new) = found(open(&self.path))? else {
            return Ok(false);
        };
        let Some(old) = &self.file else {
            return Ok(true);
        };
        let (here, there) = (old.metadata()?, new.metadata()?);
        if (here.dev(), here.ino()) == (there.dev(), there.ino()) {
            return Ok(false);
        }
        self.doubt();
        Ok(true)
    }

    /// Opens the file that has the name now. Rows that were not returned yet are read again.
    fn reopen(&mut self) -> io::Result<()> {
        self.file = found(open(&self.path))?;
        self.buffer.clear();
        self.begin = 0;
        Ok(())
    }

    fn refused(&self, found: io::Error) -> ReadError {
        ReadError::Io {
            path: self.path.clone(),
            found,
        }
    }
}

/// The end of the buffer.
enum More {
    Bytes,
    Nothing,
    Back(Start),
}

impl Metrics {
    /// The new starts, if there may be some.
    fn look_at_starts(&mut self) -> Result<Option<Vec<Start>>, SpoolError> {
        let found = std::fs::metadata(self.dir.join(STARTS));
        let known = found.map_or((0, 0), |found| (found.ino(), found.len()));
        if known == self.starts {
            return Ok(None);
        }
        let mut starts = Start::all(&self.dir)?;
        self.starts = known;
        let Some(newest) = starts.last().cloned() else {
            return Ok(None);
        };
        let run = self.run.replace(newest.run.clone());
        if run.is_some_and(|run| run != newest.run) {
            self.is_other = true;
            (self.generation, self.proven, self.times) = (newest.generation, 0, None);
            self.mended.clear();
            return Ok(Some(vec![Start::default()]));
        }
        starts.retain(|start| start.generation > self.generation);
        self.generation = newest.generation;
        Ok(Some(starts).filter(|starts| !starts.is_empty()))
    }

    /// The place in the present file, for a place in the file of the returned rows.
    fn place(&self, offset: u64) -> u64 {
        let mended = self.mended.iter();
        mended.fold(offset, |place, start| start.place(place))
    }

    /// Compares the returned rows with the file; returns the start to cut them back to if they
    /// differ.
    fn proven(&mut self) -> Option<Start> {
        self.proven = self.generation;
        self.is_other = false;
        self.mended.clear();
        self.kept.take()
    }

    /// The time of a row, or `None` if it is not written yet.
    fn time_of(&mut self, row: u64) -> io::Result<Option<f64>> {
        if self.times.is_none() {
            self.times = found(open(&self.dir.join(TIMES)))?;
        }
        match &self.times {
            Some(times) => time_of(times, row),
            // Rows without times.
            None => Ok(Some(0.0)),
        }
    }
}

/// The reader itself reads by offset, so the position of the handle is free for this.
fn from_start(mut file: &File) -> io::Result<BufReader<&File>> {
    file.rewind()?;
    Ok(BufReader::new(file))
}

#[cfg(test)]
mod tests;
