//! The sink with a server that stores everything, loses answers and refuses on request:
//! `wandb_recorder.py` of `$SPD_SHARED/reference/tracker`, or of `shared/` beside the workspace.
//! Without it, the tests are skipped.

mod captured;
mod faults;
mod meaning;
mod official;
mod roll_backs;
mod runs;
mod sync;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use spd_configs::Tracker;
use spd_tracker::{Cursor, Kind, Row};

use super::Wandb;
use super::state::State;
use crate::credentials::Environment;
use crate::feed::{Fed, Feed, Steps};
use crate::run::RunInfo;
use crate::sink::{End, Refusal, Sink, Stamped};

/// A key of the right length, which belongs to no account.
const KEY: &str = "0123456789abcdef0123456789abcdef01234567";

const ENTITY: &str = "fixture-entity";

/// Makes a file.
pub(crate) fn put(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
    spd_files::atomic::write_file(path.as_ref(), &[bytes.as_ref()])
}

/// The `shared` directory, if it exists.
fn shared() -> Option<PathBuf> {
    let shared = std::env::var_os("SPD_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    Some(shared.join("reference")).filter(|folder| folder.is_dir())
}

/// A server, until it is dropped.
struct Recorder {
    process: Child,
    port: u16,
    script: PathBuf,
    options: Vec<String>,
    folder: tempfile::TempDir,
}

impl Recorder {
    /// A server without faults; the test is skipped without the recorder.
    fn start() -> Option<Self> {
        Self::with(&json!([]), &[])
    }

    /// A server with faults, and further options.
    fn with(faults: &Json, options: &[&str]) -> Option<Self> {
        let Some(shared) = shared() else {
            spd_testing::skip("shared/reference");
            return None;
        };
        let script = shared.join("tracker/wandb_recorder.py");
        let folder = tempfile::tempdir().unwrap();
        let listed = folder.path().join("faults.json");
        crate::wandb::tests::put(&listed, faults.to_string()).unwrap();
        let mut all = vec!["--faults".to_string(), listed.display().to_string()];
        all.extend(options.iter().map(|option| option.to_string()));
        let log = folder.path().join("log");
        let port = spd_testing::ports::free();
        let process = spawn(&script, port, &log, &all);
        Some(Self {
            process,
            port,
            script,
            options: all,
            folder,
        })
    }

    /// Starts it again, without its data.
    fn forget(&mut self) {
        self.end();
        let log = self.folder.path().join("log");
        self.process = spawn(&self.script, self.port, &log, &self.options);
    }

    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn environment(&self) -> Environment {
        Environment::of(
            &[("WANDB_BASE_URL", &self.address()), ("WANDB_API_KEY", KEY)],
            None,
        )
    }

    /// A sink without waits.
    fn sink(&self) -> Wandb {
        let mut sink = Wandb::of(self.environment(), Arc::default());
        (sink.gap, sink.patience) = (Duration::ZERO, Duration::from_millis(10));
        sink
    }

    /// All runs, by `entity/project/run`.
    fn runs(&self) -> Json {
        self.get("__state")
    }

    /// The data of a run.
    fn run(&self, name: &str) -> Json {
        self.runs()[format!("{ENTITY}/spd/{name}")].take()
    }

    /// All requests, in order.
    fn exchanges(&self) -> Vec<Json> {
        let folder = std::fs::read_dir(self.folder.path().join("log")).unwrap();
        let mut paths: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let read = |path: &PathBuf| plain(&std::fs::read_to_string(path).unwrap());
        paths.iter().map(read).collect()
    }

    fn kinds(&self) -> Vec<String> {
        let exchanges = self.exchanges();
        let kinds = exchanges.iter();
        kinds
            .map(|exchange| exchange["kind"].as_str().unwrap().into())
            .collect()
    }

    fn get(&self, path: &str) -> Json {
        let url = format!("{}/{path}", self.address());
        let text = on_runtime(async {
            let client = crate::http::client().unwrap();
            crate::http::send(client.get(url)).await.unwrap()
        });
        plain(&String::from_utf8(text).unwrap())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end();
    }
}

/// A recorder that listens; `None` if another process has the port.
fn spawn(script: &Path, port: u16, log: &Path, options: &[String]) -> Child {
    let mut process = Command::new("python3")
        .arg(script)
        .args(["--port", &port.to_string(), "--out"])
        .arg(log)
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    // Its first line: it listens.
    output.read_line(&mut said).unwrap();
    assert!(!said.is_empty(), "the recorder on port {port} ended");
    process
}

/// Reads JSON with bare NaN and infinities, which become strings.
fn plain(text: &str) -> Json {
    let (mut plain, mut rest, mut in_string) = (String::new(), text, false);
    while let Some(letter) = rest.chars().next() {
        let word = ["NaN", "-Infinity", "Infinity"];
        let word = word
            .into_iter()
            .find(|word| !in_string && rest.starts_with(word));
        if let Some(word) = word {
            plain.push_str(&format!("\"{word}\""));
            rest = &rest[word.len()..];
            continue;
        }
        if in_string && letter == '\\' {
            plain.push_str(&rest[..2]);
            rest = &rest[2..];
            continue;
        }
        in_string ^= letter == '"';
        plain.push(letter);
        rest = &rest[letter.len_utf8()..];
    }
    serde_json::from_str(&plain).unwrap()
}

/// The lines of a file of a run.
fn lines(run: &Json, file: &str) -> Vec<Json> {
    let lines = run[file].as_array().unwrap().iter();
    lines.map(|line| plain(line.as_str().unwrap())).collect()
}

fn steps(run: &Json) -> Vec<u64> {
    let lines = lines(run, "history");
    lines
        .iter()
        .map(|line| line["_step"].as_u64().unwrap())
        .collect()
}

fn on_runtime<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(future)
}

