//! A server with W&B's interface: GraphQL, streams of lines, files by signed addresses.

use std::fmt;
use std::time::Duration;

use reqwest::{Client, Url};
use serde_json::{Value as Json, json};

use super::state::Remote;
use crate::credentials::Environment;
use crate::http;
use crate::netrc;
use crate::sink::{Refusal, Taken};

/// The server of W&B itself.
const ADDRESS: &str = "https://api.wandb.ai";

/// Advice about a server that does not answer as W&B does.
const STRANGE: &str = "is WANDB_BASE_URL the address of a W&B server?";

/// Time limit of an upload.
const FILE: Duration = Duration::from_secs(600);

/// A server and the key for it.
pub(super) struct Server {
    client: Client,
    address: Url,
    key: Key,
}

/// An API key. It is never shown.
struct Key(String);

/// The reason why a GraphQL request failed.
#[derive(Debug)]
pub(super) struct Denied {
    /// The server's message.
    pub(super) words: String,
    /// The meaning of its status.
    pub(super) refusal: Refusal,
}

impl Denied {
    /// A successful answer that lacks the requested field.
    pub(super) fn nonsense(lacks: &str) -> Self {
        let why = format!("{lacks} is in the answer; {STRANGE}");
        let refusal = Refusal::Later { why, after: None };
        let words = String::new();
        Self { words, refusal }
    }

    /// The refusal of a request that is valid if server, key and settings are right: the user must
    /// act.
    pub(super) fn mended_by_a_person(self) -> Refusal {
        match self.refusal {
            Refusal::Gone { why } | Refusal::TooLarge { why } | Refusal::Invalid { why } => {
                let why = format!("{why}; are WANDB_BASE_URL, entity and project right?");
                Refusal::Unauthorized { why }
            }
            other => other,
        }
    }
}

/// The answer to a stream request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reply {
    /// Whether somebody pressed Stop.
    pub(super) is_stopped: bool,
}

/// The upload address of a file.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) url: String,
    pub(super) headers: Vec<(String, String)>,
}

impl Server {
    /// The server of the environment, with its key.
    pub(super) fn find(environment: &Environment) -> Result<Self, Refusal> {
        let unusable = |why: String| Refusal::Unauthorized { why };
        let address = environment.get("WANDB_BASE_URL").unwrap_or(ADDRESS);
        // The value is not shown: it may hold a password.
        let address = Url::parse(address.trim_end_matches('/'))
            .ok()
            .filter(|address| matches!(address.scheme(), "http" | "https"))
            .ok_or_else(|| unusable("WANDB_BASE_URL is not an http or https address".into()))?;
        let host = address.host_str().unwrap_or_default();
        let key = environment.get("WANDB_API_KEY").map(String::from);
        let key = key.or_else(|| Some(netrc::login(environment, host)?.password));
        let key = key.ok_or_else(|| {
            unusable(format!(
                "no key for {host}: WANDB_API_KEY is not set, and no `machine {host}` is in {}",
                places(environment)
            ))
        })?;
        Ok(Self {
            client: http::client().map_err(|why| Refusal::Later { why, after: None })?,
            address,
            key: Key(key.trim().into()),
        })
    }

    /// The requested field of the answer to a query or mutation.
    ///
    /// - `operation`: its name, and the name of the field
    pub(super) async fn ask(
        &self,
        (operation, field): (&str, &str),
        query: &str,
        variables: Json,
    ) -> Result<Json, Denied> {
        let body = json!({"operationName": operation, "query": query, "variables": variables});
        let request = self
            .client
            .post(self.at(&["graphql"]))
            .basic_auth("api", Some(&self.key.0))
            .json(&body);
        let answer = match http::answer(request).await {
            Ok(answer) => answer,
            Err(refusal) => {
                let words = String::new();
                return Err(Denied { words, refusal });
            }
        };
        let mut body = answer.json().unwrap_or_default();
        let words = answer.said(&messages(&body));
        if !answer.status.is_success() {
            let refusal = answer.refusal();
            return Err(Denied { words, refusal });
        }
        if !words.is_empty() {
            let why = format!("{operation}: {words}");
            let refusal = Refusal::Invalid { why };
            return Err(Denied { words, refusal });
        }
        let data = body.get_mut("data").and_then(|data| data.get_mut(field));
        match data.map(Json::take) {
            Some(data) => Ok(data),
            None => {
                let refusal = answer.nonsense(STRANGE);
                Err(Denied { words, refusal })
            }
        }
    }

    /// Sends a body to the stream of a run.
    pub(super) async fn stream(&self, remote: &Remote, body: String) -> Result<Reply, Refusal> {
        let Remote {
            entity,
            project,
            name,
            ..
        } = remote;
        let request = self
            .client
            .post(self.at(&["files", entity, project, name, "file_stream"]))
            .basic_auth("api", Some(&self.key.0))
            .header("Content-Type", "application/json")
            .body(body);
        let answer = http::answer(request).await?;
        if !answer.status.is_success() {
            return Err(answer.refusal());
        }
        if !answer.is_receipt() {
            return Err(answer.nonsense(STRANGE));
        }
        // Some servers answer with an empty body.
        let body = answer.json().unwrap_or_default();
        Ok(Reply {
            is_stopped: body["stopped"] == true,
        })
    }

    /// Uploads a file. The address is signed, and the key is not sent there.
    pub(super) async fn put(&self, slot: &Slot, bytes: Vec<u8>) -> Taken {
        let mut request = self.client.put(&slot.url).timeout(FILE).body(bytes);
        for (name, value) in &slot.headers {
            request = request.header(name, value);
        }
        http::send(request).await.map(drop)
    }

    /// The page of a run.
    pub(super) fn page(&self, remote: &Remote) -> String {
        let Remote {
            entity,
            project,
            name,
            ..
        } = remote;
        let mut page = self.at(&[entity, project, "runs", name]);
        if page.host_str() == Some("api.wandb.ai") {
            let _ = page.set_host(Some("wandb.ai"));
        }
        let _ = page.set_username("");
        let _ = page.set_password(None);
        page.to_string()
    }

    /// An address of the server, each part of whose path is escaped.
    fn at(&self, path: &[&str]) -> Url {
        let mut url = self.address.clone();
        if let Ok(mut parts) = url.path_segments_mut() {
            parts.pop_if_empty().extend(path);
        }
        url
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Server { .. }")
    }
}

/// The paths of `.netrc` that were tried.
fn places(environment: &Environment) -> String {
    let places = netrc::places(environment);
    let places: Vec<String> = places
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    if places.is_empty() {
        "~/.netrc".into()
    } else {
        places.join(" or ")
    }
}

/// The messages in `errors`, and in a plain `error`.
fn messages(body: &Json) -> String {
    let mut words = Vec::new();
    let found = body["errors"].as_array().into_iter().flatten();
    words.extend(found.map(|error| {
        error["message"]
            .as_str()
            .unwrap_or("an error without a message")
    }));
    words.extend(body["error"].as_str());
    words.join("; ")
}
