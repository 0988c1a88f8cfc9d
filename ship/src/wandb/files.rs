//! Uploads of a run's files. They follow the rows that name them, and never delay a row.

use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::Wandb;
use super::media;
use super::server::{Denied, Server, Slot};
use super::state::{Owed, Remote, State};
use crate::run::RunInfo;
use crate::sink::{Refusal, Taken};

/// Files whose addresses are requested together.
const TOGETHER: usize = 50;

/// Tries of a file, each at a new address.
pub(super) const TRIES: u32 = 5;

/// Pause of all files after a failed upload.
const REST: Duration = Duration::from_secs(60);

const CREATE: &str = "mutation CreateRunFiles($entity: String!, $project: String!, $run: String!, $files: [String!]!) {
  createRunFiles(input: { entityName: $entity, projectName: $project, runName: $run, files: $files }) {
    uploadHeaders
    files { name uploadUrl }
  }
}";

impl Wandb {
    /// Uploads owed files for at most `at_most`. Files that fail are tried again later.
    pub(super) async fn send_files(&mut self, run: &RunInfo, state: &mut State, at_most: Duration) {
        if state.owed.is_empty() || self.rest.is_some_and(|until| Instant::now() < until) {
            return;
        }
        let ended = tokio::time::timeout(at_most, self.send_all_files(run, state)).await;
        if !matches!(ended, Ok(Ok(()))) {
            self.rest = Some(Instant::now() + REST);
        }
    }

    async fn send_all_files(&mut self, run: &RunInfo, state: &mut State) -> Taken {
        let (server, Some(remote)) = (self.server()?, state.remote.clone()) else {
            return Ok(());
        };
        while !state.owed.is_empty() {
            let names: Vec<String> = state.owed.iter().map(|owed| owed.name.clone()).collect();
            let names = &names[..names.len().min(TOGETHER)];
            let slots = slots(&server, &remote, names).await;
            let slots = slots.map_err(|denied| self.tried_all(names, state, denied))?;
            for name in names {
                let slot = slots.iter().find(|slot| slot.name == *name);
                let owed = state.owed.iter().find(|owed| owed.name == *name).cloned();
                if let Some(owed) = owed {
                    self.send_file(&server, run, state, (owed, slot)).await?;
                }
            }
        }
        Ok(())
    }

    /// Uploads a file. It stays owed if its address is missing or was refused.
    async fn send_file(
        &mut self,
        server: &Server,
        run: &RunInfo,
        state: &mut State,
        (owed, slot): (Owed, Option<&Slot>),
    ) -> Taken {
        let Owed { name, from } = owed;
        let drawn = self.drawn.remove(&name);
        let Some(bytes) = drawn.or_else(|| media::bytes(run, &from, &name)) else {
            self.settle(state, &name, false);
            return Ok(());
        };
        let sent = match slot {
            Some(slot) => server.put(slot, bytes).await,
            None => Err(Refusal::Gone {
                why: "the server returned no address".into(),
            }),
        };
        match sent {
            Ok(()) => self.settle(state, &name, true),
            Err(Refusal::Later { why, after }) => return Err(Refusal::Later { why, after }),
            // A signature expires: the next address is another.
            Err(Refusal::Unauthorized { .. } | Refusal::Gone { .. }) => self.tried(state, &name),
            Err(Refusal::TooLarge { .. } | Refusal::Invalid { .. }) => {
                self.settle(state, &name, false);
            }
        }
        Ok(())
    }

    /// Counts a try of each file if the server answers without addresses.
    fn tried_all(&mut self, names: &[String], state: &mut State, denied: Denied) -> Refusal {
        if matches!(denied.refusal, Refusal::Invalid { .. }) {
            for name in names {
                self.tried(state, name);
            }
        }
        denied.refusal
    }

    fn tried(&mut self, state: &mut State, name: &str) {
        let tries = self.tries.entry(name.into()).or_default();
        *tries += 1;
        if *tries >= TRIES {
            self.settle(state, name, false);
        }
    }

    /// Removes a file from the owed ones.
    fn settle(&mut self, state: &mut State, name: &str, is_sent: bool) {
        self.tries.remove(name);
        state.owed.retain(|owed| owed.name != name);
        if is_sent {
            state.untold.push(name.into());
        } else {
            state.lost += 1;
        }
    }
}

/// The upload addresses of files.
async fn slots(server: &Server, remote: &Remote, names: &[String]) -> Result<Vec<Slot>, Denied> {
    let variables = json!({
        "entity": remote.entity, "project": remote.project, "run": remote.name, "files": names,
    });
    let asked = ("CreateRunFiles", "createRunFiles");
    let made = server.ask(asked, CREATE, variables).await?;
    let list = |value: &Json| value.as_array().cloned().unwrap_or_default();
    let headers: Vec<(String, String)> = list(&made["uploadHeaders"])
        .iter()
        .filter_map(|header| {
            let (name, value) = header.as_str()?.split_once(':')?;
            Some((name.trim().into(), value.trim().into()))
        })
        .collect();
    let slot = |file: &Json| {
        Some(Slot {
            name: file["name"].as_str()?.into(),
            url: file["uploadUrl"].as_str()?.into(),
            headers: headers.clone(),
        })
    };
    Ok(list(&made["files"]).iter().filter_map(slot).collect())
}
