//! W&B from the command line: failing servers, the Stop button of a run's page, and exports of
//! runs. The server is `wandb_recorder.py` of `$SPD_SHARED/reference/tracker`, or else of `shared/`
//! beside the workspace; without it, tests are skipped.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};
use spd_checkpoint::atomic::write_file;

use crate::both::is_gone;
use crate::gate::{Fate, Gate};
use crate::scratch::{Running, Scratch, end, launch, names, send, start, wait_until};
use crate::trackers::SHORT;

/// The id of a run, which its spool would choose.
const ID: &str = "k3v9x2abcdef";

/// A server that runs until it is dropped.
struct Recorder {
    _process: Running,
    port: u16,
}

impl Recorder {
    /// A server with options; without a recorder the test is skipped.
    fn start(options: &[&str]) -> Option<Self> {
        let shared = std::env::var_os("SPD_SHARED").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
            PathBuf::from,
        );
        let script = shared.join("reference/tracker/wandb_recorder.py");
        if !script.is_file() {
            spd_testing::skip("shared/reference/tracker/wandb_recorder.py");
            return None;
        }
        let port = spd_testing::ports::free();
        let mut command = Command::new("python3");
        command
            .arg(script)
            .args(["--port", &port.to_string()])
            .args(options)
            .stdout(Stdio::null());
        let recorder = Self {
            _process: Running::of(&mut command),
            port,
        };
        wait_until("the recorder answers", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Some(recorder)
    }

    /// The same command, with a key for this server.
    fn known_to(&self, mut command: Command) -> Command {
        command
            .env("WANDB_BASE_URL", format!("http://127.0.0.1:{}", self.port))
            .env("WANDB_API_KEY", "0".repeat(40));
        command
    }

    /// The server's data of a run.
    fn run(&self, id: &str) -> Value {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let request = "GET /__state HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let mut runs: Value = serde_json::from_str(body).unwrap();
        runs[format!("fixture-entity/spd/{id}")].take()
    }
}

fn put(path: &Path, text: &str) {
    write_file(path, text.as_bytes()).unwrap();
}

/// Begins a run like the spool of a rank; only then can it be shipped.
fn begin(run_dir: &Path, id: &str) {
    let start =
        json!({"run": id, "generation": 0, "step": 0, "offset": 0, "lines": 0, "time": 1.795e9});
    put(&run_dir.join("starts.jsonl"), &format!("{start}\n"));
}

/// A server on whose pages Stop was pressed.
fn pressed(scratch: &Scratch) -> Option<Recorder> {
    let answers = scratch.path().join("answers.json");
    put(&answers, r#"{"file_stream": {"json": {"stopped": true}}}"#);
    Recorder::start(&["--override", answers.to_str().unwrap()])
}

const PRESSED: &str = "wandb: somebody pressed Stop on the page of the run;";

#[test]
fn stop_on_the_page_of_a_run_makes_it_save_and_exit() {
    let scratch = Scratch::new();
    let Some(server) = pressed(&scratch) else {
        return;
    };
    let command = || {
        let arguments = ["--tracker", "wandb", "--restarts", "3"];
        server.known_to(scratch.run("polite", &arguments))
    };
    let launcher = start(command());
    let rank = scratch.rank_pid();
    begin(&scratch.run_dir(), ID);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(is_gone(rank));
    let line = format!("{PRESSED} the rank saves and exits, 25 s at most; Ctrl-C kills it");
    assert!(ended.stderr.contains(&line), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("stopped after step 120, which is saved; the same command goes on"),
        "{}",
        ended.stderr
    );
    assert!(!ended.stderr.contains("started again"), "{}", ended.stderr);
    // On a busy machine the two seconds at the end may be too short, and the rest is sent here.
    let run_dir = scratch.run_dir();
    let ship = scratch.launcher(&["ship", run_dir.to_str().unwrap(), "--tracker", "wandb"]);
    let shipped = launch(server.known_to(ship));
    assert_eq!(shipped.code, Some(0), "{}", shipped.stderr);
    let run = server.run(ID);
    assert_eq!(
        (&run["complete"], &run["exitcode"]),
        (&json!(true), &json!(255))
    );
    // It continues, although the page still shows the earlier stop.
    let count = |run: &Value| run["events"].as_array().map_or(0, Vec::len);
    let before = count(&run);
    let launcher = start(command());
    wait_until("the run goes on", || count(&server.run(ID)) > before);
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("SIGTERM: the rank saves and exits"),
        "{}",
        ended.stderr
    );
    assert!(!ended.stderr.contains(PRESSED), "{}", ended.stderr);
}

