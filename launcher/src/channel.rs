//! The channel from a rank to its launcher: progress, failures and the end of the run.
//!
//! The launcher gives each rank one end of a socket as its standard input. The rank writes messages
//! to it, each a line of JSON. Its end of file means that the launcher is gone, and the rank then
//! ends too.

use std::env;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{self, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getpid, kill_process_group};
use serde::{Deserialize, Serialize};
use spd_trainer::Heartbeat;

use crate::failure::Failure;
use crate::nodes::mesh::Peers;
use crate::nodes::wire::{Wire, line};
use crate::threads;

/// Environment variable that tells a rank that its standard input is this channel.
pub(crate) const KEY: &str = "SPD_CHANNEL";

/// Interval between two reads of the heartbeat.
const LOOK: Duration = Duration::from_millis(100);

/// A rank without progress for this long asks whether it waits for a disk.
const STILL: Duration = Duration::from_secs(1);

/// How long a rank waits for a stopped launcher to take its last message.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest line that is read, in bytes.
const LONGEST: usize = 64 << 10;

/// The longest message with the addresses of all ranks, in bytes.
const MOST_PEERS: u64 = 1 << 20;

/// A message of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// Progress.
    Beat {
        /// The current phase.
        phase: String,
        /// Finished steps of the phase.
        step: u64,
        /// Grows with every bit of progress.
        ticks: u64,
        /// The rank that it has been waiting for, for a while.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waits_for: Option<usize>,
        /// Total time that it has waited for other ranks, in milliseconds.
        #[serde(default)]
        waited_ms: u64,
        /// Whether it makes no progress while one of its threads waits for a disk or a driver.
        #[serde(default)]
        waits_for_disk: bool,
    },
    /// It exits on request: where it stopped and what is saved, in words.
    Stopped(String),
    /// It exits because of this failure.
    Failure(Failure),
}

/// The launcher's end.
pub(crate) type Listener = Wire<UnixStream>;

/// Creates a channel: the launcher's end, and the rank's standard input.
///
/// # Errors
///
/// When the operating system has no sockets left.
pub(crate) fn pair() -> io::Result<(Listener, Stdio)> {
    let (stream, rank) = UnixStream::pair()?;
    stream.set_nonblocking(true)?;
    Ok((Wire::of(stream, LONGEST), OwnedFd::from(rank).into()))
}

/// The rank's end.
#[derive(Debug, Clone)]
pub(crate) struct Channel(Arc<Mutex<UnixStream>>);

impl Channel {
    /// The channel to the launcher that started this process, if one did.
    ///
    /// # Errors
    ///
    /// When standard input is not a socket.
    pub(crate) fn open() -> io::Result<Option<Self>> {
        if env::var_os(KEY).is_none() {
            return Ok(None);
        }
        let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Some(Self(Arc::new(Mutex::new(stream)))))
    }

    /// The addresses of the other ranks, the launcher's first message if there are any.
    ///
    /// # Errors
    ///
    /// When the first message is another.
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

    /// Starts a thread that ends this process and its children as soon as the launcher is gone.
    ///
    /// # Errors
    ///
    /// When the thread cannot start.
    pub(crate) fn end_with_launcher(&self) -> io::Result<()> {
        let mut stream = self.stream().try_clone()?;
        let wait = move || {
            loop {
                match stream.read(&mut [0; 64]) {
                    Ok(1..) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => {
                        // A rank started by the launcher leads its own process group.
                        let _ = kill_process_group(getpid(), Signal::KILL);
                        process::abort();
                    }
                }
            }
        };
        threads::spawn("launcher", wait)?;
        Ok(())
    }

    /// Starts a thread that reports the heartbeat from now on.
    ///
    /// # Errors
    ///
    /// When the thread cannot start.
    pub(crate) fn beat(&self, heartbeat: Arc<Heartbeat>) -> io::Result<()> {
        let channel = self.clone();
        let mut last = None;
        let mut progressed = Instant::now();
        let tell = move || {
            loop {
                let beat = heartbeat.newest();
                if last.is_none_or(|(last, _)| last != beat) {
                    progressed = Instant::now();
                }
                let waits_for_disk = progressed.elapsed() >= STILL && threads::wait_for_disk();
                // The first one says that the rank is up.
                if last != Some((beat, waits_for_disk)) {
                    channel.send_if_room(&Message::Beat {
                        phase: beat.phase.to_owned(),
                        step: beat.step,
                        ticks: beat.ticks,
                        waits_for: beat.waits_for,
                        waited_ms: u64::try_from(beat.waited.as_millis()).unwrap_or(u64::MAX),
                        waits_for_disk,
                    });
                    last = Some((beat, waits_for_disk));
                }
                thread::sleep(LOOK);
            }
        };
        threads::spawn("heartbeat", tell)?;
        Ok(())
    }

    /// Sends a message that must not be lost. Waits a while for a launcher that does not read.
    pub(crate) fn send(&self, message: &Message) {
        // If it fails, the exit of the process says enough.
        let _ = line(message).map(|line| self.stream().write_all(&line));
    }

    /// Sends a message that the next one replaces, unless that would block: a stopped launcher
    /// stops no rank.
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
    use super::*;

    fn ends() -> (Listener, Channel) {
        let (stream, rank) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let listener = Wire::of(stream, LONGEST);
        (listener, Channel(Arc::new(Mutex::new(rank))))
    }

    fn beat(step: u64) -> Message {
        Message::Beat {
            phase: "train".to_owned(),
            step,
            ticks: step + 1,
            waits_for: None,
            waited_ms: 0,
            waits_for_disk: false,
        }
    }

    #[test]
    fn messages_arrive_whole_and_junk_is_skipped() {
        let (mut listener, channel) = ends();
        assert!(listener.read::<Message>().is_empty());
        channel.send(&beat(3));
        channel.stream().write_all(b"junk\n{\"beat\":").unwrap();
        assert_eq!(listener.read::<Message>(), [beat(3)]);
        let rest = b"{\"phase\":\"train\",\"step\":4,\"ticks\":5}}\n";
        channel.stream().write_all(rest).unwrap();
        assert_eq!(listener.read::<Message>(), [beat(4)]);
        channel.send(&Message::Stopped("saved".to_owned()));
        drop(channel);
        assert_eq!(
            listener.read::<Message>(),
            [Message::Stopped("saved".to_owned())]
        );
        assert!(listener.fd().is_none());
    }

    #[test]
    fn a_line_without_end_takes_bounded_memory() {
        let (mut listener, channel) = ends();
        for _ in 0..100 {
            channel.stream().write_all(&[b'x'; 4096]).unwrap();
            listener.read::<Message>();
        }
        assert!(listener.pending() <= LONGEST);
    }

    #[test]
    fn a_stopped_launcher_blocks_no_heartbeat() {
        let (_listener, channel) = ends();
        let started = Instant::now();
        for step in 0..100_000 {
            channel.send_if_room(&beat(step));
        }
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
