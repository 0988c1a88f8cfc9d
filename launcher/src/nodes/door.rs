//! The port at which processes of a run meet one, and strangers knock. All handshakes go on side by side, nothing waits for any of them, and
//! what is held of them is bounded: one that is silent, drips or sends what it likes is in nobody's way.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::handshake::{Accepting, Secret};

/// Handshakes that go on at once. One more takes the place of the one that has said least.
const MOST: usize = 256;

/// Connections that are taken before those that are there go on.
const AT_ONCE: usize = 64;

/// A listener, and the handshakes of those that have come.
#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    secret: Secret,
    /// The name of this process.
    whom: String,
    knocking: Vec<Accepting>,
}

impl Door {
    /// Of a process that is called `whom`.
    ///
    /// # Errors
    ///
    /// When the listener is none.
    pub(crate) fn new(listener: TcpListener, secret: Secret, whom: String) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            secret,
            whom,
            knocking: Vec::new(),
        })
    }

    /// The listener and the connections, to wait for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.listener.as_fd()]
            .into_iter()
            .chain(self.knocking.iter().map(Accepting::fd))
    }

    /// Waits until somebody knocks or says something, or for this long.
    pub(crate) fn wait(&self, limit: Duration) {
        let fds = self.fds();
        let mut fds: Vec<PollFd<'_>> = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // All are looked at again, however it ends.
        let _ = poll(&mut fds, Some(&limit));
    }

    /// Returns the connections that were proven since the last look, each with the name of its process. Nothing waits.
    ///
    /// # Errors
    ///
    /// When the listener is broken.
    pub(crate) fn look(&mut self) -> io::Result<Vec<(TcpStream, String)>> {
        for _ in 0..AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.knocking.len() == MOST {
                        self.make_room();
                    }
                    // A connection that has ended already is left out.
                    self.knocking.extend(Accepting::new(stream));
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => break,
                    // Strangers hold all files that there are.
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
                    // The caller went away again.
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
                // A stranger, or one that is gone again.
                Err(_) => {}
            }
        }
        Ok(proven)
    }

    /// Ends the handshake of one that has said least, the first of them.
    fn make_room(&mut self) {
        let all = self.knocking.iter().enumerate();
        let least = all.min_by_key(|(_, accepting)| accepting.heard());
        if let Some(at) = least.map(|(at, _)| at) {
            self.knocking.remove(at);
        }
    }
}
