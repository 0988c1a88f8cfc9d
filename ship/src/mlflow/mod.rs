//! MLflow, by its REST interface.
//!
//! The server recognises repetitions by name, time, step and value, so rows whose answer was lost
//! are sent again without duplicates. It takes nothing back: after a roll-back another run begins,
//! unless rows are to be kept.

mod about;
mod address;
mod batch;
mod names;
mod server;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use spd_configs::OnRollback;
use spd_tracker::{Kind, Value, now};

use crate::credentials::Environment;
use crate::cursor::Files;
use crate::run::RunInfo;
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped, Taken};
use about::tag;
use address::Address;
use batch::Metric;
use server::{Run, Server};

/// The tag that identifies a run: the id of its directory, and the number of roll-backs.
const KEY: &str = "client.run_key";

/// The tag that all runs of a directory share.
const DIRECTORY: &str = "spd.run";

/// The tag with the run that the server's page shows this run below.
const PARENT: &str = "mlflow.parentRunId";

/// Most parameters, or tags, of one request.
const MOST: usize = 100;

/// The knowledge of the server's run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct State {
    /// Its id; empty before it is made.
    run: String,
    /// Number of starts of the directory's run before this one began.
    generation: u64,
    /// The place of its files at the server, if it stores files.
    files: Option<String>,
    /// Whether its parameters are set.
    has_parameters: bool,
    /// Whether it is shown below the run of its sweep.
    has_parent: bool,
    /// Time of the last row, in milliseconds since 1970, which is used for everything sent later.
    last: Option<i64>,
    /// Names that the server refuses, with their replacements.
    names: BTreeMap<String, String>,
}

/// Sends rows to an MLflow server.
#[derive(Default)]
pub(crate) struct Mlflow {
    environment: Environment,
    server: Option<Server>,
}

impl Mlflow {
    /// With the address, credentials and settings of `environment`.
    pub(crate) fn of(environment: Environment) -> Self {
        Self {
            environment,
            ..Self::default()
        }
    }

    fn server(&self) -> Result<&Server, Refusal> {
        self.server.as_ref().ok_or_else(|| Refusal::Unauthorized {
            why: "no server is known".to_owned(),
        })
    }

    async fn send(&self, state: &State, metrics: &[Metric]) -> Taken {
        for request in batch::requests(&state.run, metrics) {
            self.server()?.tell("runs/log-batch", &request).await?;
        }
        Ok(())
    }

    /// Stores a file of the run. A file that the server refuses is named in a tag, and delays
    /// nothing.
    async fn store(&self, state: &State, path: &str, file: Vec<u8>) -> Taken {
        let stored = match &state.files {
            Some(files) => self.server()?.put(&format!("{files}/{path}"), file).await,
            None => return Ok(()),
        };
        match stored {
            Err(Refusal::Invalid { why } | Refusal::TooLarge { why } | Refusal::Gone { why }) => {
                self.lacks(state, path, &why).await
            }
            stored => stored,
        }
    }

    async fn lacks(&self, state: &State, path: &str, why: &str) -> Taken {
        let tags = [tag("spd.not-stored", &format!("{path}: {why}"))];
        self.server()?.tag(&state.run, &tags).await
    }

    /// Stores a file of the run directory, if it exists.
    async fn store_if_there(&self, run: &RunInfo, state: &State, path: &str) -> Taken {
        match run.file(path) {
            Ok(file) => self.store(state, path, file).await,
            Err(_) => Ok(()),
        }
    }

    /// Sends the description of the run. Parameters are sent once, since the server accepts no
    /// other values for them.
    async fn describe(&self, run: &RunInfo, state: &mut State) -> Taken {
        let server = self.server()?;
        let mut tags = about::tags(run);
        if state.files.is_none() {
            let why = "the server keeps files elsewhere, where only MLflow's own client reaches";
            tags.push(tag("spd.not-stored", why));
        }
        for tags in tags.chunks(MOST) {
            server.tag(&state.run, tags).await?;
        }
        let parameters = about::parameters(&run.config);
        for parameters in parameters.chunks(MOST) {
            if state.has_parameters {
                break;
            }
            let body = json!({"run_id": state.run, "params": parameters});
            let told = server.tell("runs/log-batch", &body).await;
            let Err(Refusal::Invalid { .. }) = told else {
                told?;
                continue;
            };
            for parameter in parameters {
                // It has another value, from a start whose answer was lost.
                let body = json!({"run_id": state.run, "params": [parameter]});
                match server.tell("runs/log-batch", &body).await {
                    Ok(()) | Err(Refusal::Invalid { .. }) => {}
                    Err(refusal) => return Err(refusal),
                }
            }
        }
        state.has_parameters = true;
        self.join_sweep(run, state).await?;
        let config = serde_json::to_vec_pretty(&run.config).unwrap_or_default();
        self.store(state, "config.json", config).await?;
        self.store_if_there(run, state, "config.toml").await
    }

