//! A proxy between a launcher and a tracker: passes requests to the server, or simulates faults of
//! networks and servers.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The server gets it, and its answer is returned.
    Through,
    /// No connection is accepted.
    Refused,
    /// The connection is accepted, and the request never answered.
    Silence,
    /// The proxy answers with this status and these headers; the server does not get it.
    Answered(u16, &'static str),
    /// Like `Through`, with this delay.
    Late(Duration),
    /// The server gets it; half of its answer is returned.
    Halved,
    /// The server gets it, and the connection is closed without an answer.
    Lost,
}

/// A proxy that runs until it is dropped.
pub(crate) struct Gate {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    /// The server's address.
    server: SocketAddr,
    fate: Mutex<Fate>,
    is_over: AtomicBool,
}

impl Gate {
    /// A proxy for a server of this machine.
    pub(crate) fn before(server: SocketAddr, fate: Fate) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server,
            fate: Mutex::new(fate),
            is_over: AtomicBool::new(false),
        });
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || of_thread.listen(listener));
        Self { address, shared }
    }

    /// Sets the fate of requests from now on.
    pub(crate) fn set(&self, fate: Fate) {
        *self.shared.fate() = fate;
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn fate(&self) -> std::sync::MutexGuard<'_, Fate> {
        self.fate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(self: Arc<Self>, listener: TcpListener) {
        let address = listener.local_addr().unwrap();
        let mut listener = Some(listener);
        while !self.is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
            if *self.fate() == Fate::Refused {
                listener = None;
                continue;
            }
            // The port may be in use for a moment.
            let Some(open) = listener.take().or_else(|| TcpListener::bind(address).ok()) else {
                continue;
            };
            open.set_nonblocking(true).unwrap();
            while let Ok((client, _)) = open.accept() {
                let shared = Arc::clone(&self);
                thread::spawn(move || {
                    // Either side may disconnect at any time.
                    let _ = shared.serve(client);
                });
            }
            listener = Some(open);
        }
    }

    /// Handles one request of a connection.
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        client.set_nonblocking(false)?;
        let request = message(&mut client)?;
        let fate = *self.fate();
        match fate {
            Fate::Refused => client.shutdown(Shutdown::Both),
            Fate::Silence => {
                while *self.fate() == fate && !self.is_over.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(20));
                }
                client.shutdown(Shutdown::Both)
            }
            Fate::Answered(status, headers) => {
                let answer = format!(
                    "HTTP/1.1 {status} so\r\n{headers}Content-Length: 0\r\nConnection: close\r\n\r\n"
                );
                client.write_all(answer.as_bytes())
            }
            Fate::Through => client.write_all(&ask(self.server, &request)?),
            Fate::Late(time) => {
                thread::sleep(time);
                client.write_all(&ask(self.server, &request)?)
            }
            Fate::Halved => {
                let answer = ask(self.server, &request)?;
                client.write_all(&answer[..answer.len() / 2])
            }
            Fate::Lost => ask(self.server, &request).map(drop),
        }
    }
}

/// Sends a request to a server and returns the answer.
pub(crate) fn ask(server: SocketAddr, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut server = TcpStream::connect(server)?;
    server.write_all(&closing(request))?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer)?;
    Ok(closing(&answer))
}

/// Head and body of a message.
pub(crate) fn message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 1 << 14];
    loop {
        if let Some(head) = head(&bytes) {
            let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
            let mut lines = text.lines();
            let length = lines.find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
            if bytes.len() >= head + length {
                return Ok(bytes);
            }
        }
        match stream.read(&mut piece)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => bytes.extend_from_slice(&piece[..read]),
        }
    }
}

/// The length of a message's head, if it is complete.
fn head(bytes: &[u8]) -> Option<usize> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(end + 4)
}

/// The message with a header that closes its connection.
fn closing(message: &[u8]) -> Vec<u8> {
    let line = message.windows(2).position(|two| two == b"\r\n");
    let (first, rest) = message.split_at(line.map_or(message.len(), |at| at + 2));
    [first, b"Connection: close\r\n", rest].concat()
}
