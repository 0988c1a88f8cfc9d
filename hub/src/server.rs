//! One question to the server, and why it has no answer.

use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, StatusCode};
use ureq::{Agent, Body};

use crate::settings::Hub;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Nobody is there, or not able to answer now: another try may help. What has been found before may do as well.
    Away(String),
    /// The answer is no.
    Refused(String),
}

/// Tries of what may succeed the next time.
pub(crate) const TRIES: u32 = 3;

/// Asks the server.
pub(crate) struct Server<'a> {
    hub: &'a Hub,
    agent: Agent,
}

impl<'a> Server<'a> {
    pub(crate) fn of(hub: &'a Hub) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(hub.endpoint.starts_with("https://"))
            // The token is for this server: files lie on others.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(hub.patience))
            .timeout_recv_response(Some(hub.patience))
            .timeout_per_read(Some(hub.patience))
            .timeout_per_write(Some(hub.patience))
            .user_agent(concat!("spd-launch/", env!("CARGO_PKG_VERSION")));
        let agent = config.build().into();
        Self { hub, agent }
    }

    /// The answer to a question, from byte `start` on.
    ///
    /// - `path`: begins with a slash
    /// - `asked`: what is asked for, for messages: `hf://owner/name@main: config.json`
    pub(crate) fn get(
        &self,
        path: &str,
        start: u64,
        asked: &str,
    ) -> Result<(StatusCode, HeaderMap, Body), Refusal> {
        let mut request = self.agent.get(format!("{}{path}", self.hub.endpoint));
        if let Some(token) = &self.hub.token {
            request = request.header("Authorization", format!("Bearer {}", token.0));
        }
        if start > 0 {
            request = request.header("Range", format!("bytes={start}-"));
        }
        let host = self.hub.host();
        let answer = request.call().map_err(|error| {
            let line = format!("{asked}: no answer from {host}: {}", shown(&error));
            match error {
                ureq::Error::BadUri(_)
                | ureq::Error::TooManyRedirects
                | ureq::Error::RedirectFailed => Refusal::Refused(line),
                _ => Refusal::Away(line),
            }
        })?;
        let (parts, body) = answer.into_parts();
        let status = parts.status;
        if status.is_success() {
            return Ok((status, parts.headers, body));
        }
        let why = self.why(status, &parts.headers);
        let line = format!("{asked}: {host} {why}");
        Err(match status.is_server_error() {
            true => Refusal::Away(line),
            false => Refusal::Refused(line),
        })
    }

    /// What an answer other than yes means.
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
                "gives it to whoever is let in alone ({code}); ask for access on its page there, and set HF_TOKEN"
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
                        format!("has had too many questions ({code}); try again in {seconds} s")
                    }
                    None => {
                        format!("has had too many questions ({code}); try again in some minutes")
                    }
                }
            }
            (500.., _) => format!("cannot answer now ({code}); try again later"),
            _ => format!("answers with {code}, which nothing is known of"),
        }
    }

    /// Waits before another try.
    ///
    /// - `failed`: tries before it
    pub(crate) fn pause(&self, failed: u32) {
        let pause: Duration = self.hub.pause;
        std::thread::sleep(pause.saturating_mul(failed));
    }
}

/// An error of a connection, without an address that it may hold.
pub(crate) fn shown(error: &ureq::Error) -> String {
    match error {
        ureq::Error::BadUri(_) => "it redirects to what is no address".to_owned(),
        ureq::Error::Timeout(_) => "it is silent".to_owned(),
        ureq::Error::HostNotFound => "no host of that name is found".to_owned(),
        other => other.to_string().replace(char::is_control, " "),
    }
}
