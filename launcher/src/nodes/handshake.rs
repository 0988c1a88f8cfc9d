//! The handshake between two processes of a run. Each proves that it knows the run's secret without
//! revealing anything that would help a third to do so.
//!
//! ```text
//! connecting side                                 accepting side
//! greeting, nonce                             ->
//!                                             <-  nonce, proof of (accepts, both nonces, whom)
//! who, proof of (connects, both nonces, who)  ->
//!                                             <-  a byte: accepted
//! ```
//!
//! A proof is a keyed BLAKE3 hash. Data after the handshake is neither encrypted nor signed: the
//! network between the nodes of a run is trusted.
//!
//! A handshake has one deadline, whatever the other side sends. The accepting side never blocks:
//! see [`Door`](super::door::Door).

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Deadline of a handshake.
const LIMIT: Duration = Duration::from_secs(5);

/// A connection ends after this long without an answer.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);

const GREETING: &[u8; 16] = b"spd-launch nodes";

/// Bytes of the greeting and the nonce.
const OPENING: usize = GREETING.len() + 32;

/// Bytes of a name's length and a proof.
const NAMED: usize = 1 + 32;

/// The final byte.
const TAKEN: [u8; 1] = [1];

/// The secret that the processes of a run share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// A new random secret.
    ///
    /// # Errors
    ///
    /// When the operating system has no random bytes.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(random()?))
    }

    /// As hexadecimal text.
    pub(crate) fn hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// From hexadecimal text.
    pub(crate) fn of(hex: &str) -> Option<Self> {
        let bytes = blake3::Hash::from_hex(hex).ok()?;
        Some(Self(*bytes.as_bytes()))
    }

    fn proof(self, side: &str, nonces: &[[u8; 32]; 2], who: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(side.as_bytes());
        hasher.update(&nonces[0]).update(&nonces[1]);
        hasher.update(who.as_bytes()).finalize()
    }
}

/// Connects to a process of the run.
///
/// - `who`: the name of this process
/// - `whom`: the name of the other
///
/// # Errors
///
/// When no process accepts, or it is another one, of the run or not.
pub(crate) fn connect(
    address: SocketAddr,
    secret: Secret,
    (who, whom): (&str, &str),
) -> io::Result<TcpStream> {
    let deadline = Instant::now() + LIMIT;
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(LIMIT))?;
    let own = random()?;
    stream.write_all(&[&GREETING[..], &own].concat())?;
    let [mut other, mut proof] = [[0; 32]; 2];
    read(&stream, &mut other, deadline)?;
    read(&stream, &mut proof, deadline)?;
    let nonces = [own, other];
    check(proof, secret.proof("accepts", &nonces, whom))?;
    let len = u8::try_from(who.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let proof = secret.proof("connects", &nonces, who);
    stream.write_all(&[&[len], who.as_bytes(), proof.as_bytes()].concat())?;
    read(&stream, &mut [0; TAKEN.len()], deadline)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    settle(stream)
}

/// Fills `bytes` by the deadline, even if they arrive one by one.
fn read(mut stream: &TcpStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let silent = || {
        io::Error::new(
            ErrorKind::TimedOut,
            "it accepts the connection and does not answer",
        )
    };
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(silent());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes) {
            Ok(0) => {
                let line = "it closes the connection without an answer";
                return Err(io::Error::new(ErrorKind::UnexpectedEof, line));
            }
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(silent()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The accepting side of a handshake. It never blocks, and its buffer is bounded by the longest
/// message.
#[derive(Debug)]
pub(super) struct Accepting {
    stream: TcpStream,
    /// Bytes received so far.
    heard: Vec<u8>,
    own: [u8; 32],
    deadline: Instant,
}

impl Accepting {
    /// Begins a handshake.
    ///
    /// # Errors
    ///
    /// When the connection has ended, or the operating system has no random bytes.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            heard: Vec::new(),
            own: random()?,
            deadline: Instant::now() + LIMIT,
        })
    }

    /// The file descriptor of its connection, to poll.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Number of bytes received so far.
    pub(super) fn heard(&self) -> usize {
        self.heard.len()
    }

    /// Reads what has arrived; returns the name of the other process once it is proven.
    ///
    /// - `whom`: the name of this process
    ///
    /// # Errors
    ///
    /// When the other side is a stranger, or takes too long.
    pub(super) fn go_on(&mut self, secret: Secret, whom: &str) -> io::Result<Option<String>> {
        while let wanted @ 1.. = self.wanted() {
            let mut piece = [0; NAMED + u8::MAX as usize];
            match self.stream.read(&mut piece[..wanted]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.heard.extend(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let is_late = Instant::now() >= self.deadline;
                    return if is_late { Err(stranger()) } else { Ok(None) };
                }
                Err(error) => return Err(error),
            }
            let greeting = self.heard.iter().zip(GREETING);
            if greeting.filter(|(found, sent)| found != sent).count() > 0 {
                return Err(stranger());
            }
            if self.heard.len() == OPENING {
                let proof = secret.proof("accepts", &self.nonces(), whom);
                // A new connection has room for it.
                self.stream
                    .write_all(&[self.own, *proof.as_bytes()].concat())?;
            }
        }
        let (who, proof) = self.heard[OPENING + 1..]
            .split_last_chunk()
            .ok_or_else(stranger)?;
        let who = String::from_utf8(who.to_vec()).map_err(|_| stranger())?;
        check(*proof, secret.proof("connects", &self.nonces(), &who))?;
        self.stream.write_all(&TAKEN)?;
        Ok(Some(who))
    }

    /// Bytes still to come, as far as known; bytes after them are not the handshake's.
    fn wanted(&self) -> usize {
        let all = match self.heard.get(OPENING) {
            Some(name) => OPENING + NAMED + usize::from(*name),
            None if self.heard.len() == OPENING => OPENING + 1,
            None => OPENING,
        };
        all - self.heard.len()
    }

    fn nonces(&self) -> [[u8; 32]; 2] {
        let mut other = [0; 32];
        other.copy_from_slice(&self.heard[GREETING.len()..OPENING]);
        [other, self.own]
    }

    /// The connection, non-blocking, once the other process is proven.
    ///
    /// # Errors
    ///
    /// When it has ended.
    pub(super) fn settled(self) -> io::Result<TcpStream> {
        settle(self.stream)
    }
}

