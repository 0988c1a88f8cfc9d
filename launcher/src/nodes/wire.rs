//! Messages between two processes, each a line of JSON.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes queued for a peer that does not read. Periodic messages are then skipped.
const FULL: usize = 256 << 10;

/// The longest line between launchers, in bytes: a run file, or the last lines of some ranks.
const LONGEST: usize = 4 << 20;

/// A message as a line.
///
/// # Errors
///
/// When it cannot be serialized.
pub(crate) fn line<M: Serialize>(message: &M) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// A launcher's end of a connection to another one, or to a rank. It never blocks.
#[derive(Debug)]
pub(crate) struct Wire<S = TcpStream> {
    stream: S,
    /// The bytes of a line that is not whole.
    partial: Vec<u8>,
    /// The most that a line may have.
    longest: usize,
    out: Vec<u8>,
    /// Why the connection has ended.
    end: Option<String>,
}

impl Wire {
    /// Wraps a connection.
    ///
    /// # Errors
    ///
    /// When it has ended.
    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::of(stream, LONGEST))
    }
}

impl<S: Read + Write + AsFd> Wire<S> {
    /// Wraps a stream that does not block, for lines of at most `longest` bytes.
    pub(crate) fn of(stream: S, longest: usize) -> Self {
        Self {
            stream,
            partial: Vec::new(),
            longest,
            out: Vec::new(),
            end: None,
        }
    }

    /// The file descriptor to poll; `None` once it has ended.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.end.is_none().then(|| self.stream.as_fd())
    }

    /// Bytes of an incomplete line.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.partial.len()
    }

    /// Why it has ended, if it has.
    pub(crate) fn end(&self) -> Option<&str> {
        self.end.as_deref()
    }

    /// The messages that have arrived.
    pub(crate) fn read<M: DeserializeOwned>(&mut self) -> Vec<M> {
        self.flush();
        let (mut messages, mut buffer) = (Vec::new(), [0; 4096]);
        while self.end.is_none() {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.end = Some("it has ended".to_owned()),
                Ok(bytes) => messages.extend(self.take(&buffer[..bytes])),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => self.end = Some(ended(&error)),
            }
        }
        messages
    }

    /// The messages that these bytes complete. Invalid lines are skipped.
    fn take<M: DeserializeOwned>(&mut self, bytes: &[u8]) -> Vec<M> {
        self.partial.extend(bytes);
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else {
            if self.partial.len() > self.longest {
                self.partial.clear();
            }
            return Vec::new();
        };
        let whole: Vec<u8> = self.partial.drain(..=end).collect();
        let lines = whole.split(|byte| *byte == b'\n');
        lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect()
    }

    /// Sends a message, or queues it.
    pub(crate) fn send<M: Serialize>(&mut self, message: &M) {
        match line(message) {
            Ok(line) => self.out.extend(line),
            Err(error) => self.end = Some(error.to_string()),
        }
        self.flush();
    }

    /// Sends a message that the next one replaces, unless the queue is too long.
    pub(crate) fn send_if_room<M: Serialize>(&mut self, message: &M) {
        if self.out.len() < FULL {
            self.send(message);
        }
    }

    /// Waits until the queue is sent, for at most `limit`.
    pub(crate) fn finish(mut self, limit: Duration) {
        let began = Instant::now();
        while !self.out.is_empty() && self.end.is_none() && began.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(5));
            self.flush();
        }
    }

    fn flush(&mut self) {
        while !self.out.is_empty() && self.end.is_none() {
            match self.stream.write(&self.out) {
                Ok(bytes) => drop(self.out.drain(..bytes)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => self.end = Some(ended(&error)),
            }
        }
    }
}

/// The end of a connection, in words: with unread data, it ends by a reset.
fn ended(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "it has ended".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn lines_are_assembled_and_junk_is_skipped() {
        let mut wire = Wire::of(UnixStream::pair().unwrap().0, 10);
        assert_eq!(wire.take::<u32>(b"1\n2"), [1]);
        assert_eq!(wire.take::<u32>(b"3\njunk\n4\n5"), [23, 4]);
        assert!(wire.take::<u32>(b"00000000000").is_empty());
        assert_eq!(wire.pending(), 0);
        assert_eq!(wire.take::<u32>(b"7\n"), [7]);
    }

    #[test]
    fn messages_are_queued_for_a_slow_reader() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = Wire::new(listener.accept().unwrap().0).unwrap();
        let mut near = Wire::new(near).unwrap();
        let words = "x".repeat(1 << 20);
        for _ in 0..8 {
            near.send(&words);
        }
        assert!(!near.out.is_empty());
        let mut count = 0;
        while count < 8 {
            count += far.read::<String>().len();
            near.read::<String>();
        }
        near.send_if_room(&1);
        near.finish(Duration::from_secs(1));
        while far.end().is_none() {
            far.read::<u32>();
        }
        assert_eq!(far.end(), Some("it has ended"));
        assert!(far.fd().is_none());
    }
}
