//! The listener of a process that other processes of the run connect to. Handshakes run
//! concurrently without blocking, in bounded memory: a stranger that is silent, slow or sends junk
//! delays nobody.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::handshake::{Accepting, Secret};

/// Maximum concurrent handshakes. A further one replaces the one that has sent least.
const MOST: usize = 256;

/// Maximum connections accepted before the open handshakes go on.
const AT_ONCE: usize = 64;

/// A listener and its open handshakes.
#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    secret: Secret,
    /// The name of this process.
    whom: String,
    knocking: Vec<Accepting>,
}

impl Door {
    /// A door for the process named `whom`.
    ///
    /// # Errors
    ///
    /// When the listener is not valid.
    pub(crate) fn new(listener: TcpListener, secret: Secret, whom: String) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            secret,
            whom,
            knocking: Vec::new(),
        })
    }

    /// The file descriptors of the listener and the connections, to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.listener.as_fd()]
            .into_iter()
            .chain(self.knocking.iter().map(Accepting::fd))
    }

    /// Waits for a connection or data, for at most `limit`.
    pub(crate) fn wait(&self, limit: Duration) {
        let fds = self.fds();
        let mut fds: Vec<PollFd<'_>> = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec::try_from(limit).ok();
        // All are tried again, whatever the result.
        let _ = poll(&mut fds, limit.as_ref());
    }

    /// Returns the connections that were proven since the last call, each with the name of its
    /// process. Does not block.
    ///
    /// # Errors
    ///
    /// When the listener fails.
    pub(crate) fn look(&mut self) -> io::Result<Vec<(TcpStream, String)>> {
        for _ in 0..AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.knocking.len() == MOST {
                        self.make_room();
                    }
                    // A connection that has already ended is skipped.
                    self.knocking.extend(Accepting::new(stream));
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => break,
                    // Strangers may hold all file descriptors.
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
                        if !self.knocking.is_empty() =>
                    {
                        self.make_room();
                    }
                    Some(
                        Errno::MFILE
                        | Errno::NFILE
                        | Errno::NOBUFS
                        | Errno::NOMEM
                        | Errno::BADF
                        | Errno::INVAL,
                    ) => return Err(error),
                    // The other side has disconnected.
                    _ => {}
                },
            }
        }
        let mut proven = Vec::new();
        for mut accepting in std::mem::take(&mut self.knocking) {
            match accepting.go_on(self.secret, &self.whom) {
                Ok(None) => self.knocking.push(accepting),
                Ok(Some(who)) => {
                    proven.extend(accepting.settled().map(|stream| (stream, who)));
                }
                // A stranger, or a process that has disconnected.
                Err(_) => {}
            }
        }
        Ok(proven)
    }

    /// Ends the oldest handshake of those that have sent least.
    fn make_room(&mut self) {
        let all = self.knocking.iter().enumerate();
        let least = all.min_by_key(|(_, accepting)| accepting.heard());
        if let Some(at) = least.map(|(at, _)| at) {
            self.knocking.remove(at);
        }
    }
}