/// A figure of 6 by 4.
const FIGURE: &str = r##"<svg width="6" height="4" xmlns="http://www.w3.org/2000/svg"><rect width="3" height="2" fill="#c03020"/></svg>"##;

/// The same as a PNG.
fn a_picture() -> Vec<u8> {
    crate::picture::png(FIGURE.as_bytes()).unwrap().bytes
}

fn a_run(dir: &Path) -> RunInfo {
    RunInfo {
        dir: dir.into(),
        id: "abcd1234".into(),
        tracker: Tracker {
            group: Some("sweep".into()),
            tags: vec!["a".into(), "b".into()],
            notes: Some("n".into()),
            ..Tracker::default()
        },
        name: "tms".into(),
        config: json!({"lr": 3e-4, "optimizer": {"beta": [0.9, 0.95]}, "name": "tiny"}),
        started: 1000.0,
        job: "train",
        host: "host".into(),
        sweep: None,
    }
}

fn row(step: u64) -> Stamped {
    Stamped {
        row: Row::new(step, Kind::Train).with("loss/total", 1.0 / (step + 1) as f64),
        time: 1000.0 + step as f64,
    }
}

fn rows(steps: std::ops::Range<u64>) -> Vec<Stamped> {
    steps.map(row).collect()
}

/// Handles refusals as a driver does, without waiting.
struct Driver {
    sink: Wandb,
    state: State,
    refusals: Vec<Refusal>,
}

impl Driver {
    fn new(sink: Wandb) -> Self {
        Self {
            sink,
            state: State::default(),
            refusals: Vec::new(),
        }
    }

    /// Another process with the written state.
    fn again(self, sink: Wandb) -> Self {
        let state = serde_json::to_string(&self.state).unwrap();
        Self {
            sink,
            state: serde_json::from_str(&state).unwrap(),
            refusals: self.refusals,
        }
    }

    async fn open(&mut self, run: &RunInfo) -> bool {
        loop {
            match self.sink.open(run, &mut self.state).await {
                Ok(is_anew) => return is_anew,
                Err(refusal) => self.refused(refusal),
            }
        }
    }

    async fn metrics(&mut self, run: &RunInfo, rows: &[Stamped]) {
        let before = self.state.clone();
        let Err(refusal) = self.sink.send_metrics(run, &mut self.state, rows).await else {
            return;
        };
        assert_eq!(self.state, before, "what is refused counts nothing");
        self.refused(refusal.clone());
        match refusal {
            Refusal::TooLarge { .. } | Refusal::Invalid { .. } if rows.len() > 1 => {
                let (first, second) = rows.split_at(rows.len() / 2);
                Box::pin(self.metrics(run, first)).await;
                Box::pin(self.metrics(run, second)).await;
            }
            Refusal::TooLarge { .. } | Refusal::Invalid { .. } => {
                while let Err(refusal) = self.sink.skip(run, &mut self.state, rows).await {
                    self.refused(refusal);
                }
            }
            Refusal::Later { .. } => Box::pin(self.metrics(run, rows)).await,
            Refusal::Unauthorized { .. } | Refusal::Gone { .. } => {
                self.open(run).await;
                Box::pin(self.metrics(run, rows)).await;
            }
        }
    }

    async fn system(&mut self, run: &RunInfo, rows: &[Stamped]) {
        while let Err(refusal) = self.sink.send_system(run, &mut self.state, rows).await {
            self.refused(refusal);
        }
    }

    /// Sends all rows of a run directory.
    async fn all(&mut self, run: &RunInfo) {
        let mut feed = Feed::of(&run.dir, &Cursor::default(), &BTreeMap::new()).unwrap();
        while let Fed::Steps(Steps { rows, .. }) = feed.steps(100, true).unwrap()
            && !rows.is_empty()
        {
            self.metrics(run, &rows).await;
        }
        while let Some((_, _, rows)) = feed.system(100).unwrap() {
            self.system(run, &rows).await;
        }
    }

    async fn close(&mut self, run: &RunInfo, code: u8) {
        while let Err(refusal) = self.sink.close(run, &mut self.state, End { code }).await {
            self.refused(refusal);
        }
    }

    fn refused(&mut self, refusal: Refusal) {
        assert!(!format!("{refusal:?}").contains(KEY), "{refusal:?}");
        self.refusals.push(refusal);
        assert!(self.refusals.len() < 50, "{:?}", self.refusals);
    }
}
