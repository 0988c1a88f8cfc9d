//! The trackers of the farm, and their final content of a run: the recording server of `../shared`
//! for W&B, a real MLflow server (`SPD_MLFLOW` names the folder that it is installed in), event
//! files as read by TensorBoard (`SPD_TENSORBOARD`). Missing ones are reported and left out.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value as Json, json};
use spd_tracker::Start;
use tempfile::TempDir;

/// The server's folder for runs.
const ENTITY: &str = "fixture-entity";

/// A made-up key of the right length.
const KEY: &str = "0123456789abcdef0123456789abcdef01234567";

/// Prints the scalars of a directory, with their steps.
const EVENTS: &str = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})
found.Reload()
print(json.dumps({tag: [[e.step, repr(float(e.value))] for e in found.Scalars(tag)] for tag in found.Tags()['scalars'] if not tag.startswith('system/')}))
";

/// The available trackers.
pub(crate) struct Servers {
    pub(crate) wandb: Option<Server>,
    pub(crate) mlflow: Option<Server>,
    tensorboard: Option<OsString>,
}

/// A server process, killed on drop.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    program: Program,
    child: Mutex<Child>,
    dir: TempDir,
}

/// The program of a server.
enum Program {
    /// A script.
    Recorder(PathBuf),
    /// A folder of packages.
    Mlflow(OsString),
}

impl Servers {
    /// Starts the available servers, and reports the missing ones.
    pub(crate) fn start(suite: &str) -> Self {
        let skipped = |name: &str, why: &str| println!("skipped: {suite}: {name}: {why}");
        let wandb = recorder();
        if wandb.is_none() {
            skipped(
                "wandb",
                "there is no shared/reference with the recording server",
            );
        }
        let mlflow =
            env::var_os("SPD_MLFLOW").map(|packages| Server::start(Program::Mlflow(packages)));
        if mlflow.is_none() {
            skipped("mlflow", "SPD_MLFLOW names no folder");
        }
        let tensorboard = env::var_os("SPD_TENSORBOARD");
        if tensorboard.is_none() {
            skipped("tensorboard", "SPD_TENSORBOARD names no folder");
        }
        Self {
            wandb,
            mlflow,
            tensorboard,
        }
    }

    /// The value of `--tracker`.
    pub(crate) fn names(&self) -> String {
        let mut names = Vec::new();
        names.extend(self.wandb.is_some().then_some("wandb"));
        names.extend(self.mlflow.is_some().then_some("mlflow"));
        names.extend(self.tensorboard.is_some().then_some("tensorboard"));
        names.join(",")
    }

    /// Sets the addresses of the servers, or of the proxies before them, for a launch.
    pub(crate) fn tell(&self, command: &mut Command, wandb: Option<&str>, mlflow: Option<&str>) {
        let own = |server: &Option<Server>| server.as_ref().map(Server::url);
        let found = [
            ("WANDB_BASE_URL", wandb.map(str::to_owned), &self.wandb),
            (
                "MLFLOW_TRACKING_URI",
                mlflow.map(str::to_owned),
                &self.mlflow,
            ),
        ];
        for (variable, asked, server) in found {
            if let Some(url) = asked.or_else(|| own(server)) {
                command.env(variable, url);
            }
        }
        command.env("WANDB_API_KEY", KEY);
    }

    /// The servers' content of the run in a directory, without times and machine data.
    ///
    /// # Errors
    ///
    /// One of them does not have the run, or does not know of its end.
    pub(crate) fn held(&self, run: &Path) -> Result<Json, String> {
        let mut held = Map::new();
        for name in self.names().split(',') {
            held.insert(name.into(), self.held_by(name, run)?);
        }
        Ok(Json::Object(held))
    }

    /// The content of one server.
    ///
    /// # Errors
    ///
    /// As [`Servers::held`].
    pub(crate) fn held_by(&self, name: &str, run: &Path) -> Result<Json, String> {
        let starts = Start::all(run).map_err(|found| found.to_string())?;
        let id = &starts.first().ok_or("the run has no start")?.run;
        match (name, &self.wandb, &self.mlflow, &self.tensorboard) {
            ("wandb", Some(server), ..) => of_wandb(server, id),
            ("mlflow", _, Some(server), _) => of_mlflow(server, id),
            ("tensorboard", .., Some(packages)) => of_tensorboard(packages, run),
            _ => Err(format!("{name} is not here")),
        }
    }

    /// The address of one server.
    pub(crate) fn address(&self, name: &str) -> SocketAddr {
        let server = match name {
            "wandb" => &self.wandb,
            _ => &self.mlflow,
        };
        server.as_ref().unwrap().address
    }
}

/// The first difference between two servers' contents.
pub(crate) fn difference(expected: &Json, found: &Json, place: &str) -> Option<String> {
    match (expected, found) {
        (Json::Object(one), Json::Object(other)) => {
            let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
            names.sort_unstable();
            names.dedup();
            names.into_iter().find_map(|name| {
                let [one, other] = [one, other].map(|map| map.get(name).unwrap_or(&Json::Null));
                difference(one, other, &format!("{place}/{name}"))
            })
        }
        (Json::Array(one), Json::Array(other)) if one.len() == other.len() => {
            let mut pairs = one.iter().zip(other).enumerate();
            pairs.find_map(|(at, (one, other))| difference(one, other, &format!("{place}/{at}")))
        }
        _ if expected == found => None,
        _ => {
            let short = |value: &Json| value.to_string().chars().take(200).collect::<String>();
            let (expected, found) = (short(expected), short(found));
            Some(format!("{place}: expected {expected}, found {found}"))
        }
    }
}

