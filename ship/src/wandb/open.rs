//! Makes the run known to the server, or finds it there.

use std::time::Duration;

use serde_json::{Value as Json, json};

use super::Wandb;
use super::labels::{Labels, config, hash};
use super::server::{Denied, Server};
use super::state::{Remote, State};
use crate::run::RunInfo;
use crate::sink::Refusal;

/// Most names of deleted runs that are skipped.
const BURNED: u32 = 20;

/// Most bytes of a name from a server; W&B's own have at most 128 letters.
const LONGEST_NAME: usize = 512;

/// The mutation that makes a run or changes it, and what it returns.
pub(super) const UPSERTED: (&str, &str) = ("UpsertBucket", "upsertBucket");

const UPSERT: &str = "mutation UpsertBucket(
  $name: String, $project: String, $entity: String, $groupName: String, $displayName: String, $notes: String,
  $tags: [String!], $config: JSONString, $host: String, $program: String, $jobType: String
) {
  upsertBucket(input: {
    name: $name, modelName: $project, entityName: $entity, groupName: $groupName, displayName: $displayName,
    notes: $notes, tags: $tags, config: $config, host: $host, jobProgram: $program, jobType: $jobType
  }) {
    bucket { id name project { name entity { name } } }
    inserted
  }
}";

const LOCATE: &str = "query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    bucket(name: $name, missingOk: true) { id historyLineCount eventsLineCount logLineCount historyTail }
  }
}";

/// The result of an upsert.
struct Found {
    remote: Remote,
    is_new: bool,
}

/// The numbers of lines by the server's count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) history: u64,
    pub(super) events: u64,
    pub(super) console: u64,
    /// `_step` of the last line of the history.
    pub(super) last_step: Option<u64>,
}

impl Counts {
    /// The larger count of each: servers count late.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            history: self.history.max(other.history),
            events: self.events.max(other.events),
            console: self.console.max(other.console),
            last_step: self.last_step.max(other.last_step),
        }
    }
}

impl Wandb {
    /// Makes the run known, and updates `state`. Returns whether the server has none of the lines
    /// that were sent.
    pub(super) async fn make_known(
        &self,
        server: &Server,
        run: &RunInfo,
        state: &mut State,
    ) -> Result<bool, Refusal> {
        let (mut is_ours, mut is_anew) = (state.remote.is_some(), false);
        loop {
            let found = match self.upsert(server, run, state).await {
                Ok(found) => found,
                // The name of a deleted run cannot be used again.
                Err(denied) if is_burned(&denied) && state.burned < BURNED => {
                    is_anew |= state.remote.is_some();
                    state.forget();
                    state.burned += 1;
                    is_ours = false;
                    continue;
                }
                Err(denied) => return Err(denied.mended_by_a_person()),
            };
            if found.is_new && state.remote.is_some() {
                // It was deleted: it is made again with all fields, which other upserts leave out.
                is_anew = true;
                state.forget();
                is_ours = true;
                continue;
            }
            let labels = Labels::of(run, &self.environment);
            if !is_ours && !found.is_new {
                let counts = self.count_lost(server, &found.remote).await?;
                state.history.found = counts.history;
                state.events.found = counts.events;
                state.console.found = counts.console;
            }
            state.remote = Some(found.remote);
            state.config = hash(&config(run));
            state.labels = labels.hash();
            return Ok(is_anew);
        }
    }

    /// Sends the fields of the run that have changed. `None` keeps a field, such as a name that a
    /// user set on the page.
    async fn upsert(&self, server: &Server, run: &RunInfo, state: &State) -> Result<Found, Denied> {
        let labels = Labels::of(run, &self.environment);
        let is_first = state.remote.is_none();
        let is_labelled = !is_first && state.labels == labels.hash();
        let config = config(run);
        let is_configured = !is_first && state.config == hash(&config);
        let label = |value: Json| if is_labelled { Json::Null } else { value };
        let mut tags = labels.tags;
        tags.extend(state.supersedes.iter().map(|old| tag("resumed-from:", old)));
        let (entity, project, name) = match &state.remote {
            Some(remote) => (
                Some(remote.entity.clone()),
                remote.project.clone(),
                remote.name.clone(),
            ),
            None => (labels.entity, labels.project, state.name(run)),
        };
        let first = |value: &str| is_first.then(|| value.to_string());
        let variables = json!({
            "name": name,
            "project": project,
            "entity": entity,
            "groupName": label(json!(labels.group)),
            "displayName": label(json!(labels.name)),
            "notes": label(json!(labels.notes)),
            "tags": label(json!(tags)),
            "config": (!is_configured).then(|| config.to_string()),
            "host": first(&run.host),
            "program": first("spd-launch"),
            "jobType": first(run.job),
        });
        let made = server.ask(UPSERTED, UPSERT, variables).await?;
        let bucket = &made["bucket"];
        if !bucket.is_object() {
            return Err(Denied::nonsense("no run"));
        }
        let is_name = |name: &&str| {
            (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(char::is_control)
        };
        let text = |value: &Json, other: &str| {
            let name = value.as_str().filter(is_name);
            name.unwrap_or(other).to_string()
        };
        let found = &bucket["project"];
        // Some servers leave these out; then they are as requested.
        Ok(Found {
            remote: Remote {
                entity: text(&found["entity"]["name"], &entity.unwrap_or_default()),
                project: text(&found["name"], &project),
                name: text(&bucket["name"], &name),
                id: bucket["id"].as_str().map(String::from),
            },
            is_new: made["inserted"] == true,
        })
    }

    /// Counts the lines of a run whose state was lost. The server counts some seconds late, so it
    /// is asked twice.
    async fn count_lost(&self, server: &Server, remote: &Remote) -> Result<Counts, Refusal> {
        let first = self.count(server, remote).await?;
        tokio::time::sleep(self.patience).await;
        Ok(first.max(self.count(server, remote).await?))
    }

    /// The numbers of lines of a run at the server.
    pub(super) async fn count(&self, server: &Server, remote: &Remote) -> Result<Counts, Refusal> {
        let variables = json!({
            "project": remote.project, "entity": remote.entity, "name": remote.name,
        });
        let data = server
            .ask(("RunResumeStatus", "model"), LOCATE, variables)
            .await;
        let data = data.map_err(Denied::mended_by_a_person)?;
        let bucket = &data["bucket"];
        let lines = |name: &str| bucket[name].as_u64().unwrap_or_default();
        Ok(Counts {
            history: lines("historyLineCount"),
            events: lines("eventsLineCount"),
            console: lines("logLineCount"),
            last_step: bucket["historyTail"].as_str().and_then(last_step),
        })
    }
}

/// Longest time that a server needs to count new lines.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A tag about another run, within the limit of 64 letters.
pub(super) fn tag(what: &str, name: &str) -> String {
    format!("{what}{name}").chars().take(64).collect()
}

fn is_burned(denied: &Denied) -> bool {
    denied.words.contains("previously created and deleted")
}

/// `_step` of the last line of a tail, which is a list of lines as text.
fn last_step(tail: &str) -> Option<u64> {
    let lines: Vec<String> = serde_json::from_str(tail).ok()?;
    // The line may hold bare NaN, which serde cannot read; the step is a plain number.
    let (_, rest) = lines.last()?.split_once("\"_step\":")?;
    let rest = rest.trim_start();
    let end = rest.find(|letter: char| !letter.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}
