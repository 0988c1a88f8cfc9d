//! `starts.jsonl`: the place at which each start of a run continued. A reader that was away learns
//! from it that rows were cut.

use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use spd_files::atomic;

use crate::error::SpoolError;
use crate::lines::{Lines, keep_aside};
use crate::mark::Mark;
use crate::version::version;

/// Name of the file with a line for each start of a run.
pub const STARTS: &str = "starts.jsonl";

/// One start of a run, with the rows that it kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Twelve letters and digits that identify the run, the same in every line.
    pub run: String,
    /// Starts before this one.
    pub generation: u64,
    /// Optimizer steps that were done. Rows of later steps are made again.
    pub step: u64,
    /// Bytes of `metrics.jsonl` that were kept.
    pub offset: u64,
    /// Number of rows in them.
    pub lines: u64,
    /// Its time, in seconds since 1970.
    pub time: f64,
    /// The version of the program that started it; early programs recorded none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Set if the rows that were kept are from a damaged file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mended: Option<Mended>,
}

/// The remaining rows of a damaged file, which replace the rows before a mark.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Mended {
    /// The mark that the file no longer matches.
    pub was: Mark,
    /// Byte ranges before that mark that are lost, in order.
    pub lost: Vec<(u64, u64)>,
    /// XXH3-128 of the remaining bytes.
    pub hash: String,
}

impl Start {
    /// The mark of the rows that this start kept, if they replace the rows before `mark`.
    pub(crate) fn stands_for(&self, mark: &Mark) -> Option<Mark> {
        let mended = self.mended.as_ref().filter(|mended| mended.was == *mark)?;
        Some(Mark {
            offset: self.offset,
            lines: self.lines,
            hash: mended.hash.clone(),
        })
    }

    /// The place in the file after this start, for a place in the file before it.
    pub(crate) fn place(&self, before: u64) -> u64 {
        let Some(mended) = &self.mended else {
            return before;
        };
        let lost = mended.lost.iter();
        let lost = lost.map(|&(begin, end)| before.min(end).saturating_sub(begin));
        before.saturating_sub(lost.sum())
    }

    /// All starts of the run in `dir`, in order; empty if it never started. Lines that are no start
    /// are left out.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn all(dir: &Path) -> Result<Vec<Self>, SpoolError> {
        let path = dir.join(STARTS);
        let bytes = spd_files::found(spd_files::read(&path));
        let bytes = bytes.map_err(|found| SpoolError::io(&path, "read", found))?;
        let bytes = bytes.unwrap_or_default();
        Ok(lines(&bytes).filter_map(Self::of).collect())
    }

    fn of(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }

    /// Records, and syncs, that the run in `dir` starts after `step` steps with the rows before
    /// `mark`. A file with lines that are no start is set aside and written again from the others;
    /// a line about that is returned.
    pub(crate) fn append(
        dir: &Path,
        mark: &Mark,
        step: u64,
        mended: Option<Mended>,
    ) -> Result<Option<String>, SpoolError> {
        let path = dir.join(STARTS);
        // Before the last line is read, so that a torn one is cut.
        let mut file = Lines::open(&path)?;
        let refused = |found| SpoolError::io(&path, "read", found);
        let bytes = spd_files::read(&path).map_err(refused)?;
        let before: Vec<Self> = lines(&bytes).filter_map(Self::of).collect();
        let (there, good) = (file.mark().lines, before.len() as u64);
        let mut note = None;
        if good < there {
            let aside = keep_aside(&path, &bytes)?;
            let whole: Vec<&[u8]> = lines(&bytes)
                .filter(|line| Self::of(line).is_some())
                .collect();
            let written = atomic::write_file(&path, &whole);
            written.map_err(|found| SpoolError::io(&path, "write it again", found))?;
            file = Lines::open(&path)?;
            note = Some(format!(
                "{}: {} of its {there} lines cannot be read; the file is kept as {}, and written again without them",
                path.display(),
                there - good,
                aside.display()
            ));
        }
        let last = before.last();
        let named = || lines(&bytes).find_map(name_in);
        let start = Self {
            run: last
                .map(|start| start.run.clone())
                .or_else(named)
                .unwrap_or_else(|| name(dir)),
            // A reader has counted the lines that are lost now.
            generation: last.map_or(0, |start| start.generation + 1).max(there),
            step,
            offset: mark.offset,
            lines: mark.lines,
            time: now(),
            version: Some(version().to_owned()),
            mended,
        };
        let mut line = serde_json::to_vec(&start).expect("names and numbers are JSON");
        line.push(b'\n');
        file.append(&line);
        file.sync();
        match file.trouble() {
            None => Ok(note),
            Some(trouble) => Err(SpoolError::io(&path, "append", io::Error::other(trouble))),
        }
    }
}

