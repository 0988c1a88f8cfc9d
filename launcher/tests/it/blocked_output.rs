//! A stopped terminal or a pipe that is not read does not block the launcher's supervision and
//! signals.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Action, isatty, tcflow};

use crate::scratch::{Running, Scratch, assert_goes, send, wait_until};

/// The launcher's output, its reader's end, and the path of the former.
struct UnreadOutput {
    writer: OwnedFd,
    _reader: OwnedFd,
    name: PathBuf,
}

fn terminal() -> UnreadOutput {
    let reader = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&reader).unwrap();
    unlockpt(&reader).unwrap();
    let name = ptsname(&reader, Vec::new()).unwrap();
    let name = PathBuf::from(name.into_string().unwrap());
    let writer = open(&name, OFlags::NOCTTY);
    UnreadOutput {
        writer: writer.into(),
        _reader: reader,
        name,
    }
}

fn pipe() -> UnreadOutput {
    let (reader, writer) = std::io::pipe().unwrap();
    let writer = OwnedFd::from(writer);
    let name = PathBuf::from(format!("/proc/self/fd/{}", writer.as_raw_fd()));
    UnreadOutput {
        writer,
        _reader: reader.into(),
        name,
    }
}

fn open(path: &Path, flags: OFlags) -> File {
    let flags = i32::try_from(flags.bits()).unwrap();
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags).open(path).unwrap()
}

impl UnreadOutput {
    /// Keeps it from accepting more: a terminal is stopped, a pipe is filled.
    fn stop(&self) {
        if isatty(&self.writer) {
            return tcflow(&self.writer, Action::OOff).unwrap();
        }
        let mut writer = open(&self.name, OFlags::NONBLOCK);
        while filled(&mut writer, 1 << 12) + filled(&mut writer, 1) > 0 {}
    }
}

/// Bytes accepted, in pieces of this size.
fn filled(writer: &mut File, size: usize) -> usize {
    let (mut bytes, piece) = (0, vec![b'x'; size]);
    loop {
        match writer.write(&piece) {
            Ok(written) => bytes += written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return bytes,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A launcher with this output.
struct Launcher(Running);

impl Launcher {
    fn start(mut command: Command, to: &UnreadOutput) -> Self {
        let stream = || Stdio::from(to.writer.try_clone().unwrap());
        command.stdout(stream()).stderr(stream());
        Self(Running::of(&mut command))
    }

    /// Asks it to stop; returns its exit code, within a time limit.
    fn stopped(&mut self) -> Option<i32> {
        send(self.0.id(), Signal::TERM);
        let mut status = None;
        wait_until("the end of the launcher", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

/// A launcher whose output takes nothing from the start, or from when its rank is up, exits on
/// request.
fn is_heard(stuck: &UnreadOutput, from_start: bool) {
    let scratch = Scratch::new();
    if from_start {
        stuck.stop();
    }
    let mut launcher = Launcher::start(scratch.run("chatty", &[]), stuck);
    let rank = scratch.rank_pid();
    stuck.stop();
    // Long enough for it to have lines to write.
    thread::sleep(Duration::from_millis(600));
    assert_eq!(launcher.stopped(), Some(3));
    assert_goes(rank);
}

#[test]
fn a_stop_works_behind_a_stopped_terminal() {
    is_heard(&terminal(), false);
    is_heard(&terminal(), true);
}

#[test]
fn a_stop_works_behind_an_unread_pipe() {
    is_heard(&pipe(), false);
    is_heard(&pipe(), true);
}

#[test]
fn the_end_of_a_rank_is_seen_behind_a_stopped_terminal() {
    let (scratch, stuck) = (Scratch::new(), terminal());
    stuck.stop();
    let mut launcher = Launcher::start(scratch.run("crash_on", &["--restarts", "2"]), &stuck);
    // Process ids, one an attempt.
    let attempts = || std::fs::read_to_string(scratch.run_dir().join("attempts"));
    let last = || Some(attempts().ok()?.lines().nth(2)?.to_owned());
    wait_until("two restarts", || last().is_some());
    // The launcher has taken note of the end of a process that is gone.
    let last = Path::new("/proc").join(last().unwrap());
    wait_until("the end of the last rank", || !last.try_exists().unwrap());
    // Only output is left, which waits for the terminal until a stop is requested.
    assert!(launcher.0.try_wait().unwrap().is_none());
    assert_eq!(launcher.stopped(), Some(1));
}