#[test]
fn a_run_of_a_sweep_is_stopped_alone() {
    let scratch = Scratch::new();
    // The recorder knows the first run before it begins.
    let state = scratch.path().join("state.json");
    let run = json!({
        "id": "g", "name": ID, "entity": "fixture-entity", "project": "spd", "displayName": "x", "config": {}, "summary": {},
        "tags": [], "notes": null, "group": null, "jobType": null, "history": [], "events": [], "log": [], "summaryLines": [],
        "files": {}, "uploaded": [], "complete": null, "exitcode": null, "heartbeats": 0, "upserts": 0, "stopped": true, "rejected": [],
    });
    let known = json!({ (format!("fixture-entity/spd/{ID}")): run });
    put(&state, &known.to_string());
    let Some(server) = Recorder::start(&["--state", state.to_str().unwrap()]) else {
        return;
    };
    let arguments = ["--seeds", "0..2", "--threads", "2", "--tracker", "wandb"];
    let launcher = start(server.known_to(scratch.sweep("polite", &arguments)));
    let [first, second] = ["runs/s/seed=0", "runs/s/seed=1"].map(|dir| {
        let pid = scratch.rank_pid_of(dir);
        let id = if dir.ends_with('0') {
            ID
        } else {
            "aaaabbbbcccc"
        };
        begin(&scratch.path().join(dir), id);
        pid
    });
    let states = || -> Vec<Value> {
        let text = fs::read(scratch.path().join("runs/s/sweep.json")).unwrap();
        let told: Value = serde_json::from_slice(&text).unwrap();
        let runs = told["runs"].as_array().unwrap().iter();
        runs.map(|run| run["state"].clone()).collect()
    };
    wait_until("the first is stopped", || states()[0] == "stopped");
    assert!(is_gone(first) && !is_gone(second));
    assert_eq!(states()[1], "running");
    wait_until("the second is shipped", || {
        server.run("aaaabbbbcccc")["events"]
            .as_array()
            .is_some_and(|events| !events.is_empty())
    });
    assert!(!is_gone(second));
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert_eq!(states(), ["stopped", "stopped"]);
    let log =
        |name: &str| fs::read_to_string(scratch.path().join("runs/s/logs").join(name)).unwrap();
    assert!(log("seed=0.log").contains(PRESSED), "{}", log("seed=0.log"));
    assert!(
        !log("seed=1.log").contains(PRESSED),
        "{}",
        log("seed=1.log")
    );
}

#[test]
fn ship_ignores_the_stop_button() {
    let scratch = Scratch::new();
    let Some(server) = pressed(&scratch) else {
        return;
    };
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    begin(&scratch.run_dir(), ID);
    let ended =
        launch(server.known_to(scratch.launcher(&["ship", "runs/x", "--tracker", "wandb"])));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("wandb: all 1 rows are sent"),
        "{}",
        ended.stderr
    );
    assert!(!ended.stderr.contains("Stop"), "{}", ended.stderr);
}

