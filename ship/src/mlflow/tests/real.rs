//! A real `mlflow server`. `SPD_MLFLOW` is the directory that MLflow is installed in; without it,
//! the tests are skipped:
//!
//! ```text
//! pip install --target /tmp/mlflow mlflow-skinny flask flask-cors sqlalchemy alembic graphene \
//!     waitress "gunicorn<27" huey cryptography pandas aiohttp fastapi uvicorn
//! pip install --target /tmp/mlflow --no-deps mlflow mlflow-tracing
//! SPD_MLFLOW=/tmp/mlflow cargo test --release -p spd-ship -- mlflow
//! ```

use std::iter;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use spd_tracker::Histogram;

use super::*;

/// A server that is stopped at the end.
struct Mine {
    uri: String,
    port: u16,
    dir: TempDir,
    child: Child,
}

impl Mine {
    /// Without the packages the test is skipped.
    fn new() -> Option<Self> {
        if std::env::var_os("SPD_MLFLOW").is_none() {
            spd_testing::skip("SPD_MLFLOW");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let port = spd_testing::ports::free();
        let uri = format!("http://127.0.0.1:{port}");
        let child = begin(dir.path(), port);
        let mut mine = Self {
            uri,
            port,
            dir,
            child,
        };
        mine.wait();
        Some(mine)
    }

    fn restart(&mut self) {
        self.end();
        self.child = begin(self.dir.path(), self.port);
        self.wait();
    }

    /// Waits until it answers, however busy the machine is.
    fn wait(&mut self) {
        while self.ask("/version", None).is_none() {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "it ended before it answered: {ended:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn end(&mut self) {
        let group = Pid::from_child(&self.child);
        // It has two processes, and the first one leaves the second behind when it is killed.
        let _ = kill_process_group(group, Signal::KILL);
        self.child.wait().unwrap();
    }

    /// The answer to a call, if there is one.
    fn ask(&self, path: &str, body: Option<Json>) -> Option<Vec<u8>> {
        let client = crate::http::client().unwrap();
        let at = format!("{}{path}", self.uri);
        let request = match body {
            Some(body) => client.post(at).json(&body),
            None => client.get(at),
        };
        wait(crate::http::send(request)).ok()
    }

    fn call(&self, call: &str, body: Option<Json>) -> Json {
        let path = format!("/api/2.0/mlflow/{call}");
        serde_json::from_slice(&self.ask(&path, body).unwrap()).unwrap()
    }

    /// Steps and values of a metric, sorted.
    fn history(&self, run: &str, key: &str) -> Vec<(u64, String)> {
        let key = key.replace('/', "%2F");
        let call = format!("metrics/get-history?run_id={run}&metric_key={key}");
        let found = self.call(&call, None);
        let points = found["metrics"].as_array().into_iter().flatten();
        let points = points.map(|point| {
            let value = point["value"].to_string();
            (
                point["step"].as_u64().unwrap_or(0),
                value.trim_matches('"').to_owned(),
            )
        });
        let mut points: Vec<_> = points.collect();
        points.sort();
        points
    }

    fn run(&self, run: &str) -> Json {
        self.call(&format!("runs/get?run_id={run}"), None)["run"].clone()
    }

    fn file(&self, run: &str, path: &str) -> String {
        let path = format!("/get-artifact?run_uuid={run}&path={path}");
        String::from_utf8(self.ask(&path, None).unwrap()).unwrap()
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        self.end();
    }
}

fn begin(dir: &Path, port: u16) -> Child {
    let python = std::env::var_os("SPD_PYTHON").unwrap_or("python3".into());
    let store = format!("sqlite:///{}/db", dir.display());
    let mut command = Command::new(python);
    command
        .args([
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ])
        .args(["--port", &port.to_string(), "--backend-store-uri", &store])
        .arg("--artifacts-destination")
        .arg(dir.join("files"))
        .env("PYTHONPATH", std::env::var_os("SPD_MLFLOW").unwrap())
        .env("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
        .env("MLFLOW_DISABLE_TELEMETRY", "true")
        .current_dir(dir)
        .process_group(0)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

fn pair(found: &Json, key: &str) -> Option<String> {
    let items = found.as_array()?;
    let item = items.iter().find(|item| item["key"] == key)?;
    Some(item["value"].as_str()?.to_owned())
}

fn sorted(mut points: Vec<(u64, String)>) -> Vec<(u64, String)> {
    points.sort();
    points
}

/// The answer of a server: on a busy machine a request may take more than the minute that it gets,
/// and is sent again, as by the driver.
fn at_last<T>(ask: impl FnMut() -> Result<T, Refusal>) -> T {
    let answers = iter::repeat_with(ask).take(30);
    let mut answers = answers.skip_while(|answer| matches!(answer, Err(Refusal::Later { .. })));
    answers
        .next()
        .expect("an answer to one of 30 requests")
        .unwrap()
}

#[test]
fn a_real_server_has_every_row_once() {
    let Some(mut mine) = Mine::new() else {
        return;
    };
    let mut scratch = Scratch::new(&mine.uri);
    scratch.info.tracker.group = Some("sweep".to_owned());
    scratch.info.tracker.notes = Some("what **it** is".to_owned());
    scratch.info.tracker.tags = vec!["baseline".to_owned(), "k@v".to_owned()];
    let parameters: Json = (0..250)
        .map(|at| (format!("p{at}"), json!(at)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    scratch.info.config = json!({"many": parameters, "long": "v".repeat(7000), "empty": ""});
    spd_files::atomic::write_file(&scratch.path().join("config.toml"), &[b"seed = 0\n"]).unwrap();
    spd_files::atomic::write_file(&scratch.path().join("summary.json"), &[b"{}"]).unwrap();
    spd_files::atomic::write_file(&scratch.path().join("report.html"), &[b"<p>"]).unwrap();
    at_last(|| scratch.open());
    // 1200 points, sent twice, as after a lost answer. The server is killed and started again in
    // between.
    let begun = Instant::now();
    at_last(|| scratch.send(&losses(0..1200)));
    let elapsed = begun.elapsed();
    eprintln!("1200 points: {elapsed:?}");
    mine.restart();
    at_last(|| scratch.send(&losses(600..1200)));
    let run = scratch.state.run.clone();
    assert_eq!(mine.history(&run, "loss"), sorted(counted(0..1200)));
    // Every kind of value.
    std::fs::create_dir_all(scratch.path().join("figures/step 1")).unwrap();
    spd_files::atomic::write_file(&scratch.path().join("figures/step 1/a.svg"), &[b"<svg/>"])
        .unwrap();
    let histogram = Histogram {
        edges: vec![0.0, 0.5, 1.0],
        counts: vec![30.0, 10.0],
    };
    let rich = Row::new(1200, Kind::Eval)
        .with("nan", f64::NAN)
        .with("up", f64::INFINITY)
        .with("down", f64::NEG_INFINITY)
        .with("tiny", 1.5e-8)
        .with("a@b", 1.0)
        .with("a#b", 2.0)
        .with("L0/h.0.attn q:k-proj", 12.5)
        .with("spread", Value::Histogram(histogram))
        .with("words", Value::Text("said".to_owned()))
        .with("figure", Value::File("figures/step 1/a.svg".to_owned()));
    let rich = [stamped(rich)];
    at_last(|| scratch.send(&rich));
    at_last(|| scratch.send(&rich));
    let one = |value: &str| vec![(1200, value.to_owned())];
    assert_eq!(mine.history(&run, "nan"), one("NaN"));
    assert_eq!(mine.history(&run, "up"), one("1.7976931348623157e+308"));
    assert_eq!(mine.history(&run, "down"), one("-1.7976931348623157e+308"));
    assert_eq!(mine.history(&run, "tiny"), one("1.5e-8"));
    assert_eq!(mine.history(&run, "L0/h.0.attn q:k-proj"), one("12.5"));
    assert_eq!(mine.history(&run, "spread/at_least_0.5"), one("0.25"));
    assert_eq!(mine.history(&run, &names::taken("a@b")), one("1.0"));
    assert_eq!(mine.history(&run, &names::taken("a#b")), one("2.0"));
    let notes: Json = serde_json::from_str(&mine.file(&run, "names.json")).unwrap();
    assert_eq!(notes[names::taken("a@b")], "a@b");
    assert_eq!(mine.file(&run, "text/words/step-00001200.txt"), "said");
    assert_eq!(mine.file(&run, "figures/step%201/a.svg"), "<svg/>");
    assert_eq!(mine.file(&run, "config.toml"), "seed = 0\n");
    // System rows and events.
    let machine = Stamped {
        row: Row::new(0, Kind::System).with("system/cpu_percent", 50.0),
        time: BEGUN + 15.0,
    };
    let alert = stamped(Row::new(1200, Kind::Alert).with_note("the loss is NaN"));
    let system = [machine, alert];
    at_last(|| scratch.system(&system));
    assert_eq!(
        mine.history(&run, "system/cpu_percent"),
        [(15, "50.0".to_owned())]
    );
    at_last(|| scratch.close(0));
    let found = mine.run(&run);
    assert_eq!(found["info"]["status"], "FINISHED");
    assert_eq!(found["info"]["end_time"], 1_795_001_200_000_i64);
    assert_eq!(found["info"]["run_name"], "toy");
    assert_eq!(found["data"]["params"].as_array().unwrap().len(), 252);
    let tags = &found["data"]["tags"];
    assert_eq!(
        pair(tags, "mlflow.note.content").as_deref(),
        Some("what **it** is")
    );
    assert_eq!(pair(tags, "spd.group").as_deref(), Some("sweep"));
    assert_eq!(pair(tags, "baseline").as_deref(), Some("true"));
    assert_eq!(pair(tags, "spd.alert").as_deref(), Some("the loss is NaN"));
    assert_eq!(pair(tags, "spd.not-stored"), None);
    assert_eq!(mine.file(&run, "summary.json"), "{}");
    assert_eq!(mine.file(&run, "report.html"), "<p>");
    // The run continues.
    scratch.restart();
    at_last(|| scratch.open());
    assert_eq!(scratch.state.run, run);
    assert_eq!(mine.run(&run)["info"]["status"], "RUNNING");
    at_last(|| scratch.send(&losses(1200..1201)));
    assert_eq!(mine.history(&run, "loss").len(), 1201);
    // The run rolls back, to another run.
    scratch.restart();
    at_last(|| scratch.open());
    assert_eq!(at_last(|| scratch.roll_back(1)), After::FromStart);
    let next = scratch.state.run.clone();
    at_last(|| scratch.send(&losses(0..10)));
    at_last(|| scratch.close(3));
    assert_eq!(mine.history(&next, "loss"), sorted(counted(0..10)));
    let (old, new) = (mine.run(&run), mine.run(&next));
    assert_eq!(
        pair(&old["data"]["tags"], "superseded-by").as_ref(),
        Some(&next)
    );
    assert_eq!(
        pair(&new["data"]["tags"], "resumed-from").as_ref(),
        Some(&run)
    );
    assert_eq!(new["info"]["status"], "KILLED");
    assert_eq!(new["info"]["run_name"], "toy-r1");
    // A lost cursor finds the run again; a deleted run is made again.
    scratch.state = State::default();
    scratch.restart();
    at_last(|| scratch.open());
    assert_eq!(scratch.state.run, next);
    mine.call("runs/delete", Some(json!({"run_id": next})));
    let found = scratch.send(&losses(10..11));
    assert!(matches!(found, Err(Refusal::Gone { .. })), "{found:?}");
    assert_eq!(scratch.open(), Ok(true));
    assert_ne!(scratch.state.run, next);
    at_last(|| scratch.send(&losses(0..11)));
    assert_eq!(
        mine.history(&scratch.state.run, "loss"),
        sorted(counted(0..11))
    );
}
