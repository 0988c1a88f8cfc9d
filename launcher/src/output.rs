//! The output of a child process: logged in full, its last lines kept for error messages.
//!
//! The log is written on its own thread, so that a stuck disk does not block supervision. The queue
//! for the disk is bounded: the process first waits with it, and after a while its output is
//! omitted and counted.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;

use crate::screen::{plain, unstamped};
use crate::threads;
use crate::wait::wait_until;

/// Lines kept: those shown of a dead rank, and the launcher's own about them, for a parent
/// launcher.
const LINES: usize = 2 * SHOWN;

/// Lines shown of a process that died.
pub(crate) const SHOWN: usize = 12;

/// Characters kept of a line.
const LINE_CHARS: usize = 400;

/// A log of this size is renamed `<log>.1`, replacing the previous one, so that a rank that prints
/// for ever does not fill the disk.
const LOG_BYTES: u64 = 64 << 20;

/// Bytes per read.
const PIECE: usize = 1 << 16;

/// Pieces queued for the disk.
const WAITING: usize = 64;

/// How long a process that prints waits for a stuck disk.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait for the last output of a dead rank; a process that it started may hold the pipe
/// open for ever.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The output of a running process.
#[derive(Debug)]
pub(crate) struct Output {
    reader: Option<PipeReader>,
    lines: LastLines,
    log: SyncSender<Vec<u8>>,
    writer: JoinHandle<()>,
    /// Output for which the log has no room, and the time since when.
    held: Option<(Vec<u8>, Instant)>,
    left_out: usize,
}

impl Output {
    /// Starts copying to `log`, and returns the end of the pipe for the process.
    ///
    /// # Errors
    ///
    /// When the log cannot be opened, or no pipe is left.
    pub(crate) fn to_log(log: &Path) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        ioctl_fionbio(&reader, true)?;
        let mut file = Log::open(log)?;
        let (log, pieces): (_, Receiver<Vec<u8>>) = sync_channel(WAITING);
        let write = move || pieces.iter().for_each(|piece| file.write(&piece));
        let thread = threads::spawn("output", write)?;
        let output = Self {
            reader: Some(reader),
            lines: LastLines::default(),
            log,
            writer: thread,
            held: None,
            left_out: 0,
        };
        Ok((output, writer))
    }

    /// The file descriptor to poll; `None` at the end of the output, or while the log has no room.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        let reader = self.reader.as_ref().filter(|_| self.held.is_none());
        reader.map(AsFd::as_fd)
    }

    /// Whether output is waiting for the disk.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Reads a bounded amount of what has arrived.
    pub(crate) fn read(&mut self) {
        if let Some((piece, since)) = self.held.take() {
            self.pass_on(piece, since);
            if self.held.is_some() {
                return;
            }
        }
        let Some(reader) = &mut self.reader else {
            return;
        };
        let mut piece = vec![0; PIECE];
        match reader.read(&mut piece) {
            Ok(0) => self.reader = None,
            Ok(bytes) => {
                piece.truncate(bytes);
                self.lines.take(&piece);
                self.pass_on(piece, Instant::now());
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(_) => self.reader = None,
        }
    }

    /// Passes a piece to the log, or holds it for a while.
    fn pass_on(&mut self, piece: Vec<u8>, since: Instant) {
        if self.left_out > 0 {
            let line = format!(
                "\n({} bytes omitted here: the disk accepted no writes)\n",
                self.left_out
            );
            if self.log.try_send(line.into_bytes()).is_ok() {
                self.left_out = 0;
            }
        }
        let piece = match self.log.try_send(piece) {
            Ok(()) => return,
            Err(TrySendError::Full(piece) | TrySendError::Disconnected(piece)) => piece,
        };
        if self.left_out == 0 && since.elapsed() < PATIENCE {
            self.held = Some((piece, since));
        } else {
            self.left_out += piece.len();
        }
    }

    /// Lines since the last call: the last few, and the number of lines before those.
    pub(crate) fn news(&mut self) -> (Vec<String>, usize) {
        self.lines.news()
    }

    /// The last lines of a process that has exited. Its output is then in the log, unless the disk
    /// is stuck.
    pub(crate) fn last_lines(mut self) -> Vec<String> {
        wait_until(TIMEOUT, || {
            self.read();
            self.reader.is_none() && self.held.is_none()
        });
        let Self {
            mut lines,
            log,
            writer,
            ..
        } = self;
        drop(log);
        wait_until(TIMEOUT, || writer.is_finished());
        lines.end_line();
        lines.kept.into()
    }
}

/// The error of a dead process: its own `error:` line, or else its panic message.
pub(crate) fn last_words(lines: &[String]) -> Option<&str> {
    let error = lines
        .iter()
        .rev()
        .find_map(|line| unstamped(line).strip_prefix("error: "));
    let panicked = || {
        let place = lines
            .iter()
            .rposition(|line| line.contains("panicked at"))?;
        lines.get(place + 1).map(String::as_str)
    };
    error.or_else(panicked)
}

