//! The HTTP client of all trackers: its time limits, and the meaning of an answer. Text of a server
//! leaves this file without the secrets of its request.

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Certificate, Client, Request, RequestBuilder, StatusCode};
use serde_json::Value as Json;
use spd_files::foreign::Secrets;

use crate::sink::Refusal;

/// Time limit of a request, from its first byte to the last of its answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit of a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Most bytes of an answer.
const LONGEST: usize = 16 << 20;

/// The certificates that a server may have.
#[derive(Debug, Clone, Default)]
pub(crate) enum Trust {
    /// The certificates that this machine trusts.
    #[default]
    Machine,
    /// These, and no others.
    Only(Vec<Certificate>),
    /// Any: the connection can be read on its way.
    Anybody,
}

/// A client that trusts what this machine does.
pub(crate) fn client() -> Result<Client, String> {
    client_of(Trust::Machine)
}

/// A client that follows no redirect: credentials go to the server that they are for.
pub(crate) fn client_of(trust: Trust) -> Result<Client, String> {
    // Another provider that is installed already serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder()
        .user_agent(concat!("spd/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .timeout(TIMEOUT)
        .redirect(reqwest::redirect::Policy::none());
    let client = match trust {
        Trust::Machine => client,
        Trust::Only(certificates) => client.tls_certs_only(certificates),
        Trust::Anybody => client.tls_danger_accept_invalid_certs(true),
    };
    client
        .build()
        .map_err(|found| format!("no HTTP client can be made: {found}"))
}

/// The body of a successful answer.
///
/// # Errors
///
/// The meaning of the answer; a tracker that knows better examines [`Answer`] itself.
pub(crate) async fn send(request: RequestBuilder) -> Result<Vec<u8>, Refusal> {
    answer(request).await?.good()
}

/// Letters of a server's text that are shown.
const SHOWN: usize = 200;

/// An answer of a server.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    body: Vec<u8>,
    after: Option<Duration>,
    place: String,
    /// The secrets of the request.
    secrets: Secrets,
}

/// Sends a request and returns any answer.
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
    let secrets = secrets(&request);
    // It may quote the server: the names in its certificate.
    let later = |found: reqwest::Error| Refusal::Later {
        why: format!(
            "{place}: {}",
            secrets.line(&cause(&found.without_url()), SHOWN)
        ),
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
        secrets,
    })
}

/// The secrets of a request: who asks, as it is sent and as the server reads it.
fn secrets(request: &Request) -> Secrets {
    let mut secrets = Secrets::default();
    let headers = request.headers().values();
    for value in headers.filter(|value| value.is_sensitive()) {
        let value = String::from_utf8_lossy(value.as_bytes());
        let (scheme, sent) = value.split_once(' ').unwrap_or(("", &value));
        secrets.add(sent);
        let read = STANDARD.decode(sent).ok().filter(|_| scheme == "Basic");
        let read = read.map(|read| String::from_utf8_lossy(&read).into_owned());
        if let Some((user, password)) = read.as_deref().and_then(|read| read.split_once(':')) {
            secrets.add(if password.is_empty() { user } else { password });
        }
    }
    secrets
}

impl Answer {
    /// Its body, if the status is a success.
    pub(crate) fn good(self) -> Result<Vec<u8>, Refusal> {
        if self.status.is_success() {
            return Ok(self.body);
        }
        Err(self.refusal())
    }

