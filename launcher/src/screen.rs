//! The only module that writes to the terminal: results to stdout, everything else to stderr.
//!
//! A separate thread writes, so that no other thread waits for a stopped terminal (Ctrl-S) or a
//! pipe that is not read: a launcher in front of one still handles signals and supervises its
//! ranks. The queue is bounded: progress lines that do not fit are omitted and counted, and only
//! the newest live lines are kept. Only [`finish`], at the end, waits.
//!
//! A reader that went away (`| head`, a closed terminal) does not stop a run, so write errors are
//! ignored.

use std::collections::VecDeque;
use std::env;
use std::io::{self, IsTerminal, Write};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use serde_json::Value;
use spd_files::foreign::is_obeyed;

use crate::threads;

mod style;

use style::TextKind;

pub(crate) use style::{Style, unstamped};

/// Bytes that may be queued before progress lines are omitted.
const MOST_WAITING: usize = 64 << 10;

/// Bytes per write, so that a slow terminal is seen to accept some.
const PIECE: usize = 1 << 10;

/// How long to wait at the end for a stopped terminal, once a stop was requested.
const TIMEOUT: Duration = Duration::from_secs(2);

static SCREEN: LazyLock<Screen> = LazyLock::new(Screen::default);

/// Writes a result: tables, summaries, reports.
pub(crate) fn result(text: &str) {
    write(Stream::Stdout, TextKind::Result, text);
}

/// Writes a result as a JSON object on one line.
///
/// # Errors
///
/// When it cannot be serialized.
pub(crate) fn object(object: &impl Serialize) -> anyhow::Result<()> {
    let line = serde_json::to_string(object).context("a result as JSON")?;
    result(&format!("{line}\n"));
    Ok(())
}

/// Writes a result: as a table and words, or in JSON as words and an `object` with the same
/// content.
pub(crate) fn result_of(table: &str, words: &str, object: Value) {
    if Style::chosen().json {
        let line = Style::result_of(&steady(words), object);
        SCREEN.change(|state| state.push(Stream::Stdout, line));
    } else {
        result(&format!("{table}{words}"));
    }
}

/// Writes the plan.
pub(crate) fn plan(text: &str) {
    write(Stream::Stdout, TextKind::Plan, text);
}

/// Writes a line about progress or events.
pub(crate) fn note(line: &str) {
    write(Stream::Stderr, TextKind::Note, &format!("{line}\n"));
}

/// Writes a line about how the command ended.
pub(crate) fn end(line: &str) {
    write(Stream::Stderr, TextKind::End, &format!("{line}\n"));
}

/// Writes a line for `--verbose`.
pub(crate) fn detail(line: &str) {
    write(Stream::Stderr, TextKind::Detail, &format!("{line}\n"));
}

fn write(to: Stream, kind: TextKind, text: &str) {
    if let Some(text) = Style::chosen().text(kind, &steady(text)) {
        SCREEN.change(|state| state.push(to, text));
    }
}

/// The first error.
static FIRST_ERROR: OnceLock<String> = OnceLock::new();

/// Writes an error on one line. Newlines in paths are escaped, since they would begin another
/// error.
pub(crate) fn error(line: &str) {
    let line = one(line);
    let _ = FIRST_ERROR.set(line.clone());
    write(Stream::Stderr, TextKind::Error, &format!("error: {line}\n"));
}

/// The first error line, if any.
pub(crate) fn first_error() -> Option<&'static str> {
    FIRST_ERROR.get().map(String::as_str)
}

/// Writes a progress line, which is omitted when the terminal accepts no more.
pub(crate) fn progress(line: &str) {
    if let Some(line) = Style::chosen().text(TextKind::Note, &steady(&format!("{line}\n"))) {
        SCREEN.change(|state| state.push_if_room(line));
    }
}

/// Replaces the live lines, which are below everything else.
pub(crate) fn live(lines: Vec<String>) {
    let lines: Vec<String> = lines.iter().map(|line| steady(line)).collect();
    SCREEN.change(|state| {
        state.live_is_new |= state.live != lines;
        state.live = lines;
    });
}

/// Whether there is a terminal for live lines.
pub(crate) fn is_live() -> bool {
    Style::chosen().draws()
        && io::stderr().is_terminal()
        && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Width of a live line.
pub(crate) fn live_columns() -> usize {
    size().1.saturating_sub(1)
}

/// Width of a line of a result; `None` if it does not go to a terminal.
pub(crate) fn result_columns() -> Option<usize> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col.into()).filter(|columns| *columns > 0)
}