/// A log file of bounded size, and its predecessor.
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

    /// Write errors are ignored: the pipe has to be drained, and a full disk may cost the log but
    /// not the run. A full file ends with a complete line.
    fn write(&mut self, mut piece: &[u8]) {
        if self.bytes >= LOG_BYTES
            && let Some(end) = piece.iter().position(|byte| *byte == b'\n')
        {
            let (last, rest) = piece.split_at(end + 1);
            self.append(last);
            piece = rest;
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            let next = fs::rename(&self.path, older).and_then(|()| Self::open(&self.path));
            (self.file, self.bytes) = next.map_or((None, 0), |next| (next.file, next.bytes));
        }
        self.append(piece);
    }

    fn append(&mut self, piece: &[u8]) {
        // A line that never ends is cut.
        if let Some(file) = &mut self.file
            && self.bytes < 2 * LOG_BYTES
            && file.write_all(piece).is_ok()
        {
            self.bytes += piece.len() as u64;
        }
    }
}

/// The last lines of a stream of bytes.
#[derive(Debug, Default)]
struct LastLines {
    kept: VecDeque<String>,
    fresh: usize,
    partial: Vec<u8>,
}

impl LastLines {
    fn take(&mut self, bytes: &[u8]) {
        // A carriage return also ends a line, or a progress bar would be a single endless line.
        let mut pieces = bytes.split(|byte| matches!(byte, b'\n' | b'\r')).peekable();
        while let Some(piece) = pieces.next() {
            // A character takes at most four bytes.
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
    use std::thread;

    use super::*;

    fn lines(chunks: &[&[u8]]) -> LastLines {
        let mut lines = LastLines::default();
        chunks.iter().for_each(|chunk| lines.take(chunk));
        lines
    }

    #[test]
    fn lines_are_joined_from_pieces() {
        let mut lines = lines(&[b"one\ntw", b"o\n\n10%\r20%\r", b"\xff\x1b[31m", b" end"]);
        lines.end_line();
        assert_eq!(
            Vec::from(lines.kept),
            ["one", "two", "10%", "20%", "\u{fffd} [31m end"]
        );
    }

    #[test]
    fn the_last_lines_are_kept_and_the_others_counted() {
        let mut lines = LastLines::default();
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
        let mut lines = LastLines::default();
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
    fn a_log_is_bounded_and_cuts_no_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank0.log");
        let mut log = Log::open(&path).unwrap();
        let line = [vec![b'x'; (1 << 20) - 1], b"\n".to_vec()].concat();
        let piece = line.repeat(17)[..(16 << 20) + 7].to_vec();
        for _ in 0..5 {
            log.write(&piece);
        }
        let bytes = |name: &str| fs::read(dir.path().join(name)).unwrap();
        let (old, new) = (bytes("rank0.log.1"), bytes("rank0.log"));
        assert_eq!(old.last(), Some(&b'\n'));
        assert_eq!(old.len() + new.len(), 5 * piece.len());
        assert!(old.len() as u64 <= LOG_BYTES + (2 << 20), "{}", old.len());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        // A single line does not fill the disk either.
        for _ in 0..20 {
            log.write(&vec![b'x'; 16 << 20]);
        }
        assert!(bytes("rank0.log").len() as u64 <= 2 * LOG_BYTES + (16 << 20));
    }

    #[test]
    fn output_is_logged_to_the_last_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank0.log");
        let (mut output, mut writer) = Output::to_log(&path).unwrap();
        let printer = thread::spawn(move || {
            for number in 0..100_000 {
                writeln!(writer, "line {number}").unwrap();
            }
            write!(writer, "the end").unwrap();
        });
        while output.reader.is_some() {
            output.read();
        }
        printer.join().unwrap();
        let lines = output.last_lines();
        assert_eq!(lines[LINES - 2..], ["line 99999", "the end"]);
        let logged = fs::read_to_string(&path).unwrap();
        assert_eq!(logged.lines().count(), 100_001);
    }

    #[test]
    fn a_stuck_disk_costs_only_output() {
        let (log, pieces) = sync_channel(1);
        let mut output = Output {
            reader: None,
            lines: LastLines::default(),
            log,
            writer: thread::spawn(|| {}),
            held: None,
            left_out: 0,
        };
        let now = Instant::now();
        output.pass_on(b"one".to_vec(), now);
        output.pass_on(b"two".to_vec(), now);
        assert!(output.is_held());
        output.read();
        assert!(output.is_held());
        output.held = None;
        let Some(long_ago) = now.checked_sub(PATIENCE) else {
            return spd_testing::skip("a machine that has been up for a while");
        };
        output.pass_on(b"two".to_vec(), long_ago);
        output.pass_on(b"three".to_vec(), now);
        assert!(!output.is_held());
        assert_eq!(pieces.recv().unwrap(), b"one");
        output.pass_on(b"four".to_vec(), now);
        let told = b"\n(8 bytes omitted here: the disk accepted no writes)\n";
        assert_eq!(pieces.recv().unwrap(), told);
    }
}
