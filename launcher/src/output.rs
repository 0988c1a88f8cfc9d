//! What a process of ours prints: all of it to its log, the last lines kept for the day it dies.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::screen::plain;

/// Lines kept: those that a launcher shows of a dead rank, and its own about them, for whoever launched the launcher.
const LINES: usize = 2 * SHOWN;

/// Lines shown of a process that died.
pub(crate) const SHOWN: usize = 12;

/// Characters kept of a line.
const LINE_CHARS: usize = 400;

/// A log that has grown to this becomes `<log>.1`, and the one before it goes: a rank that prints for
/// ever fills no disk.
const LOG_BYTES: u64 = 64 << 20;

/// How long the last bytes of a rank that is gone are waited for; something it started may hold the
/// pipe open for ever.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The lines of one rank while it runs.
#[derive(Debug)]
pub(crate) struct Output {
    lines: Arc<Mutex<Lines>>,
    thread: JoinHandle<()>,
}

impl Output {
    /// Starts to copy to `log`, and returns the end of the pipe that the rank writes to.
    ///
    /// # Errors
    ///
    /// When the log cannot be opened or there is no pipe to be had.
    pub(crate) fn to_log(log: &Path) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let mut log = Log::open(log)?;
        let lines = Arc::new(Mutex::new(Lines::default()));
        let kept = Arc::clone(&lines);
        let thread = thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || copy(reader, &mut log, &kept))?;
        Ok((Self { lines, thread }, writer))
    }

    /// Lines that came since the last call: the last few of them, and how many there were before those.
    pub(crate) fn news(&self) -> (Vec<String>, usize) {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .news()
    }

    /// The last lines of a rank that is gone.
    pub(crate) fn last_lines(self) -> Vec<String> {
        let deadline = Instant::now() + TIMEOUT;
        while !self.thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.end_line();
        lines.kept.iter().cloned().collect()
    }
}

/// The message a dying rank left: its own `error:` line, else what it panicked with.
pub(crate) fn last_words(lines: &[String]) -> Option<&str> {
    let error = lines
        .iter()
        .rev()
        .find_map(|line| line.strip_prefix("error: "));
    let panicked = || {
        let place = lines
            .iter()
            .rposition(|line| line.contains("panicked at"))?;
        lines.get(place + 1).map(String::as_str)
    };
    error.or_else(panicked)
}

fn copy(mut reader: PipeReader, log: &mut Log, lines: &Mutex<Lines>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => {
                log.write(&buffer[..bytes]);
                lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(&buffer[..bytes]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// A file of bounded size, and the one before it.
struct Log {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
}

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = spd_files::open_with(options.create(true).append(true), path)?;
        let bytes = file.metadata()?.len();
        Ok(Self {
            path: path.to_owned(),
            file: Some(file),
            bytes,
        })
    }

    /// A full disk costs the log and not the run: the pipe has to be emptied whatever happens.
    fn write(&mut self, chunk: &[u8]) {
        if self.bytes >= LOG_BYTES {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            let next = fs::rename(&self.path, older).and_then(|()| Self::open(&self.path));
            (self.file, self.bytes) = next.map_or((None, 0), |next| (next.file, next.bytes));
        }
        if let Some(file) = &mut self.file
            && file.write_all(chunk).is_ok()
        {
            self.bytes += chunk.len() as u64;
        }
    }
}

/// The last lines of a stream of bytes.
#[derive(Debug, Default)]
struct Lines {
    kept: VecDeque<String>,
    fresh: usize,
    partial: Vec<u8>,
}

impl Lines {
    fn take(&mut self, bytes: &[u8]) {
        // A carriage return ends a line too, or a progress bar would be one line for ever.
        let mut pieces = bytes.split(|byte| matches!(byte, b'\n' | b'\r')).peekable();
        while let Some(piece) = pieces.next() {
            // Four bytes are the most that a character takes.
            let room = (4 * LINE_CHARS).saturating_sub(self.partial.len());
            self.partial.extend(&piece[..piece.len().min(room)]);
            if pieces.peek().is_some() {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        let text = String::from_utf8_lossy(&self.partial);
        if !text.trim().is_empty() {
            if self.kept.len() == LINES {
                self.kept.pop_front();
            }
            self.kept
                .push_back(plain(&text).chars().take(LINE_CHARS).collect());
            self.fresh += 1;
        }
        self.partial.clear();
    }

    fn news(&mut self) -> (Vec<String>, usize) {
        let shown = self.fresh.min(4);
        let lines = self
            .kept
            .iter()
            .skip(self.kept.len() - shown)
            .cloned()
            .collect();
        let skipped = self.fresh - shown;
        self.fresh = 0;
        (lines, skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(chunks: &[&[u8]]) -> Lines {
        let mut lines = Lines::default();
        chunks.iter().for_each(|chunk| lines.take(chunk));
        lines
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        let mut lines = lines(&[b"one\ntw", b"o\n\n10%\r20%\r", b"\xff\x1b[31m", b" end"]);
        lines.end_line();
        assert_eq!(
            Vec::from(lines.kept),
            ["one", "two", "10%", "20%", "\u{fffd} [31m end"]
        );
    }

    #[test]
    fn a_flood_keeps_its_last_lines_and_counts_the_others() {
        let mut lines = Lines::default();
        (0..1000).for_each(|line| lines.take(format!("line {line}\n").as_bytes()));
        assert_eq!(lines.kept.len(), LINES);
        assert_eq!(
            lines.news(),
            (
                (996..1000).map(|line| format!("line {line}")).collect(),
                996
            )
        );
        assert_eq!(lines.news(), (vec![], 0));
    }

    #[test]
    fn a_line_without_end_takes_bounded_memory() {
        let mut lines = Lines::default();
        (0..100).for_each(|_| lines.take(&[b'x'; 1000]));
        assert!(lines.partial.capacity() < 8000);
        lines.end_line();
        assert_eq!(lines.kept[0].len(), LINE_CHARS);
    }

    #[test]
    fn last_words_are_an_error_or_a_panic() {
        let words = |lines: &[&str]| {
            let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            last_words(&lines).map(str::to_owned)
        };
        assert_eq!(
            words(&["error: loss is NaN", "bye"]).as_deref(),
            Some("loss is NaN")
        );
        assert_eq!(
            words(&["thread 'main' panicked at a.rs:1:2:", "boom"]).as_deref(),
            Some("boom")
        );
        assert_eq!(words(&["hello"]), None);
    }

    #[test]
    fn a_log_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank0.log");
        let mut log = Log::open(&path).unwrap();
        let chunk = vec![b'x'; 16 << 20];
        (0..9).for_each(|_| log.write(&chunk));
        let bytes = |name: &str| fs::metadata(dir.path().join(name)).unwrap().len();
        assert_eq!(
            (bytes("rank0.log.1"), bytes("rank0.log")),
            (64 << 20, 16 << 20)
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