/// Waits until everything is written; if the terminal accepts nothing, only until the user `asked`
/// to stop, and a little longer.
pub(crate) fn finish(asked: impl Fn() -> bool) {
    SCREEN.finish(asked, TIMEOUT);
}

/// Escapes every control character but newlines, so that no path or file content can move the
/// cursor or colour the terminal.
fn steady(text: &str) -> String {
    let mut steady = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_obeyed(letter) && letter != '\n' {
            steady.extend(letter.escape_default());
        } else {
            steady.push(letter);
        }
    }
    steady
}

/// A message on one line, whatever paths it contains.
fn one(line: &str) -> String {
    line.trim_end_matches('\n').replace('\n', "\\n")
}

/// Text from elsewhere, with spaces for control characters, which could move the cursor, colour the
/// terminal or break a table.
pub(crate) fn plain(text: &str) -> String {
    text.replace(is_obeyed, " ")
}

/// A stream of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

/// The queue of the writing thread.
#[derive(Default)]
struct Screen {
    state: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// In the order of writing.
    waiting: VecDeque<(Stream, String)>,
    /// Bytes in `waiting`.
    bytes: usize,
    /// Progress lines omitted since the last one that was queued.
    left_out: usize,
    live: Vec<String>,
    /// Whether the live lines differ from those on the terminal.
    live_is_new: bool,
    /// Live lines on the terminal.
    drawn: usize,
    /// Whether the thread is writing.
    is_writing: bool,
    /// Pieces that the terminal has accepted.
    taken: u64,
    has_thread: bool,
}

