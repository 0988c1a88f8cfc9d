//! A fake server in this process: the calls of the sink, stored in memory, with answers from a list
//! first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard};
use std::thread;

use serde_json::json;

use super::*;

/// A fault of the server.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// Answers with this, and does nothing.
    Answer(u16, String),
    /// Does the request, and closes the connection without an answer.
    LostAnswer,
}

#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Faults of the next requests, by the end of their path.
    pub(super) faults: BTreeMap<&'static str, VecDeque<Fault>>,
    /// The expected `Authorization`.
    pub(super) wanted: Option<String>,
    pub(super) experiments: BTreeMap<String, String>,
    pub(super) runs: BTreeMap<String, KeptRun>,
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// Calls, in order.
    pub(super) calls: Vec<String>,
}

#[derive(Debug, Default, Clone)]
pub(super) struct KeptRun {
    pub(super) tags: BTreeMap<String, String>,
    pub(super) parameters: BTreeMap<String, String>,
    /// Key, time, step, value.
    pub(super) metrics: BTreeSet<(String, i64, u64, String)>,
    pub(super) status: String,
    pub(super) deleted: bool,
}

impl KeptRun {
    /// Steps and values of a metric.
    pub(super) fn history(&self, key: &str) -> Vec<(u64, String)> {
        let of_key = self.metrics.iter().filter(|(found, ..)| found == key);
        of_key
            .map(|(_, _, step, value)| (*step, value.clone()))
            .collect()
    }
}

pub(super) struct Fake {
    pub(super) uri: String,
    kept: Arc<Mutex<Kept>>,
}

impl Fake {
    pub(super) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap());
        let kept = Arc::new(Mutex::new(Kept::default()));
        let shared = Arc::clone(&kept);
        // It ends with the process.
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(connection, &shared));
            }
        });
        Self { uri, kept }
    }

    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap()
    }

    pub(super) fn fail(&self, call: &'static str, fault: Fault) {
        let mut kept = self.kept();
        kept.faults.entry(call).or_default().push_back(fault);
    }
}

fn serve(connection: TcpStream, kept: &Mutex<Kept>) -> Option<()> {
    let mut reader = BufReader::new(connection.try_clone().unwrap());
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let (mut length, mut who) = (0, None);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let Some((name, value)) = header.trim().split_once(": ") else {
                break;
            };
            match name.to_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" => who = Some(value.to_owned()),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let (status, text) = kept.lock().unwrap().answer(&method, &path, who, &body)?;
        let length = text.len();
        let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{text}");
        (&connection).write_all(answer.as_bytes()).ok()?;
    }
}

