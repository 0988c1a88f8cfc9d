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
        let Some(kept) = is_new.map_err(|found| ReadError::Starts { found })? else {
            return Ok(false);
        };
        let fewer = |known: &Start| known.offset <= kept.offset;
        if kept.offset < offset && !metrics.kept.as_ref().is_some_and(fewer) {
            metrics.kept = Some(kept);
        }
        if metrics.kept.is_none() {
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
        let is_other = self.metrics.as_ref().is_none_or(|metrics| metrics.is_other);
        if there < mark.offset && !is_other {
            return Ok(Some(self.wait()));
        }
        let prefix = |limit| Prefix::of(from_start(file)?, limit);
        let same = prefix(mark.offset).map_err(|found| self.refused(found))?;
        let kept = self.metrics.as_mut().and_then(Metrics::proven);
        if same.mark() == *mark {
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
    /// The start that kept the fewest rows, of those that are new.
    fn look_at_starts(&mut self) -> Result<Option<Start>, SpoolError> {
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
            return Ok(Some(Start::default()));
        }
        starts.retain(|start| start.generation > self.generation);
        self.generation = newest.generation;
        Ok(starts.into_iter().min_by_key(|start| start.offset))
    }

    /// The rows handed over are compared with the file; the start that they are to be cut back to, where they differ.
    fn proven(&mut self) -> Option<Start> {
        self.proven = self.generation;
        self.is_other = false;
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
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::{Kind, Spool};

    fn train(step: u64) -> Row {
        Row::new(step, Kind::Train).with("loss/total", step as f64)
    }

    fn open(dir: &Path) -> Reader {
        Reader::of_metrics(dir, &Cursor::default()).unwrap()
    }

    fn row(read: Option<Read>) -> Option<Row> {
        match read? {
            Read::Row { row, .. } => Some(row),
            Read::RolledBack(start) => panic!("rolled back to {start:?}"),
        }
    }

    /// A run as it starts with the rows before a mark.
    fn start(dir: &Path, mark: &Mark) -> Spool {
        Spool::start(dir, mark, mark.lines).unwrap()
    }

    /// All there is to read now; a roll-back as the offset it goes back to.
    fn read_all(reader: &mut Reader) -> Vec<Result<u64, u64>> {
        let mut steps = Vec::new();
        while let Some(read) = reader.next().unwrap() {
            steps.push(match read {
                Read::Row { row, .. } => Ok(row.step),
                Read::RolledBack(start) => Err(start.offset),
            });
        }
        steps
    }

    fn append(spool: &Spool, steps: std::ops::RangeInclusive<u64>) -> Mark {
        steps.for_each(|step| spool.append(train(step)));
        spool.mark().wait().unwrap()
    }

    #[test]
    fn a_reader_waits_for_the_file_and_for_the_end_of_a_line() {
        let run = tempfile::tempdir().unwrap();
        let mut reader = open(run.path());
        assert_eq!(reader.next().unwrap(), None);
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(run.path().join(METRICS))
            .unwrap();
        assert_eq!(reader.next().unwrap(), None);
        for &byte in &train(7).line() {
            assert_eq!(reader.next().unwrap(), None);
            file.write_all(&[byte]).unwrap();
        }
        assert_eq!(row(reader.next().unwrap()), Some(train(7)));
        assert_eq!(reader.next().unwrap(), None);
    }

    #[test]
    fn a_reader_follows_a_live_writer() {
        let run = tempfile::tempdir().unwrap();
        let dir = run.path();
        thread::scope(|scope| {
            scope.spawn(|| {
                let spool = start(dir, &Mark::default());
                for step in 0..20_000 {
                    spool.append(train(step));
                    if step % 7000 == 0 {
                        spool.sync().unwrap();
                    }
                }
            });
            let mut reader = open(dir);
            let mut step = 0;
            while step < 20_000 {
                match reader.next().unwrap() {
                    Some(read) => {
                        assert_eq!(row(Some(read)), Some(train(step)));
                        step += 1;
                    }
                    None => thread::yield_now(),
                }
            }
            assert_eq!(reader.next().unwrap(), None);
        });
    }

    #[test]
    fn a_reader_goes_on_at_its_mark() {
        let run = tempfile::tempdir().unwrap();
        append(&start(run.path(), &Mark::default()), 1..=3);
        let mut reader = open(run.path());
        reader.next().unwrap();
        let cursor = reader.cursor();
        let mut second = Reader::of_metrics(run.path(), &cursor).unwrap();
        assert_eq!(second.cursor(), cursor);
        assert_eq!(read_all(&mut second), [Ok(2), Ok(3)]);
        let text = serde_json::to_string(&cursor).unwrap();
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), cursor);
    }

    #[test]
    fn other_rows_after_a_roll_back_are_told_once_there_are_as_many() {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let mark = append(&spool, 1..=3);
        append(&spool, 4..=6);
        let mut reader = open(run.path());
        assert_eq!(read_all(&mut reader), [1, 2, 3, 4, 5, 6].map(Ok));
        let before = reader.cursor();

        drop(spool);
        let spool = start(run.path(), &mark);
        assert_eq!(read_all(&mut reader), []);
        append(&spool, 14..=15);
        // Whoever starts to read meanwhile waits as well.
        assert_eq!(reader.cursor(), before);
        let mut second = Reader::of_metrics(run.path(), &before).unwrap();
        assert_eq!(
            (read_all(&mut reader), read_all(&mut second)),
            (vec![], vec![])
        );
        append(&spool, 16..=17);
        let expected = [Err(mark.offset), Ok(14), Ok(15), Ok(16), Ok(17)];
        assert_eq!(read_all(&mut reader), expected);
        assert_eq!(read_all(&mut second), expected);
        assert_eq!(reader.cursor().generation, 1);
        assert_eq!(reader.mark(), spool.mark().wait().unwrap());
    }

    #[test]
    fn of_several_roll_backs_the_farthest_counts() {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let early = append(&spool, 1..=1);
        append(&spool, 2..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        let cursor = reader.cursor();
        drop(spool);
        let spool = start(run.path(), &early);
        let late = append(&spool, 12..=13);
        assert_eq!(read_all(&mut reader), []);
        drop(spool);
        append(&start(run.path(), &late), 24..=29);
        let told = [
            Err(early.offset),
            Ok(12),
            Ok(13),
            Ok(24),
            Ok(25),
            Ok(26),
            Ok(27),
            Ok(28),
            Ok(29),
        ];
        assert_eq!(read_all(&mut reader), told);
        let mut next = Reader::of_metrics(run.path(), &cursor).unwrap();
        assert_eq!(read_all(&mut next), told);
    }

    #[test]
    fn another_run_in_the_same_place_is_read_from_its_beginning() {
        let run = tempfile::tempdir().unwrap();
        append(&start(run.path(), &Mark::default()), 1..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        std::fs::remove_dir_all(run.path()).unwrap();
        append(&start(run.path(), &Mark::default()), 1..=2);
        assert_eq!(read_all(&mut reader), [Err(0), Ok(1), Ok(2)]);
    }

    #[test]
    fn a_row_has_the_time_at_which_it_was_made_first() {
        let run = tempfile::tempdir().unwrap();
        let times = |steps| {
            let spool = start(run.path(), &Mark::default());
            append(&spool, 1..=steps);
            let mut reader = open(run.path());
            let mut times = Vec::new();
            while let Some(Read::Row { time, .. }) = reader.next().unwrap() {
                times.push(time);
            }
            times
        };
        let first = times(3);
        assert!(first.len() == 3 && first[0] > 1.7e9);
        thread::sleep(std::time::Duration::from_millis(20));
        let again = times(4);
        assert_eq!(again[..3], first);
        assert!(again[3] > first[2]);
    }

    // The file is longer again, by other rows, when the reader looks: its length alone tells nothing.
    #[test]
    fn a_roll_back_that_has_been_overtaken_is_seen() {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let mark = append(&spool, 1..=3);
        append(&spool, 4..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&start(run.path(), &mark), 14..=19);
        let expected = [
            Err(mark.offset),
            Ok(14),
            Ok(15),
            Ok(16),
            Ok(17),
            Ok(18),
            Ok(19),
        ];
        assert_eq!(read_all(&mut reader), expected);
    }

    #[test]
    fn the_same_rows_written_again_are_read_once() {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let mark = append(&spool, 1..=3);
        append(&spool, 4..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&start(run.path(), &mark), 4..=8);
        assert_eq!(read_all(&mut reader), [Ok(7), Ok(8)]);
    }

    #[test]
    fn a_torn_line_that_is_cut_was_never_read() {
        let run = tempfile::tempdir().unwrap();
        append(&start(run.path(), &Mark::default()), 1..=2);
        let mut file = OpenOptions::new()
            .append(true)
            .open(run.path().join(METRICS))
            .unwrap();
        file.write_all(b"{\"step\":3,\"ki").unwrap();
        let mut reader = open(run.path());
        assert_eq!(read_all(&mut reader), [Ok(1), Ok(2)]);
        append(&start(run.path(), &reader.mark()), 4..=4);
        assert_eq!(read_all(&mut reader), [Ok(4)]);
    }

    #[test]
    fn a_roll_back_while_nobody_read_is_known_from_the_starts() {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let mark = append(&spool, 1..=1);
        append(&spool, 2..=3);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&start(run.path(), &mark), 12..=13);
        let mut next = Reader::of_metrics(run.path(), &reader.cursor()).unwrap();
        assert_eq!(read_all(&mut next), [Err(mark.offset), Ok(12), Ok(13)]);
    }

    #[test]
    fn junk_is_named_by_its_line_and_skipped() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(METRICS);
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .unwrap();
        file.write_all(&[train(1).line(), b"{\xff}\n".to_vec(), train(2).line()].concat())
            .unwrap();
        let mut reader = open(run.path());
        assert_eq!(row(reader.next().unwrap()), Some(train(1)));
        assert_eq!(
            reader.next().unwrap_err().to_string(),
            format!(
                "{}: line 2 is no row: key must be a string at line 1 column 2; it is skipped",
                path.display()
            )
        );
        assert_eq!(row(reader.next().unwrap()), Some(train(2)));
    }

    #[test]
    fn a_file_without_lines_is_refused_before_memory_is_full() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(METRICS);
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .unwrap();
        file.set_len(1 << 40).unwrap();
        let mut reader = open(run.path());
        for _ in 0..2 {
            assert_eq!(
                reader.next().unwrap_err().to_string(),
                format!(
                    "{}: line 1 is longer than 16777216 bytes; is this a metrics spool?",
                    path.display()
                )
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_bytes_are_rows_or_errors(
            pieces in prop::collection::vec(
                prop_oneof![
                    any::<Vec<u8>>(),
                    any::<u64>().prop_map(|step| train(step).line()),
                    Just(b"\n".to_vec()),
                ],
                0..20,
            ),
        ) {
            let run = tempfile::tempdir().unwrap();
            let junk = pieces.concat();
            let mut file =
                OpenOptions::new().create(true).append(true).open(run.path().join(METRICS)).unwrap();
            file.write_all(&junk).unwrap();
            let mut reader = open(run.path());
            let mut lines = Vec::new();
            loop {
                match reader.next() {
                    Ok(None) => break,
                    Ok(Some(Read::Row { row, .. })) => lines.push(Ok(row)),
                    Ok(Some(Read::RolledBack(_))) => prop_assert!(false, "nobody cut"),
                    Err(error) => lines.push(Err(error.to_string())),
                }
            }
            let expected: Vec<&[u8]> = junk.split_inclusive(|&byte| byte == b'\n').collect();
            let whole = expected.iter().filter(|line| line.ends_with(b"\n")).count();
            prop_assert_eq!(lines.len(), whole);
            for (line, bytes) in lines.iter().zip(expected) {
                prop_assert_eq!(line.is_ok(), Row::parse(bytes).is_ok());
            }
        }
    }
}