    /// Shows a run of a sweep below the run of the sweep, if that exists.
    async fn join_sweep(&self, run: &RunInfo, state: &mut State) -> Taken {
        let Some(sweep) = run.sweep.as_deref().filter(|_| !state.has_parent) else {
            return Ok(());
        };
        let server = self.server()?;
        let experiment = server.run(&state.run).await?.info.experiment_id;
        let found = server.runs_by_tag(&experiment, DIRECTORY, sweep).await?;
        if let Some(found) = found.into_iter().max_by_key(generation_of) {
            let tags = [tag(PARENT, &found.info.run_id)];
            server.tag(&state.run, &tags).await?;
            state.has_parent = true;
        }
        Ok(())
    }

    /// Records names that the server would refuse.
    async fn note_names(&self, state: &mut State, metrics: &[Metric]) -> Taken {
        let changed = metrics.iter().filter_map(|metric| {
            let taken = names::taken(&metric.name);
            (taken != metric.name).then(|| (taken, metric.name.clone()))
        });
        let changed: BTreeMap<_, _> = changed.collect();
        if changed.keys().all(|name| state.names.contains_key(name)) {
            return Ok(());
        }
        let mut names = state.names.clone();
        names.extend(changed);
        let text = serde_json::to_vec_pretty(&names).unwrap_or_default();
        self.store(state, "names.json", text).await?;
        state.names = names;
        Ok(())
    }

    /// The run of a generation, or the last one if the generation is unknown. It is made if there
    /// is none.
    async fn find_or_make(&self, run: &RunInfo, generation: Option<u64>) -> Result<State, Refusal> {
        let server = self.server()?;
        let named = run.tracker.project.as_deref();
        let named = named.or_else(|| self.environment.get("MLFLOW_EXPERIMENT_NAME"));
        let experiment = server.experiment(named.unwrap_or(run.project())).await?;
        let found = match generation {
            Some(generation) => {
                let key = key(run, generation);
                server.runs_by_tag(&experiment, KEY, &key).await?
            }
            None => server.runs_by_tag(&experiment, DIRECTORY, &run.id).await?,
        };
        if let Some(found) = found.into_iter().max_by_key(generation_of) {
            return Ok(state_of(&found, generation_of(&found)));
        }
        let generation = generation.unwrap_or(0);
        let name = match generation {
            0 => run.name.clone(),
            generation => format!("{}-r{generation}", run.name),
        };
        let body = json!({
            "experiment_id": experiment,
            "start_time": batch::milliseconds(run.started),
            "run_name": name,
            "tags": [tag(KEY, &key(run, generation)), tag(DIRECTORY, &run.id)],
        });
        Ok(state_of(&server.create(&body).await?, generation))
    }

    /// Deletes empty runs of the same key. The server makes a run at every request: the request of
    /// a killed process may be served after the next process has looked for the run and made its
    /// own.
    async fn delete_copies(&self, run: &RunInfo, state: &State) -> Taken {
        let server = self.server()?;
        let experiment = server.run(&state.run).await?.info.experiment_id;
        let key = key(run, state.generation);
        for copy in server.runs_by_tag(&experiment, KEY, &key).await? {
            if copy.info.run_id != state.run && copy.data.metrics.is_empty() {
                let body = json!({"run_id": copy.info.run_id});
                server.tell("runs/delete", &body).await?;
            }
        }
        Ok(())
    }

    async fn set_status(&self, state: &State, status: &str, end: Option<i64>) -> Taken {
        let mut body = json!({"run_id": state.run, "status": status});
        if let Some(end) = end {
            body["end_time"] = json!(end);
        }
        self.server()?.tell("runs/update", &body).await
    }
}

impl Sink for Mlflow {
    type State = State;

    const NAME: &'static str = "mlflow";

    const EVERY: Duration = Duration::from_secs(2);

    const ROWS: usize = 200;

    async fn open(&mut self, run: &RunInfo, state: &mut State) -> Result<bool, Refusal> {
        let server = Address::of(&self.environment).and_then(Server::new);
        self.server = Some(server.map_err(|why| Refusal::Unauthorized { why })?);
        let mut known = state.clone();
        let mut is_there = false;
        if !known.run.is_empty() {
            match self.server()?.run(&known.run).await {
                Ok(found) if !found.is_deleted() => is_there = true,
                Ok(_) | Err(Refusal::Gone { .. }) => {}
                Err(refusal) => return Err(refusal),
            }
        }
        if !is_there {
            let generation = (!known.run.is_empty()).then_some(known.generation);
            known = self.find_or_make(run, generation).await?;
        }
        self.set_status(&known, "RUNNING", None).await?;
        self.describe(run, &mut known).await?;
        let is_anew = !is_there && !state.run.is_empty();
        *state = known;
        Ok(is_anew)
    }