/// The whole lines, with their ends.
fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = bytes.split_inclusive(|&byte| byte == b'\n');
    lines.filter(|line| line.ends_with(b"\n"))
}

/// The id of the run in a line that is damaged behind it.
fn name_in(line: &[u8]) -> Option<String> {
    let name = line.strip_prefix(b"{\"run\":\"")?.get(..NAME)?;
    let is_name = name.iter().all(|byte| DIGITS.contains(byte));
    is_name.then(|| String::from_utf8_lossy(name).into_owned())
}

/// The digits of an id.
const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
const NAME: usize = 12;

/// A unique id, from the time, the process and the directory.
fn name(dir: &Path) -> String {
    let at = SystemTime::now().duration_since(UNIX_EPOCH);
    let words = format!("{:?} {} {}", at, std::process::id(), dir.display());
    let mut number = xxh3_128(words.as_bytes());
    let digit = |_| {
        let digit = DIGITS[usize::try_from(number % 36).unwrap_or_default()];
        number /= 36;
        char::from(digit)
    };
    (0..NAME).map(digit).collect()
}

/// Seconds since 1970, the unit of every time of a run.
pub fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use super::*;

    #[test]
    fn each_start_is_a_line_with_the_name_of_the_run() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(Start::all(run.path()).unwrap(), []);
        Start::append(run.path(), &Mark::default(), 0, None).unwrap();
        let mark = Mark {
            offset: 70,
            lines: 2,
            ..Mark::default()
        };
        let path = run.path().join(STARTS);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"run\":\"torn").unwrap();
        assert_eq!(Start::all(run.path()).unwrap().len(), 1);
        Start::append(run.path(), &mark, 12, None).unwrap();
        let starts = Start::all(run.path()).unwrap();
        let places = starts
            .iter()
            .map(|start| (start.generation, start.step, start.offset, start.lines));
        assert_eq!(places.collect::<Vec<_>>(), [(0, 0, 0, 0), (1, 12, 70, 2)]);
        assert!(starts[0].run == starts[1].run && starts[0].run.len() == 12);
        assert!(starts[0].time > 1.7e9 && starts[1].time >= starts[0].time);
        assert_eq!(starts[1].version.as_deref(), Some(version()));
        let other = tempfile::tempdir().unwrap();
        Start::append(other.path(), &Mark::default(), 0, None).unwrap();
        assert_ne!(Start::all(other.path()).unwrap()[0].run, starts[0].run);
    }

    #[test]
    fn lines_that_are_no_start_are_set_aside_and_the_others_stay() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(STARTS);
        let append = |step| Start::append(run.path(), &Mark::default(), step, None).unwrap();
        (0..3).for_each(|step| assert_eq!(append(step), None));
        let (all, whole) = (fs::read(&path).unwrap(), Start::all(run.path()).unwrap());
        let put = |bytes: &[u8]| atomic::write_file(&path, &[bytes]).unwrap();
        let at = all.len() - 40;
        let mut damaged = all.clone();
        damaged[at] ^= 0x80;
        put(&damaged);
        assert_eq!(Start::all(run.path()).unwrap(), whole[..2]);
        let said = format!(
            "{0}: 1 of its 3 lines cannot be read; the file is kept as {0}.bad, and written again without them",
            path.display()
        );
        assert_eq!(append(3), Some(said));
        assert_eq!(
            fs::read(run.path().join("starts.jsonl.bad")).unwrap(),
            damaged
        );
        let starts = Start::all(run.path()).unwrap();
        assert_eq!(starts[..2], whole[..2]);
        // A reader knows the lost line, and must not take the new one for it.
        assert_eq!((starts[2].generation, starts.len()), (3, 3));
        assert_eq!(starts[2].run, whole[0].run);
        // A start of an earlier program.
        let old = "{\"run\":\"k3j2m9x0q41z\",\"generation\":0,\"step\":3,\"offset\":70,\"lines\":2,\"time\":1.5}\n";
        put(old.as_bytes());
        let starts = Start::all(run.path()).unwrap();
        assert_eq!(
            (starts.len(), starts[0].step, &starts[0].version),
            (1, 3, &None)
        );
        // The only line still holds the id.
        put(b"{\"run\":\"k3j2m9x0q41z\",\"gen\n");
        append(0);
        assert_eq!(Start::all(run.path()).unwrap()[0].run, "k3j2m9x0q41z");
    }
}
