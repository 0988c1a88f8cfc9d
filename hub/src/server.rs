//! Requests to the server, and the reasons why they fail.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use spd_files::foreign::Secrets;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body, BodyReader};
use url::Url;

use crate::settings::Hub;

/// The reason why a request failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The server cannot be reached, or cannot answer now. Another try may help, and the cache may
    /// do instead.
    Away(String),
    /// The server refuses.
    Refused(String),
}

/// Tries of a request that may succeed later.
pub(crate) const TRIES: u32 = 3;

/// Most redirects of one request.
const REDIRECTS: u32 = 10;

/// Bytes a second of the slowest server that is waited for.
const SLOWEST: f64 = 1024.0;

/// Letters of a server's text that are shown.
const SHOWN: usize = 200;

/// Sends requests.
pub(crate) struct Server<'a> {
    hub: &'a Hub,
    agent: Agent,
    /// The token, which no text may show.
    secrets: Secrets,
}

impl<'a> Server<'a> {
    pub(crate) fn of(hub: &'a Hub) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(hub.endpoint.starts_with("https://"))
            // [`Self::follow`] follows them, and knows which origin the token is for.
            .max_redirects(0)
            .timeout_connect(Some(hub.patience))
            .timeout_recv_response(Some(hub.patience))
            .timeout_per_read(Some(hub.patience))
            .timeout_per_write(Some(hub.patience))
            .user_agent(concat!("spd-launch/", env!("CARGO_PKG_VERSION")));
        let agent = config.build().into();
        let mut secrets = Secrets::default();
        hub.token.iter().for_each(|token| secrets.add(&token.0));
        Self {
            hub,
            agent,
            secrets,
        }
    }

    /// The answer to a request, from byte `start` on.
    ///
    /// - `path`: begins with a slash
    /// - `asked`: the subject in messages: `hf://owner/name@main: config.json`
    pub(crate) fn get(
        &self,
        path: &str,
        start: u64,
        asked: &str,
    ) -> Result<(StatusCode, HeaderMap, Paced), Refusal> {
        let host = self.hub.host();
        let answer = self.follow(path, start).map_err(|refusal| {
            let line = |why| format!("{asked}: no answer from {host}: {why}");
            match refusal {
                Refusal::Away(why) => Refusal::Away(line(why)),
                Refusal::Refused(why) => Refusal::Refused(line(why)),
            }
        })?;
        let (parts, body) = answer.into_parts();
        let status = parts.status;
        if status.is_success() {
            let body = Paced {
                body: body.into_reader(),
                least: self.least(),
                patience: self.hub.patience,
                begun: Instant::now(),
                came: 0,
            };
            return Ok((status, parts.headers, body));
        }
        let why = self.why(status, &parts.headers);
        let line = format!("{asked}: {host} {why}");
        Err(match status.is_server_error() {
            true => Refusal::Away(line),
            false => Refusal::Refused(line),
        })
    }

    /// The answer after redirects. The token is sent only to the origin that it is for (scheme,
    /// host and port); files lie at others.
    fn follow(&self, path: &str, start: u64) -> Result<Response<Body>, Refusal> {
        let no = |why: &str| Refusal::Refused(why.to_owned());
        let url = format!("{}{path}", self.hub.endpoint);
        let home = Url::parse(&url).map_err(|_| no("HF_ENDPOINT is no address"))?;
        let mut at = home.clone();
        for _ in 0..=REDIRECTS {
            let mut request = self.agent.get(at.as_str());
            if let Some(token) = self
                .hub
                .token
                .as_ref()
                .filter(|_| at.origin() == home.origin())
            {
                request = request.header("Authorization", format!("Bearer {}", token.0));
            }
            if start > 0 {
                request = request.header("Range", format!("bytes={start}-"));
            }
            let answer = request.call();
            let answer = answer.map_err(|error| Refusal::Away(self.shown(error)))?;
            if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            let to = answer.headers().get("Location");
            let to = to.and_then(|to| at.join(to.to_str().ok()?).ok());
            let is_good = |to: &Url| {
                let is_open = to.scheme() == "http" && home.scheme() == "http";
                to.has_host() && (is_open || to.scheme() == "https")
            };
            at = match to.filter(is_good) {
                Some(to) => to,
                None => return Err(no("it redirects to what is no address")),
            };
        }
        Err(no("it redirects without end"))
    }