impl Kept {
    fn answer(
        &mut self,
        method: &str,
        path: &str,
        who: Option<String>,
        body: &[u8],
    ) -> Option<(u16, String)> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        self.calls.push(path.to_owned());
        if self.wanted.is_some() && who != self.wanted {
            return Some((401, "You are not authenticated".to_owned()));
        }
        let mut faults = self.faults.iter_mut();
        let fault = faults.find_map(|(end, faults)| {
            let meant = path.ends_with(end);
            meant.then(|| faults.pop_front()).flatten()
        });
        if let Some(Fault::Answer(status, text)) = fault {
            return Some((status, text));
        }
        let done = self.done(method, path, query, body);
        if fault.is_some() {
            return None;
        }
        Some(match done {
            Ok(answer) => (200, answer.to_string()),
            Err((status, code, message)) => {
                let answer = json!({"error_code": code, "message": message});
                (status, answer.to_string())
            }
        })
    }

    fn done(
        &mut self,
        method: &str,
        path: &str,
        query: &str,
        body: &[u8],
    ) -> Result<Json, (u16, &'static str, String)> {
        if method == "PUT" {
            let (_, path) = path.split_once("/artifacts/").unwrap();
            self.files.insert(path.to_owned(), body.to_vec());
            return Ok(json!({}));
        }
        let missing = || (404, "RESOURCE_DOES_NOT_EXIST", "not found".to_owned());
        let asked: Json = serde_json::from_slice(body).unwrap_or_default();
        let text = |key: &str| asked[key].as_str().unwrap_or_default().to_owned();
        let call = path.strip_prefix("/api/2.0/mlflow/").ok_or_else(missing)?;
        match call {
            "experiments/get-by-name" => {
                let (_, name) = query.split_once('=').unwrap();
                let id = self.experiments.get(name).ok_or_else(missing)?;
                Ok(json!({"experiment": {"experiment_id": id, "lifecycle_stage": "active"}}))
            }
            "experiments/create" => {
                let id = self.experiments.len().to_string();
                if self.experiments.contains_key(&text("name")) {
                    return Err((400, "RESOURCE_ALREADY_EXISTS", "it exists".to_owned()));
                }
                self.experiments.insert(text("name"), id.clone());
                Ok(json!({"experiment_id": id}))
            }
            "runs/create" => {
                let id = format!("run{}", self.runs.len());
                self.runs.insert(id.clone(), KeptRun::default());
                self.tag(&id, &asked["tags"]);
                Ok(json!({"run": self.run(&id)}))
            }
            "runs/search" => {
                let filter = text("filter");
                let (key, value) = filter.split_once(" = ").unwrap();
                let key = key.strip_prefix("tags.`").unwrap().trim_end_matches('`');
                let of_tag = |run: &KeptRun| {
                    !run.deleted
                        && run.tags.get(key).map(String::as_str) == Some(value.trim_matches('\''))
                };
                let found = self.runs.iter().filter(|(_, run)| of_tag(run));
                let found: Vec<Json> = found.map(|(id, _)| self.run(id)).collect();
                Ok(json!({"runs": found}))
            }
            "runs/get" => {
                let (_, id) = query.split_once('=').unwrap();
                self.runs.get(id).ok_or_else(missing)?;
                Ok(json!({"run": self.run(id)}))
            }
            "runs/update" => {
                let run = self.runs.get_mut(&text("run_id")).ok_or_else(missing)?;
                run.status = text("status");
                Ok(json!({}))
            }
            "runs/delete" => {
                let run = self.runs.get_mut(&text("run_id")).ok_or_else(missing)?;
                run.deleted = true;
                Ok(json!({}))
            }
            "runs/log-batch" => {
                let id = text("run_id");
                let run = self.runs.get_mut(&id).ok_or_else(missing)?;
                if run.deleted {
                    let message = "The run must be in the 'active' state".to_owned();
                    return Err((400, "INVALID_PARAMETER_VALUE", message));
                }
                for item in asked["params"].as_array().into_iter().flatten() {
                    let pair = ["key", "value"].map(|key| item[key].as_str().unwrap().to_owned());
                    let [key, value] = pair;
                    let old = run.parameters.entry(key).or_insert_with(|| value.clone());
                    if *old != value {
                        let message = "Changing param values is not allowed".to_owned();
                        return Err((400, "INVALID_PARAMETER_VALUE", message));
                    }
                }
                for item in asked["metrics"].as_array().into_iter().flatten() {
                    let key = item["key"].as_str().unwrap().to_owned();
                    let (time, step) = (
                        item["timestamp"].as_i64().unwrap(),
                        item["step"].as_u64().unwrap(),
                    );
                    run.metrics
                        .insert((key, time, step, item["value"].to_string()));
                }
                self.tag(&id, &asked["tags"]);
                Ok(json!({}))
            }
            _ => Err((404, "ENDPOINT_NOT_FOUND", call.to_owned())),
        }
    }

    fn tag(&mut self, id: &str, tags: &Json) {
        let run = self.runs.get_mut(id).unwrap();
        for tag in tags.as_array().into_iter().flatten() {
            let pair = ["key", "value"].map(|key| tag[key].as_str().unwrap().to_owned());
            let [key, value] = pair;
            run.tags.insert(key, value);
        }
    }

    fn run(&self, id: &str) -> Json {
        let run = &self.runs[id];
        let tags = run
            .tags
            .iter()
            .map(|(key, value)| json!({"key": key, "value": value}));
        let tags: Vec<Json> = tags.collect();
        let stage = if run.deleted { "deleted" } else { "active" };
        let metrics = run.metrics.iter().map(|(key, ..)| json!({"key": key}));
        let metrics: Vec<Json> = metrics.collect();
        json!({
            "info": {
                "run_id": id,
                "experiment_id": "0",
                "artifact_uri": format!("mlflow-artifacts:/{id}"),
                "lifecycle_stage": stage,
            },
            "data": {"tags": tags, "metrics": metrics},
        })
    }
}