/// Has the kernel end a connection whose other machine is gone; a process that is merely stopped
/// keeps it.
fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    sockopt::set_socket_keepalive(&stream, true)?;
    #[cfg(target_os = "linux")]
    {
        let every = SILENCE / 6;
        sockopt::set_tcp_keepidle(&stream, every)?;
        sockopt::set_tcp_keepintvl(&stream, every)?;
        sockopt::set_tcp_keepcnt(&stream, 5)?;
        let silence = u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, silence)?;
    }
    Ok(stream)
}

fn check(proof: [u8; 32], expected: blake3::Hash) -> io::Result<()> {
    // Compared in constant time.
    if expected == proof {
        Ok(())
    } else {
        Err(stranger())
    }
}

fn stranger() -> io::Error {
    let line = "it is another process, or not of this run";
    io::Error::new(ErrorKind::PermissionDenied, line)
}

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Runs the accepting side until it has decided.
    fn accept(listener: &TcpListener, secret: Secret, whom: &str) -> io::Result<String> {
        let mut accepting = Accepting::new(listener.accept().unwrap().0)?;
        loop {
            if let Some(who) = accepting.go_on(secret, whom)? {
                return Ok(who);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The results of a handshake for both sides: connecting, accepting.
    fn meet(connects: Secret, accepts: Secret, whom: &str) -> [io::Result<String>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let connected = scope.spawn(move || connect(address, connects, ("rank 3", "rank 1")));
            let accepted = accept(&listener, accepts, whom);
            let connected = connected.join().unwrap();
            [connected.map(|_| String::new()), accepted]
        })
    }

    #[test]
    fn only_processes_of_a_run_are_accepted() {
        let [one, other] = [(); 2].map(|()| Secret::new().unwrap());
        assert_eq!(Secret::of(&one.hex()), Some(one));
        assert_eq!(Secret::of("12"), None);
        let [connected, accepted] = meet(one, one, "rank 1");
        assert!(connected.is_ok());
        assert_eq!(accepted.unwrap(), "rank 3");
        for (secret, whom) in [(other, "rank 1"), (one, "rank 2")] {
            let [connected, accepted] = meet(one, secret, whom);
            let line = "it is another process, or not of this run";
            assert_eq!(connected.unwrap_err().to_string(), line);
            assert!(accepted.is_err());
        }
    }

    #[test]
    fn a_wrong_greeting_is_refused_without_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let secret = Secret::new().unwrap();
        let refused = accept(&listener, secret, "rank 0").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        let mut answer = Vec::new();
        // It is closed with unread data.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }

    #[test]
    fn a_slow_peer_has_one_deadline_for_the_whole_handshake() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let secret = Secret::new().unwrap();
        // A process that answers byte by byte, on the other side too.
        let drip = |mut stream: TcpStream| {
            while stream.write_all(b"s").is_ok() {
                thread::sleep(LIMIT / 10);
            }
        };
        thread::scope(|scope| {
            scope.spawn(move || drip(TcpStream::connect(address).unwrap()));
            let refused = accept(&listener, secret, "rank 0").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
            scope.spawn(|| drip(listener.accept().unwrap().0));
            let refused = connect(address, secret, ("rank 3", "rank 0")).unwrap_err();
            assert_eq!(
                refused.to_string(),
                "it accepts the connection and does not answer"
            );
        });
    }
}
