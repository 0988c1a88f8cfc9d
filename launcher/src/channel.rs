//! What a rank tells its launcher while it runs: how far it is, and what became of it.
//!
//! The launcher gives each rank one end of a socket as its standard input. The rank writes messages to it, a line of JSON each; it takes
//! nothing but the end of it, which is the end of the launcher, and the rank's own.

use std::env;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{self, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getpid, kill_process_group};
use serde::{Deserialize, Serialize};
use spd_trainer::Heartbeat;

use crate::failure::Failure;
use crate::nodes::mesh::Peers;
use crate::nodes::wire::{Lines, line};
use crate::threads;

/// Tells a rank that its standard input is this channel.
pub(crate) const KEY: &str = "SPD_CHANNEL";

/// Time between two looks at how far the rank is.
const LOOK: Duration = Duration::from_millis(100);

/// How long a launcher that takes nothing is waited for with what became of the rank.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest line that is taken.
const LONGEST: usize = 64 << 10;

/// The longest that is said of where all ranks are.
const MOST_PEERS: u64 = 1 << 20;

/// What a rank says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// How far it is.
    Beat {
        /// What is going on.
        phase: String,
        /// Finished steps of that.
        step: u64,
        /// Grows with whatever is finished.
        ticks: u64,
        /// The rank that it has been waiting for, for a while.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waits_for: Option<usize>,
        /// How long it has waited for others, in all, in milliseconds.
        #[serde(default)]
        waited_ms: u64,
    },
    /// It leaves on request: where, and what is saved, in words.
    Stopped(String),
    /// It leaves, and this is why.
    Failure(Failure),
}

/// The launcher's end.
#[derive(Debug)]
pub(crate) struct Listener {
    stream: UnixStream,
    lines: Lines,
    is_over: bool,
}

impl Listener {
    /// A channel: the launcher's end, and what becomes the standard input of the rank.
    ///
    /// # Errors
    ///
    /// When there is none to be had.
    pub(crate) fn new() -> io::Result<(Self, Stdio)> {
        let (stream, rank) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        let listener = Self {
            stream,
            lines: Lines::new(LONGEST),
            is_over: false,
        };
        Ok((listener, OwnedFd::from(rank).into()))
    }

    /// What to wait for; nothing once the rank's end is closed.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_over).then(|| self.stream.as_fd())
    }

    /// Tells the rank where it meets the others, before anything else.
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub(crate) fn send(&mut self, peers: &Peers) -> io::Result<()> {
        self.stream.write_all(&line(peers)?)
    }

    /// What has come. A line that is no message is left out.
    pub(crate) fn read(&mut self) -> Vec<Message> {
        let (mut messages, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.is_over = true,
                Ok(bytes) => {
                    messages.extend(self.lines.take::<Message>(&buffer[..bytes]));
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.is_over = true,
            }
            return messages;
        }
    }
}

/// The rank's end.
#[derive(Debug, Clone)]
pub(crate) struct Channel(Arc<Mutex<UnixStream>>);

