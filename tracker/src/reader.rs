//! The other side: rows read back by offset, while they are being written.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::ReadError;
use crate::lines::MOST_WAITING;
use crate::mark::{Mark, Prefix};
use crate::row::Row;

/// Bytes asked of the file at once.
const CHUNK: usize = 64 << 10;

/// What a reader comes upon.
#[derive(Debug, Clone, PartialEq)]
pub enum Read {
    /// The next row.
    Row(Row),
    /// Rows were cut: those read from byte `offset` on are void, and the next row is the one there.
    RolledBack {
        /// A number of whole lines of bytes, at most what was read.
        offset: u64,
    },
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
    /// A roll-back found when the file was opened.
    rolled_back: bool,
}

impl Reader {
    /// Goes on at `mark`, which an earlier reader returned; at the start with `Mark::default()`.
    ///
    /// If the file does not begin with what the mark proves, rows were cut while nobody read, nobody can
    /// say from where on, and the first [`Reader::next`] says `RolledBack` to 0.
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
            rolled_back: false,
        };
        reader.file = reader.open_file().map_err(|found| reader.refused(found))?;
        let prefix = match &reader.file {
            Some(file) => Prefix::of(BufReader::new(file), mark.offset),
            None => Ok(Prefix::default()),
        };
        let prefix = prefix.map_err(|found| reader.refused(found))?;
        if prefix.mark() == *mark {
            reader.done = prefix;
        } else {
            reader.rolled_back = true;
        }
        Ok(reader)
    }

    /// The next whole line, or nothing when there is none yet.
    ///
    /// # Errors
    ///
    /// When the line is no row, or the file cannot be read. The reader may be asked again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator that ends must not go on, this does"
    )]
    pub fn next(&mut self) -> Result<Option<Read>, ReadError> {
        if std::mem::take(&mut self.rolled_back) {
            return Ok(Some(Read::RolledBack { offset: 0 }));
        }
        let mut searched = self.begin;
        loop {
            if let Some(length) = self.buffer[searched..]
                .iter()
                .position(|&byte| byte == b'\n')
            {
                return self
                    .take_line(searched + length + 1)
                    .map(|row| Some(Read::Row(row)));
            }
            if self.buffer.len() - self.begin > MOST_WAITING {
                let (path, line) = (self.path.clone(), self.done.lines + 1);
                return Err(ReadError::Endless {
                    path,
                    line,
                    longest: MOST_WAITING,
                });
            }
            self.buffer.drain(..self.begin);
            self.begin = 0;
            searched = self.buffer.len();
            if self.fill().map_err(|found| self.refused(found))? == 0 {
                match self.follow().map_err(|found| self.refused(found))? {
                    Follow::Wait => return Ok(None),
                    Follow::GoOn => searched = 0,
                    Follow::RolledBack => {
                        return Ok(Some(Read::RolledBack {
                            offset: self.done.offset,
                        }));
                    }
                }
            }
        }
    }

    /// The place after the last line that was handed over, junk included: where to go on after a restart.
    pub fn mark(&self) -> Mark {
        self.done.mark()
    }

    fn take_line(&mut self, end: usize) -> Result<Row, ReadError> {
        let line = &self.buffer[self.begin..end];
        self.done.push(line);
        self.begin = end;
        let row = Row::parse(&line[..line.len() - 1]);
        row.map_err(|reason| ReadError::Junk {
            path: self.path.clone(),
            line: self.done.lines,
            reason,
        })
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

    /// Looks, at the end of the file, whether it is still the one that has the name.
    fn follow(&mut self) -> io::Result<Follow> {
        let Some(new) = self.open_file()? else {
            return Ok(Follow::Wait);
        };
        let Some(old) = &self.file else {
            self.file = Some(new);
            return Ok(Follow::GoOn);
        };
        let (here, there) = (old.metadata()?, new.metadata()?);
        let same = (here.dev(), here.ino()) == (there.dev(), there.ino());
        if same && there.len() >= self.done.offset {
            return Ok(Follow::Wait);
        }
        // Cut in place, which no spool does: then nothing is known of what was there.
        let shared = if same {
            0
        } else {
            shared_bytes(old, &new, self.done.offset)?
        };
        let shared = Prefix::of(from_start(&new)?, shared)?;
        let rolled_back = shared.offset < self.done.offset;
        self.done = shared;
        self.buffer.clear();
        self.file = Some(new);
        Ok(if rolled_back {
            Follow::RolledBack
        } else {
            Follow::GoOn
        })
    }

    fn open_file(&self) -> io::Result<Option<File>> {
        match spd_files::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn refused(&self, found: io::Error) -> ReadError {
        ReadError::Io {
            path: self.path.clone(),
            found,
        }
    }
}

/// What there is to do at the end of a file.
enum Follow {
    Wait,
    GoOn,
    RolledBack,
}

/// How many bytes two files begin with in common, of the first `limit`.
fn shared_bytes(one: &File, other: &File, limit: u64) -> io::Result<u64> {
    let (mut one, mut other) = (from_start(one)?, from_start(other)?);
    let mut shared = 0;
    while shared < limit {
        let (left, right) = (one.fill_buf()?, other.fill_buf()?);
        let same = left
            .iter()
            .zip(right)
            .take_while(|(left, right)| left == right)
            .count();
        let full = left.len().min(right.len());
        shared += same as u64;
        if same < full || full == 0 {
            break;
        }
        one.consume(full);
        other.consume(full);
    }
    Ok(shared.min(limit))
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
    use crate::{Kind, METRICS, Spool};

    fn train(step: u64) -> Row {
        Row::new(step, Kind::Train).with("loss/total", step as f64)
    }

    fn open(dir: &Path) -> Reader {
        Reader::open(&dir.join(METRICS), &Mark::default()).unwrap()
    }

    /// All there is to read now; a roll-back as the offset it goes back to.
    fn read_all(reader: &mut Reader) -> Vec<Result<u64, u64>> {
        let mut steps = Vec::new();
        while let Some(read) = reader.next().unwrap() {
            steps.push(match read {
                Read::Row(row) => Ok(row.step),
                Read::RolledBack { offset } => Err(offset),
            });
        }
        steps
    }

    fn append(spool: &mut Spool, steps: std::ops::RangeInclusive<u64>) -> Mark {
        steps.for_each(|step| spool.append(&train(step)));
        spool.mark()
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
        assert_eq!(reader.next().unwrap(), Some(Read::Row(train(7))));
        assert_eq!(reader.next().unwrap(), None);
    }

    #[test]
    fn a_reader_follows_a_live_writer() {
        let run = tempfile::tempdir().unwrap();
        let dir = run.path();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut spool = Spool::create_or_open(dir).unwrap();
                for step in 0..20_000 {
                    spool.append(&train(step));
                    if step % 7 == 0 {
                        spool.flush();
                    }
                }
            });
            let mut reader = open(dir);
            let mut step = 0;
            while step < 20_000 {
                match reader.next().unwrap() {
                    Some(read) => {
                        assert_eq!(read, Read::Row(train(step)));
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
        append(&mut Spool::create_or_open(run.path()).unwrap(), 1..=3);
        let mut reader = open(run.path());
        reader.next().unwrap();
        let mark = reader.mark();
        let mut second = Reader::open(&run.path().join(METRICS), &mark).unwrap();
        assert_eq!(read_all(&mut second), [Ok(2), Ok(3)]);
    }

    #[test]
    fn a_roll_back_says_which_rows_are_void() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        let mark = append(&mut spool, 1..=3);
        append(&mut spool, 4..=6);
        let mut reader = open(run.path());
        assert_eq!(read_all(&mut reader), [1, 2, 3, 4, 5, 6].map(Ok));

        drop(spool);
        let mut spool = Spool::roll_back(run.path(), &mark).unwrap();
        assert_eq!(read_all(&mut reader), [Err(mark.offset)]);
        append(&mut spool, 14..=15);
        assert_eq!(read_all(&mut reader), [Ok(14), Ok(15)]);
        assert_eq!(reader.mark(), spool.mark());
    }

    // The file is longer again, by other rows, when the reader looks: its length alone tells nothing.
    #[test]
    fn a_roll_back_that_has_been_overtaken_is_seen() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        let mark = append(&mut spool, 1..=3);
        append(&mut spool, 4..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&mut Spool::roll_back(run.path(), &mark).unwrap(), 14..=19);
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
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        let mark = append(&mut spool, 1..=3);
        append(&mut spool, 4..=6);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&mut Spool::roll_back(run.path(), &mark).unwrap(), 4..=8);
        assert_eq!(read_all(&mut reader), [Ok(7), Ok(8)]);
    }

    #[test]
    fn a_torn_line_that_is_cut_was_never_read() {
        let run = tempfile::tempdir().unwrap();
        append(&mut Spool::create_or_open(run.path()).unwrap(), 1..=2);
        let mut file = OpenOptions::new()
            .append(true)
            .open(run.path().join(METRICS))
            .unwrap();
        file.write_all(b"{\"step\":3,\"ki").unwrap();
        let mut reader = open(run.path());
        assert_eq!(read_all(&mut reader), [Ok(1), Ok(2)]);
        append(&mut Spool::create_or_open(run.path()).unwrap(), 4..=4);
        assert_eq!(read_all(&mut reader), [Ok(4)]);
    }

    #[test]
    fn a_roll_back_while_nobody_read_goes_back_to_the_start() {
        let run = tempfile::tempdir().unwrap();
        let mut spool = Spool::create_or_open(run.path()).unwrap();
        let mark = append(&mut spool, 1..=1);
        append(&mut spool, 2..=3);
        let mut reader = open(run.path());
        read_all(&mut reader);
        drop(spool);
        append(&mut Spool::roll_back(run.path(), &mark).unwrap(), 12..=13);
        let mut next = Reader::open(&run.path().join(METRICS), &reader.mark()).unwrap();
        assert_eq!(read_all(&mut next), [Err(0), Ok(1), Ok(12), Ok(13)]);
    }

    #[test]
    fn a_file_cut_in_place_is_read_again() {
        let run = tempfile::tempdir().unwrap();
        append(&mut Spool::create_or_open(run.path()).unwrap(), 1..=2);
        let mut reader = open(run.path());
        read_all(&mut reader);
        let path = run.path().join(METRICS);
        OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(0)
            .unwrap();
        append(&mut Spool::create_or_open(run.path()).unwrap(), 3..=3);
        assert_eq!(read_all(&mut reader), [Err(0), Ok(3)]);
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
        assert_eq!(reader.next().unwrap(), Some(Read::Row(train(1))));
        assert_eq!(
            reader.next().unwrap_err().to_string(),
            format!(
                "{}: line 2 is no row: key must be a string at line 1 column 2; it is skipped",
                path.display()
            )
        );
        assert_eq!(reader.next().unwrap(), Some(Read::Row(train(2))));
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
                    Ok(Some(Read::Row(row))) => lines.push(Ok(row)),
                    Ok(Some(Read::RolledBack { .. })) => prop_assert!(false, "nobody cut"),
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