#[test]
fn a_faulty_server_only_delays_the_end_of_a_run() {
    let Some(server) = Recorder::start(&[]) else {
        return;
    };
    let befalls = |fate: Fate| {
        let scratch = Scratch::new();
        let gate = Gate::before(([127, 0, 0, 1], server.port).into(), fate);
        let known = |mut command: Command| {
            command = server.known_to(command);
            command.env("WANDB_BASE_URL", format!("http://{}", gate.address));
            command
        };
        let mut command = known(scratch.real("tms_5-2.toml", "runs/x", &SHORT));
        command.args(["--tracker", "wandb"]);
        let ended = launch(command);
        assert_eq!(ended.code, Some(0), "{fate:?}: {}", ended.stderr);
        let count = |words: &str| ended.stderr.matches(words).count();
        let warned = count("the run goes on, and rows wait in metrics.jsonl");
        // A silent server may still answer.
        let expected = usize::from(fate != Fate::Silence);
        assert_eq!(warned, expected, "{fate:?}: {}", ended.stderr);
        assert_eq!(count("wandb: 5 rows are not sent: "), 1, "{}", ended.stderr);
        gate.set(Fate::Through);
        let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
        let steps = rows.lines().map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            row["step"].as_u64().unwrap()
        });
        let mut steps: Vec<u64> = steps.collect();
        steps.dedup();
        let starts = fs::read_to_string(scratch.run_dir().join("starts.jsonl")).unwrap();
        let start: Value = serde_json::from_str(starts.lines().next().unwrap()).unwrap();
        for _ in 0..2 {
            let ended = launch(known(scratch.launcher(&["ship", "runs/x"])));
            assert_eq!(ended.code, Some(0), "{fate:?}: {}", ended.stderr);
            let run = server.run(start["run"].as_str().unwrap());
            let lines = run["history"].as_array().unwrap().iter();
            let lines = lines.map(|line| {
                let line: Value = serde_json::from_str(line.as_str().unwrap()).unwrap();
                line["_step"].as_u64().unwrap()
            });
            assert_eq!(lines.collect::<Vec<_>>(), steps, "{fate:?}");
            let end = (&run["complete"], &run["exitcode"], &run["rejected"]);
            assert_eq!(end, (&json!(true), &json!(0), &json!([])), "{fate:?}");
        }
    };
    let fates = [
        Fate::Refused,
        Fate::Silence,
        Fate::Answered(500, ""),
        Fate::Lost,
    ];
    thread::scope(|scope| {
        for fate in fates {
            let befalls = &befalls;
            scope.spawn(move || befalls(fate));
        }
    });
}

#[test]
fn an_export_for_wandb_sync_is_complete_or_absent() {
    let scratch = Scratch::new();
    let export = |run: &str| launch(scratch.launcher(&["export", run, "--wandb", "--out", "out"]));
    let missing = export("runs/x");
    assert_eq!(missing.code, Some(2), "{}", missing.stderr);
    assert!(
        missing.error().starts_with("runs/x: holds no config.toml"),
        "{}",
        missing.stderr
    );
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let early = export("runs/x");
    assert_eq!(early.code, Some(2), "{}", early.stderr);
    assert_eq!(
        early.error(),
        "runs/x: the run has made no rows yet; export it when its first step is logged"
    );
    assert!(!names(scratch.path()).contains(&"out".to_owned()));
    begin(&scratch.run_dir(), ID);
    let ended = export("runs/x");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // `date -u -d @1795000000`.
    let place = format!("out/offline-run-20261118_110640-{ID}");
    assert_eq!(
        ended.stdout,
        format!("the rows of 1 step are in {place}; `wandb sync {place}` sends them\n")
    );
    let dir = scratch.path().join(&place);
    assert_eq!(names(&dir), ["files".to_owned(), format!("run-{ID}.wandb")]);
    let files = ["config.toml", "report.html", "summary.json"];
    assert_eq!(names(&dir.join("files")), files);
    let again = export("runs/x");
    assert_eq!(again.code, Some(2), "{}", again.stderr);
    assert_eq!(
        again.error(),
        format!(
            "{place}: already exists, perhaps from an earlier export; name another directory with --out"
        )
    );
    assert_eq!(names(&scratch.path().join("out")).len(), 1);
}

#[test]
fn a_running_run_can_be_exported() {
    let scratch = Scratch::new();
    let launcher = start(scratch.run("polite", &[]));
    scratch.rank_pid();
    begin(&scratch.run_dir(), ID);
    let ended = launch(scratch.launcher(&["export", "runs/x", "--wandb", "--out", "out"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("the run goes on: W&B appends what is synced to what it has"),
        "{}",
        ended.stderr
    );
    send(launcher.id(), Signal::TERM);
    assert_eq!(end(launcher).code, Some(3));
}