impl Screen {
    fn state(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue and wakes the thread.
    fn change(&'static self, change: impl FnOnce(&mut Queue)) {
        let mut state = self.state();
        change(&mut state);
        let starts = !std::mem::replace(&mut state.has_thread, true);
        drop(state);
        self.changed.notify_all();
        if starts {
            let started = threads::spawn("screen", || {
                loop {
                    self.write_next(put);
                }
            });
            // If the thread cannot start, the caller writes.
            if started.is_err() {
                self.state().has_thread = false;
                while self.state().has_work() {
                    self.write_next(put);
                }
            }
        }
    }

    /// Waits for queued text, and writes it.
    fn write_next(&self, mut put: impl FnMut(Stream, &[u8])) {
        let mut state = self.state();
        while !state.has_work() {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let texts = state.take();
        state.is_writing = true;
        drop(state);
        for (to, text) in texts {
            for piece in text.as_bytes().chunks(PIECE) {
                put(to, piece);
                self.state().taken += 1;
                self.changed.notify_all();
            }
        }
        self.state().is_writing = false;
        self.changed.notify_all();
    }

    fn finish(&self, asked: impl Fn() -> bool, limit: Duration) {
        let mut state = self.state();
        let (mut taken, mut since) = (state.taken, Instant::now());
        while state.is_writing || state.has_work() {
            let look = Duration::from_millis(50);
            let waited = self.changed.wait_timeout(state, look);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.taken != taken {
                (taken, since) = (state.taken, Instant::now());
            } else if since.elapsed() >= limit && asked() {
                return;
            }
        }
    }
}

impl Queue {
    fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.left_out > 0 || self.live_is_new
    }

    fn push(&mut self, to: Stream, text: String) {
        self.tell_left_out();
        self.bytes += text.len();
        self.waiting.push_back((to, text));
    }

    fn push_if_room(&mut self, line: String) {
        if self.bytes + line.len() > MOST_WAITING {
            self.left_out += 1;
        } else {
            self.push(Stream::Stderr, line);
        }
    }

    fn tell_left_out(&mut self) {
        let lines = std::mem::take(&mut self.left_out);
        if lines > 0 {
            let line =
                format!("({lines} progress lines omitted here: the terminal accepted no output)\n");
            self.bytes += line.len();
            self.waiting.push_back((Stream::Stderr, line));
        }
    }

    /// The text to write now: the queue, which replaces the live lines, and the new live lines
    /// below it.
    fn take(&mut self) -> Vec<(Stream, String)> {
        self.tell_left_out();
        let mut texts = Vec::new();
        if self.drawn > 0 {
            let lines_above = "\u{1b}[1A\u{1b}[2K".repeat(self.drawn - 1);
            texts.push((Stream::Stderr, format!("\r\u{1b}[2K{lines_above}")));
        }
        texts.extend(self.waiting.drain(..));
        let (rows, columns) = size();
        let lines = fitting(&self.live, rows, columns);
        if !lines.is_empty() {
            texts.push((Stream::Stderr, lines.join("\n")));
        }
        (self.bytes, self.drawn, self.live_is_new) = (0, lines.len(), false);
        texts
    }
}

/// The live lines that fit a terminal of `rows` and `columns`: always the last one, none on two
/// rows.
fn fitting(lines: &[String], rows: usize, columns: usize) -> Vec<String> {
    let Some((last, others)) = lines.split_last() else {
        return Vec::new();
    };
    let others = others.iter().take(rows.saturating_sub(2));
    let cut = |line: &String| line.chars().take(columns.saturating_sub(1)).collect();
    others.chain([last]).map(cut).collect()
}

/// Rows and columns of the terminal.
fn size() -> (usize, usize) {
    match tcgetwinsize(io::stderr()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => (24, 80),
    }
}

fn put(to: Stream, bytes: &[u8]) {
    let _ = match to {
        Stream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        Stream::Stderr => io::stderr().lock().write_all(bytes),
    };
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Everything that is written next.
    fn written(screen: &Screen) -> String {
        let mut text = Vec::new();
        screen.write_next(|_, bytes| text.extend(bytes));
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn control_characters_of_foreign_text_are_removed() {
        assert_eq!(
            plain("\u{1b}[31mred\ttab\nline\u{202e}"),
            " [31mred tab line "
        );
        assert_eq!(
            steady("no \u{1b}[31mred.toml\r\u{9b}2J\u{202e}\nnext"),
            "no \\u{1b}[31mred.toml\\r\\u{9b}2J\\u{202e}\nnext"
        );
    }

    #[test]
    fn omitted_progress_lines_are_counted() {
        let screen = Screen::default();
        let line = "x".repeat(MOST_WAITING / 4 - 1) + "\n";
        for _ in 0..7 {
            screen.state().push_if_room(line.clone());
        }
        screen.state().push(Stream::Stdout, "the end\n".to_owned());
        let told = "(3 progress lines omitted here: the terminal accepted no output)\n";
        assert_eq!(written(&screen), line.repeat(4) + told + "the end\n");
        screen.state().push_if_room("again\n".to_owned());
        assert_eq!(written(&screen), "again\n");
    }

    #[test]
    fn live_lines_stay_below_the_others() {
        let screen = Screen::default();
        let live = |lines: &[&str]| {
            let mut state = screen.state();
            state.live = lines.iter().map(|line| (*line).to_owned()).collect();
            state.live_is_new = true;
        };
        live(&["one", "two"]);
        assert_eq!(written(&screen), "one\ntwo");
        screen.state().push(Stream::Stderr, "note\n".to_owned());
        let erased = "\r\u{1b}[2K\u{1b}[1A\u{1b}[2K";
        assert_eq!(written(&screen), format!("{erased}note\none\ntwo"));
        live(&["three"]);
        assert_eq!(written(&screen), format!("{erased}three"));
        live(&[]);
        assert_eq!(written(&screen), "\r\u{1b}[2K");
        assert!(!screen.state().has_work());
    }

    #[test]
    fn live_lines_fit_the_terminal() {
        let lines = ["first", "second", "third", "all of them"].map(str::to_owned);
        assert_eq!(fitting(&lines, 4, 6), ["first", "secon", "all o"]);
        assert_eq!(fitting(&lines, 1, 80), ["all of them"]);
    }

    #[test]
    fn finish_waits_for_a_slow_terminal() {
        let screen = Screen::default();
        screen.state().push(Stream::Stdout, "x".repeat(5 * PIECE));
        let slow = Duration::from_millis(60);
        thread::scope(|scope| {
            scope.spawn(|| screen.write_next(|_, _| thread::sleep(slow)));
            screen.finish(|| true, 2 * slow);
        });
        assert!(!screen.state().has_work() && screen.state().taken == 5);
    }

    #[test]
    fn finish_gives_up_on_a_stopped_terminal_after_a_stop() {
        let screen = Screen::default();
        screen.state().push(Stream::Stdout, "the end".to_owned());
        let limit = Duration::from_millis(60);
        let started = Instant::now();
        screen.finish(|| started.elapsed() > 3 * limit, limit);
        assert!(started.elapsed() > 3 * limit);
        assert!(screen.state().has_work());
    }
}