fn of_wandb(server: &Server, id: &str) -> Result<Json, String> {
    let run = server.ask("/__state", None)[format!("{ENTITY}/spd/{id}")].take();
    if run.is_null() {
        return Err(format!("W&B has no run {id}"));
    }
    let lines = run["history"].as_array().into_iter().flatten();
    let lines = lines.map(|line| {
        // Toys have no numbers that JSON lacks.
        let mut line: Json = serde_json::from_str(line.as_str().unwrap()).unwrap();
        if let Some(line) = line.as_object_mut() {
            line.remove("_timestamp");
            line.remove("_runtime");
        }
        line
    });
    let lines: Vec<Json> = lines.collect();
    let files = run["files"].as_object().into_iter().flatten();
    // They arrive in any order.
    let files: BTreeSet<&String> = files.map(|(name, _)| name).collect();
    Ok(json!({
        "files": files,
        "history": lines,
        "complete": run["complete"],
        "exitcode": run["exitcode"],
        "rejected": run["rejected"],
    }))
}

fn of_mlflow(server: &Server, id: &str) -> Result<Json, String> {
    let call =
        |call: &str, body: Option<Json>| server.ask(&format!("/api/2.0/mlflow/{call}"), body);
    let experiment = call("experiments/get-by-name?experiment_name=spd", None);
    let experiment = &experiment["experiment"]["experiment_id"];
    let asked =
        json!({"experiment_ids": [experiment], "filter": format!("tags.`spd.run` = '{id}'")});
    let found = call("runs/search", Some(asked));
    let runs = found["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let [run] = runs else {
        return Err(format!("MLflow has {} runs of {id}", runs.len()));
    };
    let run_id = run["info"]["run_id"].as_str().unwrap_or_default();
    let mut metrics = Map::new();
    for metric in run["data"]["metrics"].as_array().into_iter().flatten() {
        let key = metric["key"].as_str().unwrap_or_default();
        if key.starts_with("system/") {
            continue;
        }
        let path = key.replace('/', "%2F").replace(' ', "%20");
        let history = call(
            &format!("metrics/get-history?run_id={run_id}&metric_key={path}"),
            None,
        );
        let points = history["metrics"].as_array().into_iter().flatten();
        let mut points: Vec<(i64, String)> = points
            .map(|point| {
                (
                    point["step"].as_i64().unwrap_or(0),
                    point["value"].to_string(),
                )
            })
            .collect();
        points.sort();
        metrics.insert(key.to_owned(), json!(points));
    }
    Ok(json!({"metrics": metrics, "status": run["info"]["status"]}))
}

fn of_tensorboard(packages: &OsString, run: &Path) -> Result<Json, String> {
    let mut command = Command::new("python3");
    command.args(["-c", EVENTS]).arg(run.join("tensorboard"));
    let output = command.env("PYTHONPATH", packages).output().unwrap();
    serde_json::from_slice(&output.stdout).map_err(|found| {
        let said = String::from_utf8_lossy(&output.stderr);
        format!("TensorBoard's reader: {found}: {said}")
    })
}

fn recorder() -> Option<Server> {
    let shared = env::var_os("SPD_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let script = shared.join("reference/tracker/wandb_recorder.py");
    let is_there = script.is_file();
    is_there.then(|| Server::start(Program::Recorder(script)))
}

impl Program {
    fn command(&self, address: SocketAddr, dir: &Path) -> Command {
        let mut command = Command::new("python3");
        let port = address.port().to_string();
        match self {
            Self::Recorder(script) => {
                command.arg(script).args(["--port", &port]);
                command.arg("--state").arg(dir.join("state.json"));
            }
            Self::Mlflow(packages) => {
                let store = format!("sqlite:///{}/db", dir.display());
                command.args(["-m", "mlflow", "server", "--workers", "1"]);
                command.args(["--host", "127.0.0.1", "--port", &port]);
                command.args(["--backend-store-uri", &store]);
                command
                    .arg("--artifacts-destination")
                    .arg(dir.join("files"));
                command
                    .env("PYTHONPATH", packages)
                    .env("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
                    .env("MLFLOW_DISABLE_TELEMETRY", "true");
            }
        }
        command
            .current_dir(dir)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// The beginning of its answer once it is up.
    fn answers(&self) -> &'static str {
        match self {
            Self::Recorder(_) => "/__log",
            Self::Mlflow(_) => "/version",
        }
    }
}

impl Server {
    fn start(program: Program) -> Self {
        let address = (Ipv4Addr::LOCALHOST, spd_testing::ports::free()).into();
        let dir = tempfile::tempdir().unwrap();
        let child = program.command(address, dir.path()).spawn().unwrap();
        let server = Self {
            address,
            program,
            child: Mutex::new(child),
            dir,
        };
        server.wait();
        server
    }

    fn wait(&self) {
        let begun = Instant::now();
        while self.try_ask(self.program.answers(), None).is_none() {
            let waited = begun.elapsed();
            assert!(
                waited < Duration::from_secs(600),
                "{} does not answer",
                self.address
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills it and starts it again with its stored data.
    pub(crate) fn restart(&self) {
        self.end();
        let child = self.program.command(self.address, self.dir.path()).spawn();
        *self.child.lock().unwrap() = child.unwrap();
        self.wait();
    }

    fn end(&self) {
        let mut child = self.child.lock().unwrap();
        // It may have child processes.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.wait();
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its answer, as JSON.
    pub(crate) fn ask(&self, path: &str, body: Option<Json>) -> Json {
        let answer = self.try_ask(path, body).unwrap();
        serde_json::from_slice(&answer).unwrap_or_default()
    }

    fn try_ask(&self, path: &str, body: Option<Json>) -> Option<Vec<u8>> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.map_or_else(String::new, |body| body.to_string());
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        let head = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
        Some(answer.split_off(head + 4))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