    async fn send_metrics(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let metrics: Vec<Metric> = rows.iter().flat_map(batch::of_row).collect();
        self.note_names(state, &metrics).await?;
        self.send(state, &metrics).await?;
        for Stamped { row, .. } in rows {
            for (name, value) in &row.values {
                match value {
                    Value::Text(text) => {
                        let path = format!("text/{}/step-{:08}.txt", names::taken(name), row.step);
                        self.store(state, &path, text.clone().into_bytes()).await?;
                    }
                    Value::File(path) => match run.file(path) {
                        Ok(file) => self.store(state, path, file).await?,
                        Err(why) => self.lacks(state, path, &why).await?,
                    },
                    Value::Number(_) | Value::Histogram(_) => {}
                }
            }
        }
        note_time(state, rows);
        Ok(())
    }

    async fn send_system(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let told = |row: &&Stamped| row.row.kind == Kind::System;
        let metrics = rows.iter().filter(told);
        let metrics: Vec<Metric> = metrics
            .flat_map(|row| batch::of_system_row(run, row))
            .collect();
        self.note_names(state, &metrics).await?;
        self.send(state, &metrics).await?;
        let alert = rows.iter().rfind(|row| row.row.kind == Kind::Alert);
        if let Some(alert) = alert {
            let note = alert.row.note.as_deref().unwrap_or_default();
            let tags = [tag("spd.alert", note)];
            self.server()?.tag(&state.run, &tags).await?;
        }
        note_time(state, rows);
        Ok(())
    }

    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        to: RollBack,
    ) -> Result<After, Refusal> {
        if run.tracker.on_rollback == OnRollback::Keep {
            return Ok(After::GoOn);
        }
        let mut next = self.find_or_make(run, Some(to.generation)).await?;
        if next.run != state.run {
            let server = self.server()?;
            let old = async || {
                let tags = [tag("superseded-by", &next.run)];
                server.tag(&state.run, &tags).await?;
                self.set_status(state, "KILLED", Some(end_of(state))).await
            };
            match old().await {
                Ok(()) | Err(Refusal::Gone { .. }) => {}
                Err(refusal) => return Err(refusal),
            }
            let tags = [tag("resumed-from", &state.run)];
            server.tag(&next.run, &tags).await?;
        }
        self.set_status(&next, "RUNNING", None).await?;
        self.describe(run, &mut next).await?;
        *state = next;
        Ok(After::FromStart)
    }

    async fn close(&mut self, run: &RunInfo, state: &mut State, end: End) -> Taken {
        self.store_if_there(run, state, "summary.json").await?;
        let events = about::events(run);
        if !events.is_empty() {
            self.store(state, "events.log", events.into_bytes()).await?;
        }
        self.join_sweep(run, state).await?;
        if run.sweep.is_some() && !state.has_parent && is_sweep_shipped(run) {
            let why = "the run of the sweep is not there yet".to_owned();
            return Err(Refusal::Later { why, after: None });
        }
        let status = match end.code {
            0 => "FINISHED",
            3 => "KILLED",
            _ => "FAILED",
        };
        self.set_status(state, status, Some(end_of(state))).await?;
        for path in run.last_files() {
            self.store_if_there(run, state, &path).await?;
        }
        match self.delete_copies(run, state).await {
            // Without permission to delete they stay.
            Err(Refusal::Later { why, after }) => Err(Refusal::Later { why, after }),
            _ => Ok(()),
        }
    }
}

/// Whether another process ships the sweep of a run now, which means that its run will exist.
fn is_sweep_shipped(run: &RunInfo) -> bool {
    let sweep = run.dir.parent();
    sweep.is_some_and(|sweep| Files::is_held(sweep, Mlflow::NAME))
}

/// The key of a run.
fn key(run: &RunInfo, generation: u64) -> String {
    match generation {
        0 => run.id.clone(),
        generation => format!("{}-r{generation}", run.id),
    }
}

/// Number of starts of the directory's run before a run of the server began.
fn generation_of(found: &Run) -> u64 {
    let key = found.tag(KEY).unwrap_or_default();
    let generation = key.rsplit_once("-r");
    let generation = generation.and_then(|(_, count)| count.parse().ok());
    generation.unwrap_or(0)
}

/// The state of a run that was just found or made.
fn state_of(found: &Run, generation: u64) -> State {
    let path = found.info.artifact_uri.strip_prefix("mlflow-artifacts:");
    // A path may begin with a server, which is the same one.
    let path = path.map(|path| match path.strip_prefix("//") {
        Some(named) => named.split_once('/').map_or("", |(_, path)| path),
        None => path,
    });
    State {
        run: found.info.run_id.clone(),
        generation,
        files: path.map(|path| path.trim_matches('/').to_owned()),
        ..State::default()
    }
}

/// The end of the rows that were sent, in milliseconds since 1970.
fn end_of(state: &State) -> i64 {
    state.last.unwrap_or_else(|| batch::milliseconds(now()))
}

/// Records the time of rows that were sent.
fn note_time(state: &mut State, rows: &[Stamped]) {
    let last = rows.iter().map(|row| batch::milliseconds(row.time)).max();
    state.last = state.last.max(last);
}