impl Channel {
    /// The channel to the launcher that started this process, if it was one.
    ///
    /// # Errors
    ///
    /// When standard input is none.
    pub(crate) fn open() -> io::Result<Option<Self>> {
        if env::var_os(KEY).is_none() {
            return Ok(None);
        }
        let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Some(Self(Arc::new(Mutex::new(stream)))))
    }

    /// Where this rank meets the others: what the launcher says before anything else, if there are others.
    ///
    /// # Errors
    ///
    /// When it says nothing of the kind.
    pub(crate) fn peers(&self) -> io::Result<Peers> {
        let stream = self.stream().try_clone()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut line = Vec::new();
        BufReader::new(&stream)
            .take(MOST_PEERS)
            .read_until(b'\n', &mut line)?;
        stream.set_read_timeout(None)?;
        Ok(serde_json::from_slice(&line)?)
    }

    /// Ends this process, with all that it started, as soon as the launcher is gone, however it went.
    ///
    /// # Errors
    ///
    /// When there is no thread to be had.
    pub(crate) fn end_with_launcher(&self) -> io::Result<()> {
        let mut stream = self.stream().try_clone()?;
        let wait = move || {
            loop {
                match stream.read(&mut [0; 64]) {
                    Ok(1..) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => {
                        // It leads a group of its own, where the launcher started it.
                        let _ = kill_process_group(getpid(), Signal::KILL);
                        process::abort();
                    }
                }
            }
        };
        threads::spawn("launcher", wait)?;
        Ok(())
    }

    /// Tells how far the rank is, from now on.
    ///
    /// # Errors
    ///
    /// When there is no thread to be had.
    pub(crate) fn beat(&self, heartbeat: Arc<Heartbeat>) -> io::Result<()> {
        let channel = self.clone();
        let mut last = None;
        let tell = move || {
            loop {
                let beat = heartbeat.newest();
                // The first one says that the rank is up.
                if last != Some(beat) {
                    channel.send_if_room(&Message::Beat {
                        phase: beat.phase.to_owned(),
                        step: beat.step,
                        ticks: beat.ticks,
                        waits_for: beat.waits_for,
                        waited_ms: u64::try_from(beat.waited.as_millis()).unwrap_or(u64::MAX),
                    });
                    last = Some(beat);
                }
                thread::sleep(LOOK);
            }
        };
        threads::spawn("heartbeat", tell)?;
        Ok(())
    }

    /// Sends what must not be lost. A launcher that takes nothing is waited for a while.
    pub(crate) fn send(&self, message: &Message) {
        // What cannot be told is told by the end of the process.
        let _ = line(message).map(|line| self.stream().write_all(&line));
    }

    /// Sends what the next one makes good for: a stopped launcher stops no rank.
    fn send_if_room(&self, message: &Message) {
        let has_room = {
            let stream = self.stream();
            let mut fds = [PollFd::new(&*stream, PollFlags::OUT)];
            poll(&mut fds, Some(&Timespec::default())) == Ok(1)
        };
        if has_room {
            self.send(message);
        }
    }

    fn stream(&self) -> std::sync::MutexGuard<'_, UnixStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn pair() -> (Listener, Channel) {
        let (stream, rank) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let listener = Listener {
            stream,
            lines: Lines::new(LONGEST),
            is_over: false,
        };
        (listener, Channel(Arc::new(Mutex::new(rank))))
    }

    fn beat(step: u64) -> Message {
        Message::Beat {
            phase: "train".to_owned(),
            step,
            ticks: step + 1,
            waits_for: None,
            waited_ms: 0,
        }
    }

    #[test]
    fn messages_arrive_whole_and_junk_is_left_out() {
        let (mut listener, channel) = pair();
        assert!(listener.read().is_empty());
        channel.send(&beat(3));
        channel.stream().write_all(b"junk\n{\"beat\":").unwrap();
        assert_eq!(listener.read(), [beat(3)]);
        let rest = b"{\"phase\":\"train\",\"step\":4,\"ticks\":5}}\n";
        channel.stream().write_all(rest).unwrap();
        assert_eq!(listener.read(), [beat(4)]);
        channel.send(&Message::Stopped("saved".to_owned()));
        drop(channel);
        assert_eq!(listener.read(), [Message::Stopped("saved".to_owned())]);
        assert!(listener.fd().is_none());
    }

    #[test]
    fn a_line_without_end_takes_bounded_memory() {
        let (mut listener, channel) = pair();
        for _ in 0..100 {
            channel.stream().write_all(&[b'x'; 4096]).unwrap();
            listener.read();
        }
        assert!(listener.lines.pending() <= LONGEST);
    }

    #[test]
    fn a_launcher_that_takes_nothing_stops_no_beat() {
        let (_listener, channel) = pair();
        let started = Instant::now();
        for step in 0..100_000 {
            channel.send_if_room(&beat(step));
        }
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