    /// The meaning of a status other than success.
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
        let text = self.said(&String::from_utf8_lossy(&self.body));
        let (place, status) = (&self.place, self.status);
        if text.is_empty() {
            format!("{place} answers {status}")
        } else {
            format!("{place} answers {status}: {text}")
        }
    }

    /// A text of the server without secrets.
    pub(crate) fn said(&self, text: &str) -> String {
        self.secrets.line(text, SHOWN)
    }

    /// The body, if it is JSON. Strings with secrets are hidden.
    pub(crate) fn json(&self) -> Option<Json> {
        let mut body = serde_json::from_slice(&self.body).ok()?;
        self.hide(&mut body);
        Some(body)
    }

    fn hide(&self, value: &mut Json) {
        match value {
            Json::String(text) if self.secrets.are_in(text) => *text = self.said(text),
            Json::Array(all) => all.iter_mut().for_each(|value| self.hide(value)),
            Json::Object(all) => all.values_mut().for_each(|value| self.hide(value)),
            _ => {}
        }
    }

    /// Whether the server accepted the request: a successful status with an empty body, or a JSON
    /// object that names no error. A login page also has a successful status.
    pub(crate) fn is_receipt(&self) -> bool {
        let names_error = |body: &Json| {
            let mut names = ["error", "errors", "error_code"].iter();
            names.any(|name| body.get(name).is_some_and(|error| !error.is_null()))
        };
        self.status.is_success()
            && (self.body.trim_ascii().is_empty()
                || self
                    .json()
                    .is_some_and(|body| body.is_object() && !names_error(&body)))
    }

    /// The refusal of a successful answer with an unexpected body. It may be right later.
    ///
    /// - `advice`: a possible mistake
    pub(crate) fn nonsense(&self, advice: &str) -> Refusal {
        Refusal::Later {
            why: format!("{}; {advice}", self.why()),
            after: None,
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

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};

    use super::*;

    // Until 2126: `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes
    // -days 36500 -subj /CN=localhost -addext basicConstraints=critical,CA:FALSE
    // -addext subjectAltName=DNS:localhost,IP:127.0.0.1`.
    pub(crate) const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----
MIIBmTCCAT6gAwIBAgIUOBUPDTw8cM2L3OkNYwwC5h5C2cgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNDA4MjYwMFoYDzIxMjYxMDMx
MDgyNjAwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASMD9s8RErgeowMLHFITa3St2UbI2/LqRuSTCLN9OnwkDRslLPc/gHf
0H1tg3xCouYB+iTeLmGRH8mZ+NsXD3RZo2wwajAdBgNVHQ4EFgQUpTJeC+3N3+0p
WSzTaQYDZZOrMBswHwYDVR0jBBgwFoAUpTJeC+3N3+0pWSzTaQYDZZOrMBswDAYD
VR0TAQH/BAIwADAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZIzj0E
AwIDSQAwRgIhAIel9gmWT8OMXViagYq8R4gRdQ5b8jKFyL1zaibSakW8AiEAo32P
8VThOCkUuAlTnVchN5bzZUfsUXdX5qDOAye5YeA=
-----END CERTIFICATE-----
";
    const KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgkVYtb3TrkQNQIpcN
O2GzpKBSuPxIBavSJnImOMjZUTehRANCAASMD9s8RErgeowMLHFITa3St2UbI2/L
qRuSTCLN9OnwkDRslLPc/gHf0H1tg3xCouYB+iTeLmGRH8mZ+NsXD3RZ
-----END PRIVATE KEY-----
";

    /// Asks a server that has a self-signed certificate.
    fn ask(trust: Trust) -> Result<Vec<u8>, Refusal> {
        let client = client_of(trust).unwrap();
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).unwrap();
        let config = ServerConfig::builder().with_no_client_auth();
        let config = config.with_single_cert(vec![certificate], key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let connection = ServerConnection::new(Arc::new(config)).unwrap();
            let mut stream = StreamOwned::new(connection, stream);
            // No request comes if the certificate is refused.
            if matches!(stream.read(&mut [0; 4096]), Ok(1..)) {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi");
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let answer = runtime.unwrap().block_on(send(client.get(address)));
        server.join().unwrap();
        answer
    }

    #[test]
    fn self_signed_certificate_is_refused_unless_it_is_trusted() {
        let refused = ask(Trust::Machine);
        assert!(
            matches!(&refused, Err(Refusal::Later { why, .. }) if why.contains("certificate")),
            "{refused:?}"
        );
        let only = Certificate::from_pem_bundle(CERTIFICATE.as_bytes()).unwrap();
        for trust in [Trust::Only(only), Trust::Anybody] {
            assert_eq!(ask(trust), Ok(b"hi".to_vec()));
        }
        assert!(ask(Trust::Only(Vec::new())).is_err());
    }
}
