//! One HTTP client for all sinks: its time limits, and what an answer means.

use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, StatusCode};

use crate::sink::Refusal;

/// How long a server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// Bytes of an answer that are read at most.
const LONGEST: usize = 16 << 20;

/// A client that follows no redirect: credentials go to the server that they are for.
pub(crate) fn client() -> Result<Client, String> {
    // Where another one is installed already, that one does as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder()
        .user_agent(concat!("spd/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .timeout(TIMEOUT)
        .redirect(reqwest::redirect::Policy::none());
    client
        .build()
        .map_err(|found| format!("no HTTP client can be made: {found}"))
}

/// The body of a good answer.
///
/// # Errors
///
/// What the answer means; a sink that knows better looks at [`Answer`] itself.
pub(crate) async fn send(request: RequestBuilder) -> Result<Vec<u8>, Refusal> {
    answer(request).await?.good()
}

/// An answer of a server.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Vec<u8>,
    after: Option<Duration>,
    place: String,
}

/// Sends a request, whatever the answer is.
///
/// # Errors
///
/// When there is no answer.
pub(crate) async fn answer(request: RequestBuilder) -> Result<Answer, Refusal> {
    let (client, request) = request.build_split();
    let request = request.map_err(|found| Refusal::Invalid {
        why: format!("no request: {}", found.without_url()),
    })?;
    let url = request.url();
    // Without what may be secret: user, password and query.
    let place = format!(
        "{}://{}{}",
        url.scheme(),
        url.host_str().unwrap_or_default(),
        url.port()
            .map(|port| format!(":{port}"))
            .unwrap_or_default()
    );
    let later = |found: reqwest::Error| Refusal::Later {
        why: format!("{place}: {}", cause(&found.without_url())),
        after: None,
    };
    let mut response = client.execute(request).await.map_err(later)?;
    let (status, after) = (response.status(), retry_after(response.headers()));
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(later)? {
        if body.len() + chunk.len() > LONGEST {
            let why = format!("{place}: the answer is longer than {LONGEST} bytes");
            return Err(Refusal::Later { why, after: None });
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer {
        status,
        body,
        after,
        place,
    })
}

impl Answer {
    /// Its body, where the status is a good one.
    pub(crate) fn good(self) -> Result<Vec<u8>, Refusal> {
        if self.status.is_success() {
            return Ok(self.body);
        }
        Err(self.refusal())
    }

    /// What a status that is not good means.
    pub(crate) fn refusal(&self) -> Refusal {
        let why = self.why();
        match self.status.as_u16() {
            401 | 403 => Refusal::Unauthorized { why },
            404 | 410 => Refusal::Gone { why },
            413 => Refusal::TooLarge { why },
            400 | 422 => Refusal::Invalid { why },
            _ => Refusal::Later {
                why,
                after: self.after,
            },
        }
    }

    /// The status and the beginning of the body, on one line.
    pub(crate) fn why(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut text: String = words.join(" ").chars().take(200).collect();
        text.retain(|letter| !letter.is_control());
        let (place, status) = (&self.place, self.status);
        if text.is_empty() {
            format!("{place} answers {status}")
        } else {
            format!("{place} answers {status}: {text}")
        }
    }
}

/// The innermost reason, which is the one that says something.
fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = httpdate::parse_http_date(text).ok()?;
    Some(at.duration_since(SystemTime::now()).unwrap_or_default())
}
