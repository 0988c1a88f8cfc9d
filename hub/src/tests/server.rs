//! A hub of one repository on this machine, controlled by a test.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ring::digest;

/// The commit of the repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// Path and query.
    pub(crate) path: String,
    /// The first byte of the range.
    pub(crate) start: usize,
    /// `Authorization`.
    pub(crate) token: Option<String>,
    /// Number of earlier requests of this path.
    pub(crate) number: usize,
}

/// The answer to a request.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// The right answer.
    Right,
    /// A status, and header lines.
    Status(u16, String),
    /// These bytes in place of the file, or of the listing.
    Other(Vec<u8>),
    /// The head, so many bytes, and a closed connection.
    Cut(usize),
    /// The head, so many bytes, and then silence.
    Silent(usize),
    /// The head, and then a byte in each such time.
    Dripped(Duration),
    /// The whole file, for any range.
    FromTheStart,
}

/// The server; it lives as long as the test.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

/// A file of the repository: its name, its bytes, and whether it is stored outside of Git.
pub(crate) type Stored = (&'static str, Vec<u8>, bool);

impl Server {
    /// Serves `files` as every repository; `answer` chooses the faults.
    pub(crate) fn start(
        files: Vec<Stored>,
        answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::<Asked>::new()));
        let (all, shared) = (Arc::clone(&asked), Arc::new((files, answer)));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (all, shared) = (Arc::clone(&all), Arc::clone(&shared));
                thread::spawn(move || {
                    let Some(mut asked) = read(&stream) else {
                        return;
                    };
                    {
                        let mut all = all.lock().unwrap();
                        let same = all.iter().filter(|other| other.path == asked.path);
                        asked.number = same.count();
                        all.push(asked.clone());
                    }
                    let answer = (shared.1)(&asked);
                    // The client may close first.
                    let _ = write(stream, &asked, &shared.0, answer);
                });
            }
        });
        Self { endpoint, asked }
    }

    /// All requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn read(mut stream: &TcpStream) -> Option<Asked> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let field = |name: &str| {
        let mut lines = head.lines().filter_map(|line| line.split_once(": "));
        lines.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then(|| value.to_owned()))
    };
    let range = field("Range");
    let start = range.and_then(|range| {
        let start = range.strip_prefix("bytes=")?.strip_suffix('-')?;
        start.parse().ok()
    });
    Some(Asked {
        path: head.split(' ').nth(1)?.to_owned(),
        start: start.unwrap_or(0),
        token: field("Authorization"),
        number: 0,
    })
}

fn write(
    mut stream: TcpStream,
    asked: &Asked,
    files: &[Stored],
    answer: Answer,
) -> std::io::Result<()> {
    let listing = asked.path.starts_with("/api/");
    let name = asked.path.rsplit('/').next().unwrap_or_default();
    let file = files.iter().find(|(file, ..)| *file == name);
    let whole = match file {
        _ if listing => self::listing(files).into_bytes(),
        Some((_, bytes, _)) => bytes.clone(),
        None => Vec::new(),
    };
    let (mut status, mut lines, mut body) = (200, String::new(), whole);
    let (mut cut, mut is_silent, mut start) = (None, false, asked.start);
    let mut pause = None;
    match answer {
        Answer::Right => {}
        Answer::Status(code, more) => (status, lines, body, start) = (code, more, Vec::new(), 0),
        Answer::Other(bytes) => body = bytes,
        Answer::Cut(bytes) => cut = Some(bytes),
        Answer::Silent(bytes) => (cut, is_silent) = (Some(bytes), true),
        Answer::Dripped(often) => pause = Some(often),
        Answer::FromTheStart => start = 0,
    }
    if start > 0 {
        status = 206;
        lines += &format!(
            "Content-Range: bytes {start}-{}/{}\r\n",
            body.len() - 1,
            body.len()
        );
        body.drain(..start.min(body.len()));
    }
    write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{lines}\r\n",
        body.len()
    )?;
    if let Some(pause) = pause {
        for byte in body {
            stream.write_all(&[byte])?;
            thread::sleep(pause);
        }
        return Ok(());
    }
    stream.write_all(&body[..cut.unwrap_or(body.len()).min(body.len())])?;
    stream.flush()?;
    if is_silent {
        // Until the client leaves.
        let _ = stream.read(&mut [0]);
    }
    Ok(())
}

/// The listing of the files.
pub(crate) fn listing(files: &[Stored]) -> String {
    let hex = |digest: digest::Digest| -> String {
        let bytes = digest.as_ref().iter();
        bytes.map(|byte| format!("{byte:02x}")).collect()
    };
    let files = files.iter().map(|(name, bytes, is_large)| {
        let mut blob = format!("blob {}\0", bytes.len()).into_bytes();
        blob.extend(bytes);
        let id = hex(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &blob));
        let size = bytes.len();
        let large = match is_large {
            true => {
                let hash = hex(digest::digest(&digest::SHA256, bytes));
                format!(
                    ", \"lfs\": {{\"sha256\": \"{hash}\", \"size\": {size}, \"pointerSize\": 134}}"
                )
            }
            false => String::new(),
        };
        format!("{{\"rfilename\": \"{name}\", \"size\": {size}, \"blobId\": \"{id}\"{large}}}")
    });
    let files: Vec<String> = files.collect();
    format!(
        "{{\"id\": \"o/n\", \"sha\": \"{COMMIT}\", \"siblings\": [{}]}}",
        files.join(", ")
    )
}
