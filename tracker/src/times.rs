//! `metrics.times`: the time at which each row of `metrics.jsonl` was first made. The times lie
//! beside the rows, which hold nothing that differs between two runs of one config.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::SpoolError;
use crate::lines::Lines;
use crate::starts::now;

/// Name of the file with the times of the rows of `metrics.jsonl`.
pub const TIMES: &str = "metrics.times";

/// Bytes of a line: ten digits of seconds, a point, three digits, and the end.
const WIDTH: usize = 15;

/// The append side, which only grows. A row that is made again keeps its first time.
pub(crate) struct Times {
    lines: Lines,
    /// Rows that have a time.
    rows: u64,
}

impl Times {
    /// Opens the file beside `rows` rows. Rows without a time, as after a power cut, get the last
    /// time in the file.
    pub(crate) fn open(dir: &Path, rows: u64) -> Result<Self, SpoolError> {
        let path = dir.join(TIMES);
        let mut lines = Lines::open(&path)?;
        let (bytes, there) = (lines.offset(), lines.mark().lines);
        let last = match there.checked_sub(1) {
            Some(last) if bytes == there * WIDTH as u64 => Self::read(&path, last),
            _ => None,
        };
        let mut times = match last {
            Some(_) => Self { lines, rows: there },
            None => {
                if bytes > 0 {
                    drop(lines);
                    lines = Lines::open_empty(&path)?;
                }
                Self { lines, rows: 0 }
            }
        };
        while times.rows < rows {
            times.append(times.rows, last.unwrap_or_else(now));
        }
        Ok(times)
    }

    fn read(path: &Path, row: u64) -> Option<f64> {
        let file = spd_files::open(path).ok()?;
        time_of(&file, row).ok().flatten()
    }

    /// Records the time of a row, unless it has one.
    pub(crate) fn append(&mut self, row: u64, time: f64) {
        if row == self.rows {
            // The range of the digits.
            let time = time.clamp(0.0, 9_999_999_999.0);
            self.lines.append(format!("{time:014.3}\n").as_bytes());
            self.rows += 1;
        }
    }

    pub(crate) fn lines(&mut self) -> &mut Lines {
        &mut self.lines
    }
}

/// Keeps the times of some rows, and of those from `end` on, which may be made again.
pub(crate) fn keep(dir: &Path, rows: &[u64], end: u64) -> Result<(), SpoolError> {
    let path = dir.join(TIMES);
    let refused = |found| SpoolError::io(&path, "write it again", found);
    let Some(bytes) = spd_files::found(spd_files::read(&path)).map_err(refused)? else {
        return Ok(());
    };
    let there = bytes.chunks_exact(WIDTH).zip(0..);
    let kept = there.filter(|(_, row)| *row >= end || rows.binary_search(row).is_ok());
    let kept: Vec<&[u8]> = kept.map(|(time, _)| time).collect();
    spd_files::atomic::write_file(&path, &kept).map_err(refused)
}

/// The time of a row, or `None` if it is not written yet.
///
/// # Errors
///
/// When the file cannot be read, or the line is not a time.
pub(crate) fn time_of(file: &File, row: u64) -> io::Result<Option<f64>> {
    let mut line = [0; WIDTH];
    match file.read_exact_at(&mut line, row * WIDTH as u64) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let text = std::str::from_utf8(&line)
        .ok()
        .and_then(|line| line.strip_suffix('\n'));
    let time = text.and_then(|text| text.parse().ok());
    time.map(Some).ok_or_else(|| {
        let found = format!("{TIMES}: line {} is no time", row + 1);
        io::Error::new(ErrorKind::InvalidData, found)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn text(dir: &Path) -> String {
        fs::read_to_string(dir.join(TIMES)).unwrap()
    }

    #[test]
    fn a_row_keeps_the_time_at_which_it_was_made_first() {
        let run = tempfile::tempdir().unwrap();
        let mut times = Times::open(run.path(), 0).unwrap();
        times.append(0, 1_795_255_200.25);
        times.append(1, 1_795_255_201.0);
        times.append(0, 1_795_255_300.0);
        times.lines().flush();
        let mut times = Times::open(run.path(), 1).unwrap();
        times.append(1, 1_795_255_400.0);
        times.append(2, 1_795_255_401.5);
        times.lines().flush();
        let expected = "1795255200.250\n1795255201.000\n1795255401.500\n";
        assert_eq!(text(run.path()), expected);
        let file = fs::File::open(run.path().join(TIMES)).unwrap();
        let found = [0, 2, 3].map(|row| time_of(&file, row).unwrap());
        assert_eq!(found, [Some(1_795_255_200.25), Some(1_795_255_401.5), None]);
    }

    #[test]
    fn rows_without_a_time_get_the_last_there_is() {
        let run = tempfile::tempdir().unwrap();
        let put = |text: &str| {
            let path = run.path().join(TIMES);
            spd_files::atomic::write_file(&path, &[text.as_bytes()]).unwrap();
        };
        put("1795255200.250\n17952");
        Times::open(run.path(), 3).unwrap().lines().flush();
        assert_eq!(text(run.path()), "1795255200.250\n".repeat(3));
        for junk in ["1795255200.250\nshort\n", "no time at all\n"] {
            put(junk);
            Times::open(run.path(), 2).unwrap().lines().flush();
            let there = text(run.path());
            assert!(there.len() == 30 && there.starts_with("1"), "{there}");
        }
    }
}
