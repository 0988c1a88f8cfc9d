//! Requests of MLflow's REST interface, and the meaning of the answers.

use reqwest::{Client, Method, RequestBuilder, Url};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value as Json, json};

use super::address::Address;
use crate::http::{self, Answer};
use crate::sink::{Refusal, Taken};

/// Prefix of all calls.
const CALLS: [&str; 3] = ["api", "2.0", "mlflow"];

/// Prefix of all files at the server.
const FILES: [&str; 4] = ["api", "2.0", "mlflow-artifacts", "artifacts"];

/// Advice about a server that does not answer as MLflow does.
const STRANGE: &str = "is MLFLOW_TRACKING_URI the address of an MLflow server?";

/// A server.
pub(super) struct Server {
    client: Client,
    address: Address,
}

/// A run at the server.
#[derive(Debug, Deserialize)]
pub(super) struct Run {
    pub(super) info: Info,
    #[serde(default)]
    pub(super) data: Data,
}

#[derive(Debug, Deserialize)]
pub(super) struct Info {
    pub(super) run_id: String,
    #[serde(default)]
    pub(super) experiment_id: String,
    #[serde(default)]
    pub(super) artifact_uri: String,
    #[serde(default)]
    pub(super) lifecycle_stage: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Data {
    pub(super) tags: Vec<Tag>,
    /// The last value of each name.
    pub(super) metrics: Vec<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Tag {
    pub(super) key: String,
    #[serde(default)]
    pub(super) value: String,
}

impl Run {
    /// Whether it was deleted.
    pub(super) fn is_deleted(&self) -> bool {
        self.info.lifecycle_stage == "deleted"
    }

    /// The value of a tag.
    pub(super) fn tag(&self, key: &str) -> Option<&str> {
        let found = self.data.tags.iter().find(|tag| tag.key == key)?;
        Some(&found.value)
    }
}

#[derive(Deserialize)]
struct Experiment {
    experiment_id: String,
    #[serde(default)]
    lifecycle_stage: String,
}

impl Server {
    pub(super) fn new(address: Address) -> Result<Self, String> {
        Ok(Self {
            client: http::client_of(address.trust.clone())?,
            address,
        })
    }

    /// The id of an experiment, which is made if there is none.
    pub(super) async fn experiment(&self, name: &str) -> Result<String, Refusal> {
        if let Some(id) = self.find_experiment(name).await? {
            return Ok(id);
        }
        // Otherwise the page first shows views for language models.
        let kind = json!({"key": "mlflow.experimentKind", "value": "custom_model_development"});
        let body = json!({"name": name, "tags": [kind]});
        let call = ("experiments/create", "experiment_id");
        match self.post(call, &body).await {
            Ok(id) => Ok(id),
            // Another process made it in between.
            Err(refusal) => self.find_experiment(name).await?.ok_or(refusal),
        }
    }

    async fn find_experiment(&self, name: &str) -> Result<Option<String>, Refusal> {
        let query = [("experiment_name", name)];
        let call = ("experiments/get-by-name", "experiment");
        match self.get::<Experiment>(call, &query).await {
            Ok(experiment) if experiment.lifecycle_stage == "deleted" => {
                let why = format!(
                    "the experiment {name:?} was deleted; restore it, or name another project"
                );
                Err(Refusal::Later { why, after: None })
            }
            Ok(experiment) => Ok(Some(experiment.experiment_id)),
            Err(Refusal::Gone { .. }) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// The runs of an experiment that have a tag with this value, without deleted ones.
    pub(super) async fn runs_by_tag(
        &self,
        experiment: &str,
        key: &str,
        value: &str,
    ) -> Result<Vec<Run>, Refusal> {
        let body = json!({
            "experiment_ids": [experiment],
            "filter": format!("tags.`{key}` = '{value}'"),
            "max_results": 100,
        });
        // Without runs the field is not there.
        let found: Option<Vec<Run>> = self.post(("runs/search", "runs"), &body).await?;
        Ok(found.unwrap_or_default())
    }

    /// A run by its id.
    pub(super) async fn run(&self, id: &str) -> Result<Run, Refusal> {
        self.get(("runs/get", "run"), &[("run_id", id)]).await
    }

    /// Makes a run.
    pub(super) async fn create(&self, body: &Json) -> Result<Run, Refusal> {
        self.post(("runs/create", "run"), body).await
    }

    /// Sends a request whose answer has no data.
    pub(super) async fn tell(&self, call: &str, body: &Json) -> Taken {
        taken(
            &self
                .ask(self.client.post(self.call(call)).json(body))
                .await?,
        )
    }

    /// Gives a run tags, at most 100.
    pub(super) async fn tag(&self, run: &str, tags: &[Json]) -> Taken {
        let body = json!({"run_id": run, "tags": tags});
        self.tell("runs/log-batch", &body).await
    }

    /// Stores a file, replacing an older one.
    pub(super) async fn put(&self, path: &str, bytes: Vec<u8>) -> Taken {
        let at = self.address.at(FILES.into_iter().chain(path.split('/')));
        let request = self.client.request(Method::PUT, at).body(bytes);
        let request = request.header("content-type", "application/octet-stream");
        let answer = self.ask(request).await?;
        match answer.status.as_u16() {
            // The server stores no files, or not this one.
            404 | 405 | 413 | 501 => Err(Refusal::Invalid { why: answer.why() }),
            _ => taken(&answer),
        }
    }

    /// A field of an answer.
    async fn get<T: DeserializeOwned>(
        &self,
        (call, field): (&str, &str),
        query: &[(&str, &str)],
    ) -> Result<T, Refusal> {
        let mut at = self.call(call);
        at.query_pairs_mut().extend_pairs(query);
        read(&self.ask(self.client.get(at)).await?, field)
    }

    /// As [`Self::get`], for a request with a body.
    async fn post<T: DeserializeOwned>(
        &self,
        (call, field): (&str, &str),
        body: &Json,
    ) -> Result<T, Refusal> {
        let request = self.client.post(self.call(call)).json(body);
        read(&self.ask(request).await?, field)
    }

    async fn ask(&self, request: RequestBuilder) -> Result<Answer, Refusal> {
        http::answer(self.address.signed(request)).await
    }

    fn call(&self, call: &str) -> Url {
        let path = CALLS.into_iter().chain(call.split('/'));
        self.address.at(path)
    }
}

/// A field of an answer, as null if it is not there.
fn read<T: DeserializeOwned>(answer: &Answer, field: &str) -> Result<T, Refusal> {
    if !answer.status.is_success() {
        return Err(refusal(answer));
    }
    let body = answer.json().filter(Json::is_object);
    let found = body.and_then(|mut body| T::deserialize(body[field].take()).ok());
    found.ok_or_else(|| answer.nonsense(STRANGE))
}

/// The meaning of an answer without data.
fn taken(answer: &Answer) -> Taken {
    match answer.is_receipt() {
        true => Ok(()),
        false if answer.status.is_success() => Err(answer.nonsense(STRANGE)),
        false => Err(refusal(answer)),
    }
}

/// The meaning of an answer, by its `error_code` if it has one, since servers and proxies share
/// statuses.
fn refusal(answer: &Answer) -> Refusal {
    #[derive(Deserialize)]
    struct Error {
        error_code: String,
        #[serde(default)]
        message: String,
    }
    let why = answer.why();
    let error = answer.json().map(Error::deserialize);
    let Some(Ok(Error {
        error_code,
        message,
    })) = error
    else {
        return match answer.refusal() {
            Refusal::Gone { .. } => answer.nonsense(STRANGE),
            refusal => refusal,
        };
    };
    match error_code.as_str() {
        "RESOURCE_DOES_NOT_EXIST" => Refusal::Gone { why },
        "INVALID_PARAMETER_VALUE" if message.contains("must be in the 'active' state") => {
            Refusal::Gone { why }
        }
        "INVALID_PARAMETER_VALUE" => Refusal::Invalid { why },
        "PERMISSION_DENIED" | "UNAUTHENTICATED" | "UNAUTHORIZED" => Refusal::Unauthorized { why },
        "ENDPOINT_NOT_FOUND" | "NOT_FOUND" => answer.nonsense(STRANGE),
        _ => answer.refusal(),
    }
}
