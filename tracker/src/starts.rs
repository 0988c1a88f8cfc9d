//! `starts.jsonl`: where each start of a run went on. This is how a reader that was away learns that rows were cut.

use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::SpoolError;
use crate::lines::Lines;
use crate::mark::Mark;

/// Name of the file that holds a line for each start of a run.
pub const STARTS: &str = "starts.jsonl";

/// One start of a run: what it kept of the rows that were there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Twelve letters and digits that name the run, the same in every line.
    pub run: String,
    /// Starts before this one.
    pub generation: u64,
    /// Optimizer steps that were done: rows of later ones are made again.
    pub step: u64,
    /// Bytes of `metrics.jsonl` that were kept.
    pub offset: u64,
    /// Rows in them.
    pub lines: u64,
    /// When it was, in seconds since 1970.
    pub time: f64,
}

impl Start {
    /// All starts of the run in `dir`, in their order; none where it never started.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or a line of it is no start.
    pub fn all(dir: &Path) -> Result<Vec<Self>, SpoolError> {
        let path = dir.join(STARTS);
        let refused = |found| SpoolError::io(&path, "read", found);
        let mut file = match spd_files::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            opened => BufReader::new(opened.map_err(refused)?),
        };
        let (mut starts, mut line) = (Vec::new(), Vec::new());
        while file.read_until(b'\n', &mut line).map_err(refused)? > 0 && line.ends_with(b"\n") {
            let start: Self = serde_json::from_slice(&line).map_err(|found| {
                let found = format!("line {} is no start: {found}", starts.len() + 1);
                refused(io::Error::new(ErrorKind::InvalidData, found))
            })?;
            starts.push(start);
            line.clear();
        }
        Ok(starts)
    }

    /// Writes down, and has the disk keep, that the run in `dir` starts after `step` steps with the rows before `mark`.
    pub(crate) fn append(dir: &Path, mark: &Mark, step: u64) -> Result<(), SpoolError> {
        let path = dir.join(STARTS);
        // Before the last line is looked at: a torn one is cut.
        let mut lines = Lines::open(&path)?;
        let before = Self::all(dir)?;
        let start = Self {
            run: before
                .last()
                .map_or_else(|| name(dir), |start| start.run.clone()),
            generation: before.last().map_or(0, |start| start.generation + 1),
            step,
            offset: mark.offset,
            lines: mark.lines,
            time: now(),
        };
        let mut line = serde_json::to_vec(&start).expect("names and numbers are JSON");
        line.push(b'\n');
        lines.append(&line);
        lines.sync();
        match lines.trouble() {
            None => Ok(()),
            Some(trouble) => Err(SpoolError::io(&path, "append", io::Error::other(trouble))),
        }
    }
}

/// A name that no other run has: of the moment, the process and the place.
fn name(dir: &Path) -> String {
    let at = SystemTime::now().duration_since(UNIX_EPOCH);
    let words = format!("{:?} {} {}", at, std::process::id(), dir.display());
    let mut number = xxh3_128(words.as_bytes());
    let digits = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let digit = |_| {
        let digit = digits[usize::try_from(number % 36).unwrap_or_default()];
        number /= 36;
        char::from(digit)
    };
    (0..12).map(digit).collect()
}

/// Seconds since 1970: what every time of a run is counted in.
pub fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;

    #[test]
    fn each_start_is_a_line_with_the_name_of_the_run() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(Start::all(run.path()).unwrap(), []);
        Start::append(run.path(), &Mark::default(), 0).unwrap();
        let mark = Mark {
            offset: 70,
            lines: 2,
            ..Mark::default()
        };
        let path = run.path().join(STARTS);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"run\":\"torn").unwrap();
        assert_eq!(Start::all(run.path()).unwrap().len(), 1);
        Start::append(run.path(), &mark, 12).unwrap();
        let starts = Start::all(run.path()).unwrap();
        let places = starts
            .iter()
            .map(|start| (start.generation, start.step, start.offset, start.lines));
        assert_eq!(places.collect::<Vec<_>>(), [(0, 0, 0, 0), (1, 12, 70, 2)]);
        assert!(starts[0].run == starts[1].run && starts[0].run.len() == 12);
        assert!(starts[0].time > 1.7e9 && starts[1].time >= starts[0].time);
        let other = tempfile::tempdir().unwrap();
        Start::append(other.path(), &Mark::default(), 0).unwrap();
        assert_ne!(Start::all(other.path()).unwrap()[0].run, starts[0].run);

        file.write_all(b"").unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{}\n").unwrap();
        let refused = Start::all(run.path()).unwrap_err().to_string();
        let expected = format!(
            "{}: cannot read: line 3 is no start: missing field `run`",
            path.display()
        );
        assert!(refused.starts_with(&expected), "{refused}");
    }
}
