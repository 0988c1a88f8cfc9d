//! The other side: rows read back by offset, while they are being written.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{ReadError, SpoolError};
use crate::files::METRICS;
use crate::lines::MOST_WAITING;
use crate::mark::{Mark, Prefix};
use crate::row::Row;
use crate::starts::{STARTS, Start};
use crate::times::{TIMES, time_of};

/// Bytes asked of the file at once.
const CHUNK: usize = 64 << 10;

/// What a reader comes upon.
#[derive(Debug, Clone, PartialEq)]
pub enum Read {
    /// The next row.
    Row {
        /// What it holds.
        row: Row,
        /// When it was made first, in seconds since 1970; 0 where nothing says so.
        time: f64,
    },
    /// The run went back to a checkpoint and has made other rows since: those read from there on are void, and the next row is the
    /// one there. Rows that it made again to the same bytes are not void, and nothing is said of them.
    RolledBack(Start),
}

/// Where a reader goes on: after which start of the run, and behind which rows. The default is the beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The newest start that is known.
    pub generation: u64,
    /// Behind the rows that were read.
    pub mark: Mark,
}

/// Follows one spool file. It may be opened before the file is there.
pub struct Reader {
    path: PathBuf,
    file: Option<File>,
    /// The lines handed over.
    done: Prefix,
    /// Bytes of the file from `done.offset` on; those before `begin` are done too.
    buffer: Vec<u8>,
    begin: usize,
    /// What was handed over, while it is to be seen whether the file still begins with that.
    unproven: Option<Mark>,
    /// What only metrics have.
    metrics: Option<Metrics>,
}

/// Times and starts, beside the metrics.
struct Metrics {
    dir: PathBuf,
    times: Option<File>,
    /// The inode and the length of `starts.jsonl` as it is known, and the run that it is of.
    starts: (u64, u64),
    run: Option<String>,
    /// The newest start that is known.
    generation: u64,
    /// The newest one of which it is known that the rows handed over hold after it.
    proven: u64,
    /// The start that kept the fewest rows, of those between the two.
    kept: Option<Start>,
    /// Starts between the two that kept rows of a damaged file.
    mended: Vec<Start>,
    /// The directory is another run's by now.
    is_other: bool,
}

impl Reader {
    /// Follows the metrics of the run in `dir` from a cursor on, which an earlier reader returned.
    ///
    /// # Errors
    ///
    /// When a file is there and cannot be read.
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

    /// Follows a file of rows that only grows, such as `system.jsonl`, from a mark on, which an earlier reader returned. The time of a
    /// row is its value `time`.
    ///
    /// # Errors
    ///
    /// When the file is there and cannot be read.
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

    /// The next row, or nothing when there is none yet.
    ///
    /// # Errors
    ///
    /// When the line is no row, or a file cannot be read. The reader may be asked again.
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

    /// Where to go on after a restart: behind the last row that was handed over, junk included.
    pub fn cursor(&self) -> Cursor {
        let metrics = self.metrics.as_ref();
        Cursor {
            generation: metrics.map_or(0, |metrics| metrics.proven),
            mark: self.mark(),
        }
    }

    /// The place behind the last row that was handed over.
    pub fn mark(&self) -> Mark {
        let unproven = self.unproven.clone();
        unproven.unwrap_or_else(|| self.done.mark())
    }

    /// Whether the file is known to begin with the rows that were handed over. After a run went back that is so, or not, once it has
    /// made as many rows again.
    pub fn is_proven(&self) -> bool {
        self.unproven.is_none()
    }

    /// The start that the run went back to, while it is to be seen whether the rows handed over hold: it is making those behind that
    /// place again. Who only shows rows need not wait for that, and reads anew.
    pub fn went_back(&self) -> Option<&Start> {
        self.metrics.as_ref()?.kept.as_ref()
    }

    /// Bytes that were handed over.
    fn offset(&self) -> u64 {
        let unproven = self.unproven.as_ref();
        unproven.map_or(self.done.offset, |mark| mark.offset)
    }

    /// From now on it is to be seen whether the file still begins with what was handed over.
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

    /// Has more bytes in the buffer, if there are more that hold.
    fn more(&mut self) -> Result<More, ReadError> {
        if let Some(mark) = self.unproven.clone()
            && let Some(answer) = self.prove(&mark)?
        {
            return Ok(answer);
        }
        let read = self.fill().map_err(|found| self.refused(found))?;
        // After the bytes: those of a file that was cut meanwhile do not count.
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

    /// Adds what the file has after the buffer, and returns how many bytes that was.
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

    /// Sees whether the run has been started again; then what is not handed over yet is read anew.
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

    /// Sees whether the file still begins with the rows that were handed over, where that is in question. Rows that are being made again
    /// are waited for.
    fn prove(&mut self, mark: &Mark) -> Result<Option<More>, ReadError> {
        let Some(file) = &self.file else {
            return Ok(Some(self.wait()));
        };
        let there = file.metadata().map_err(|found| self.refused(found))?.len();
        let metrics = self.metrics.as_ref();
        let is_other = metrics.is_none_or(|metrics| metrics.is_other);
        let place = metrics.map_or(mark.offset, |metrics| metrics.place(mark.offset));
        // A damaged file cannot be compared with itself as it was: what was read of it stays.
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
        // Without a start that says from where on, nothing that was read is known to hold.
        let back = kept.unwrap_or_default();
        self.done = prefix(back.offset).map_err(|found| self.refused(found))?;
        self.unproven = None;
        self.buffer.clear();
        self.begin = 0;
        Ok(Some(More::Back(back)))
    }

    /// Nothing for now; the file may be another one by then.
    fn wait(&mut self) -> More {
        if self.look_at_starts().is_err() || self.reopen().is_err() {
            // Tried again at the next look.
            self.file = None;
        }
        More::Nothing
    }

    /// Whether the name has another file by now.
    fn is_another_file(&mut self) -> io::Result<bool> {
        let Some(new) = open(&self.path)? else {
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

    /// Takes the file that has the name now; what is not handed over yet is read anew.
    fn reopen(&mut self) -> io::Result<()> {
        self.file = open(&self.path)?;
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

/// What there is at the end of the buffer.
enum More {
    Bytes,
    Nothing,
    Back(Start),
}

impl Metrics {
    /// The starts that are new, if there may be some.
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

    /// The place in the file that is there now, for a place in the file that the rows handed over are of.
    fn place(&self, offset: u64) -> u64 {
        let mended = self.mended.iter();
        mended.fold(offset, |place, start| start.place(place))
    }

    /// The rows handed over are compared with the file; the start that they are to be cut back to, where they differ.
    fn proven(&mut self) -> Option<Start> {
        self.proven = self.generation;
        self.is_other = false;
        self.mended.clear();
        self.kept.take()
    }

    /// When a row was made, or nothing where that is still to be written.
    fn time_of(&mut self, row: u64) -> io::Result<Option<f64>> {
        if self.times.is_none() {
            self.times = open(&self.dir.join(TIMES))?;
        }
        match &self.times {
            Some(times) => time_of(times, row),
            // Rows of whoever writes no times.
            None => Ok(Some(0.0)),
        }
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match spd_files::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// The reader itself reads by offset, so the position of the handle is free for this.
fn from_start(mut file: &File) -> io::Result<BufReader<&File>> {
    file.rewind()?;
    Ok(BufReader::new(file))
}

#[cfg(test)]
mod tests;