    /// The fewest useful bytes of a try: what the slowest server sends in the time that a server
    /// may be silent.
    pub(crate) fn least(&self) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a day of it is 88 million"
        )]
        let least = (SLOWEST * self.hub.patience.as_secs_f64()) as u64;
        least
    }

    /// An error of a connection, without parts of an address and without the token.
    pub(crate) fn shown(&self, error: impl Into<ureq::Error>) -> String {
        match error.into() {
            ureq::Error::BadUri(_) => "it redirects to what is no address".to_owned(),
            ureq::Error::Timeout(_) => "it is silent".to_owned(),
            ureq::Error::HostNotFound => "no host of that name is found".to_owned(),
            ureq::Error::Io(error) => self.secrets.line(&error.to_string(), SHOWN),
            other => self.secrets.line(&other.to_string(), SHOWN),
        }
    }

    /// The meaning of a status other than success.
    fn why(&self, status: StatusCode, headers: &HeaderMap) -> String {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let code = status.as_u16();
        let token = match self.hub.token {
            Some(_) => "the token that is set may read it",
            None => "set HF_TOKEN if it is private",
        };
        match (code, header("X-Error-Code")) {
            (_, Some("RevisionNotFound")) => {
                format!("has no such revision ({code}); its page lists branches and tags")
            }
            (_, Some("EntryNotFound")) => format!("has no such file ({code})"),
            (_, Some("GatedRepo")) | (403, _) => format!(
                "restricts access to it ({code}); request access on its page there, and set HF_TOKEN"
            ),
            (401, None) if self.hub.token.is_some() => {
                format!(
                    "does not take the token ({code}); is HF_TOKEN, or the file `token` in HF_HOME, of this server?"
                )
            }
            (401 | 404, _) => format!(
                "has no such repository ({code}); see whether the name is right, and {}{token}",
                if self.hub.token.is_some() {
                    "whether "
                } else {
                    ""
                }
            ),
            (429, _) => {
                let seconds = header("Retry-After").and_then(|seconds| seconds.parse::<u32>().ok());
                match seconds {
                    Some(seconds) => {
                        format!("has had too many requests ({code}); try again in {seconds} s")
                    }
                    None => {
                        format!("has had too many requests ({code}); try again in some minutes")
                    }
                }
            }
            (500.., _) => format!("cannot answer now ({code}); try again later"),
            _ => format!("answers with the unknown status {code}"),
        }
    }

    /// Waits before another try.
    ///
    /// - `failed`: number of tries so far
    pub(crate) fn pause(&self, failed: u32) {
        let pause: Duration = self.hub.pause;
        std::thread::sleep(pause.saturating_mul(failed));
    }
}

/// The body of an answer. Reading fails if it comes too slowly.
pub(crate) struct Paced {
    body: BodyReader<'static>,
    /// Fewest bytes in the time that a server may be silent.
    least: u64,
    patience: Duration,
    /// Start of that time, and the bytes since.
    begun: Instant,
    came: u64,
}

impl Read for Paced {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let read = self.body.read(piece)?;
        self.came += read as u64;
        if read > 0 && self.begun.elapsed() >= self.patience {
            if self.came < self.least {
                let (came, seconds) = (self.came, self.begun.elapsed().as_secs_f64());
                return Err(io::Error::other(format!(
                    "{came} bytes in {seconds:.0} s are too few"
                )));
            }
            (self.begun, self.came) = (Instant::now(), 0);
        }
        Ok(read)
    }
}
