//! A connection between two processes of a run: each proves to the other that it knows the run's secret, and says nothing that would help
//! a third to do so.
//!
//! ```text
//! connects    greeting, nonce            ->
//!                                        <-   nonce, proof of (accepts, both nonces, whom)                    accepts
//! connects    who, proof of (connects, both nonces, who)   ->
//! ```
//!
//! A proof is a keyed BLAKE3 hash. What follows on the connection is neither hidden nor signed: the network between the nodes of a run is
//! taken to be the run's own.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt;
use rustix::rand::{GetRandomFlags, getrandom};

/// How long the other is waited for at each step.
const STEP: Duration = Duration::from_secs(3);

/// Nobody answers for so long, and the connection ends.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);

const GREETING: &[u8; 16] = b"spd-launch nodes";

/// What all processes of a run know, and nobody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    ///
    /// When the operating system has nothing random to give.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(random()?))
    }

    /// As text.
    pub(crate) fn hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// From its text.
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

/// Connects with a process of the run.
///
/// - `who`: what this process is
/// - `whom`: what the other is
///
/// # Errors
///
/// When nobody is there, or it is another process, of the run or not.
pub(crate) fn connect(
    address: SocketAddr,
    secret: Secret,
    (who, whom): (&str, &str),
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, STEP)?;
    prepare(&stream)?;
    let own = random()?;
    stream.write_all(&[&GREETING[..], &own].concat())?;
    let [mut other, mut proof] = [[0; 32]; 2];
    stream.read_exact(&mut other)?;
    stream.read_exact(&mut proof)?;
    let nonces = [own, other];
    check(proof, secret.proof("accepts", &nonces, whom))?;
    let len = u8::try_from(who.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let proof = secret.proof("connects", &nonces, who);
    stream.write_all(&[&[len], who.as_bytes(), proof.as_bytes()].concat())?;
    settle(stream)
}

/// Takes a connection, if it is one of a process of the run; what that says of itself.
///
/// - `whom`: what this process is
///
/// # Errors
///
/// When it is none, or says nothing.
pub(crate) fn accept(
    mut stream: TcpStream,
    secret: Secret,
    whom: &str,
) -> io::Result<(TcpStream, String)> {
    prepare(&stream)?;
    let mut greeting = [0; GREETING.len()];
    stream.read_exact(&mut greeting)?;
    if greeting != *GREETING {
        return Err(stranger());
    }
    let mut other = [0; 32];
    stream.read_exact(&mut other)?;
    let own = random()?;
    let nonces = [other, own];
    let proof = secret.proof("accepts", &nonces, whom);
    stream.write_all(&[own, *proof.as_bytes()].concat())?;
    let mut len = [0];
    stream.read_exact(&mut len)?;
    let mut who = vec![0; len[0].into()];
    stream.read_exact(&mut who)?;
    let who = String::from_utf8(who).map_err(|_| stranger())?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof)?;
    check(proof, secret.proof("connects", &nonces, &who))?;
    Ok((settle(stream)?, who))
}

/// A process that takes too long to prove itself is none of the run.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(STEP))
}

/// Has the kernel end a connection whose other machine is silent: a process that is merely stopped is not.
fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
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
    let line = "it is another process, or none of this run";
    io::Error::new(ErrorKind::PermissionDenied, line)
}

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// What comes of a meeting: for who connects, and for who accepts.
    fn meet(connects: Secret, accepts: Secret, whom: &str) -> [io::Result<String>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let connected = scope.spawn(move || connect(address, connects, ("rank 3", "rank 1")));
            let accepted = accept(listener.accept().unwrap().0, accepts, whom);
            let connected = connected.join().unwrap();
            [
                connected.map(|_| String::new()),
                accepted.map(|(_, who)| who),
            ]
        })
    }

    #[test]
    fn processes_of_a_run_know_each_other_and_nobody_else() {
        let [one, other] = [(); 2].map(|()| Secret::new().unwrap());
        assert_eq!(Secret::of(&one.hex()), Some(one));
        assert_eq!(Secret::of("12"), None);
        let [connected, accepted] = meet(one, one, "rank 1");
        assert!(connected.is_ok());
        assert_eq!(accepted.unwrap(), "rank 3");
        for (secret, whom) in [(other, "rank 1"), (one, "rank 2")] {
            let [connected, accepted] = meet(one, secret, whom);
            let line = "it is another process, or none of this run";
            assert_eq!(connected.unwrap_err().to_string(), line);
            assert!(accepted.is_err());
        }
    }

    #[test]
    fn what_is_no_greeting_is_refused_without_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let secret = Secret::new().unwrap();
        let refused = accept(listener.accept().unwrap().0, secret, "rank 0").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        let mut answer = Vec::new();
        // It is closed, with what was sent unread.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
}
