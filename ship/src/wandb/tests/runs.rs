//! Runs without faults: begun, resumed, ended.

use std::sync::atomic::Ordering;

use spd_tracker::{Histogram, Value};

use super::super::media::tests::SMALL;
use super::*;

#[test]
fn run_at_the_server_equals_the_local_run() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    crate::wandb::tests::put(folder.path().join("uv.png"), SMALL).unwrap();
    crate::wandb::tests::put(folder.path().join("config.toml"), "steps = 3\n").unwrap();
    crate::wandb::tests::put(folder.path().join("report.html"), "<p>").unwrap();
    let run = a_run(folder.path());
    let mut sent = rows(0..3);
    sent[1].row = sent[1]
        .row
        .clone()
        .with("odd", f64::NAN)
        .with("up", f64::INFINITY);
    let eval = Row::new(2, Kind::Eval)
        .with("uv", Value::File("uv.png".into()))
        .with("gone", Value::File("gone.svg".into()))
        .with("said", Value::Text("words".into()))
        .with(
            "grads",
            Value::Histogram(Histogram {
                edges: vec![0.0, 0.5, 1.0],
                counts: vec![3.0, 4.0],
            }),
        );
    sent.push(Stamped {
        row: eval,
        time: 1003.0,
    });
    let machine = Stamped {
        row: Row::new(2, Kind::System).with("system/cpu_percent", 50.0),
        time: 1002.0,
    };
    let saved = Stamped {
        row: Row::new(2, Kind::Event).with_note("saved"),
        time: 1002.5,
    };
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &sent).await;
        driver.system(&run, &[machine, saved]).await;
        driver.close(&run, 0).await;
    });
    assert_eq!(driver.refusals, []);
    let page = driver.sink.page(&driver.state).unwrap();
    assert!(
        page.ends_with("/fixture-entity/spd/runs/abcd1234"),
        "{page}"
    );
    let found = server.run("abcd1234");
    assert_eq!(found["displayName"], "tms");
    assert_eq!(found["group"], "sweep");
    assert_eq!(found["tags"], json!(["a", "b"]));
    assert_eq!(found["notes"], "n");
    assert_eq!(found["config"]["lr"], json!({"value": 3e-4}));
    assert_eq!(
        found["config"]["optimizer"],
        json!({"value": {"beta": [0.9, 0.95]}})
    );
    let history = lines(&found, "history");
    assert_eq!(
        history[..2],
        [
            json!({"_step": 0, "_timestamp": 1000, "_runtime": 0, "trainer/step": 0, "loss/total": 1}),
            json!({"_step": 1, "_timestamp": 1001, "_runtime": 1, "trainer/step": 1, "loss/total": 0.5, "odd": "NaN", "up": "Infinity"}),
        ]
    );
    assert_eq!(history.len(), 3);
    let image = &history[2]["uv"];
    assert_eq!(image["_type"], "image-file");
    let name = image["path"].as_str().unwrap();
    assert_eq!(found["files"][name]["sha256"], image["sha256"]);
    assert_eq!(found["files"]["config.toml"]["size"], 10);
    assert_eq!(history[2]["said"], "words");
    assert_eq!(history[2]["grads"]["bins"], json!([0, 0.5, 1]));
    assert_eq!(history[2].get("gone"), None);
    let uploaded = json!([name, "config.toml", "report.html"]);
    assert_eq!(found["uploaded"], uploaded);
    let summary = &found["summary"];
    assert_eq!(summary["odd"], "NaN");
    assert_eq!(summary["loss/total"], 1.0 / 3.0);
    assert_eq!(summary["_wandb"], json!({"runtime": 2}));
    assert_eq!(
        lines(&found, "events"),
        [json!({"_wandb": true, "_timestamp": 1002, "_runtime": 2, "system.cpu": 50})]
    );
    assert_eq!(
        found["log"],
        json!(["1970-01-01T00:16:42.500000 step 2: saved"])
    );
    assert_eq!(
        (&found["complete"], &found["exitcode"]),
        (&json!(true), &json!(0))
    );
    assert_eq!(found["rejected"], json!([]));
}

#[test]
fn a_run_goes_on_from_its_own_counts() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..5)).await;
        driver.close(&run, 3).await;
        assert_eq!(driver.state.history.sent, 5);
        let mut driver = driver.again(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(5..8)).await;
        // A late row has its own step beside the number of its line.
        driver.metrics(&run, &rows(3..4)).await;
        driver.metrics(&run, &rows(8..10)).await;
    });
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), (0..=10).collect::<Vec<u64>>());
    let trained = lines(&found, "history");
    let trained: Vec<u64> = trained
        .iter()
        .map(|line| line["trainer/step"].as_u64().unwrap())
        .collect();
    assert_eq!(trained, [0, 1, 2, 3, 4, 5, 6, 7, 3, 8, 9]);
    // Stopped on request.
    assert_eq!(found["exitcode"], 255);
    let kinds = server.kinds();
    assert!(!kinds.contains(&"RunResumeStatus".to_string()), "{kinds:?}");
    // Known fields are not sent again: somebody may have renamed the run on its page.
    let exchanges = server.exchanges();
    let upserts: Vec<&Json> = exchanges
        .iter()
        .filter(|one| one["kind"] == "UpsertBucket")
        .collect();
    let second = &upserts[1]["request"]["json"]["variables"];
    for name in [
        "displayName",
        "config",
        "tags",
        "notes",
        "groupName",
        "host",
    ] {
        assert!(second[name].is_null(), "{name}");
    }
}

#[test]
fn resumed_run_sends_changed_labels() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut run = a_run(folder.path());
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..2)).await;
        run.name = "tms, again".into();
        run.tracker.group = Some("other".into());
        run.tracker.tags = vec!["c".into()];
        run.tracker.notes = Some("m".into());
        let mut driver = driver.again(server.sink());
        driver.open(&run).await;
        driver.open(&run).await;
    });
    let found = server.run("abcd1234");
    assert_eq!(found["displayName"], "tms, again");
    assert_eq!(found["group"], "other");
    assert_eq!(found["tags"], json!(["c"]));
    assert_eq!(found["notes"], "m");
    let exchanges = server.exchanges();
    let upserts = exchanges.iter().filter(|one| one["kind"] == "UpsertBucket");
    let names: Vec<&Json> = upserts
        .map(|one| &one["request"]["json"]["variables"]["displayName"])
        .collect();
    // The third start has nothing to change.
    assert_eq!(names, [&json!("tms"), &json!("tms, again"), &Json::Null]);
    assert_eq!(steps(&found), [0, 1]);
}

#[test]
fn lines_of_a_lost_cursor_are_not_sent_twice() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let event = |step| Stamped {
        row: Row::new(step, Kind::Event).with_note("saved"),
        time: 1000.0,
    };
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..5)).await;
        driver.system(&run, &[event(0), event(1)]).await;
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..3)).await;
        driver.metrics(&run, &rows(3..7)).await;
        driver.system(&run, &[event(0), event(1), event(2)]).await;
    });
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), (0..7).collect::<Vec<u64>>());
    assert_eq!(found["log"].as_array().unwrap().len(), 3);
    let exchanges = server.exchanges();
    let sent: Vec<&Json> = exchanges
        .iter()
        .filter_map(|one| one["request"]["json"]["files"].get("wandb-history.jsonl"))
        .map(|chunk| &chunk["offset"])
        .collect();
    assert_eq!(sent, [0, 5]);
    let asked = server
        .kinds()
        .iter()
        .filter(|kind| *kind == "RunResumeStatus")
        .count();
    assert_eq!(asked, 2);
}

#[test]
fn somebody_presses_stop() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.json");
    crate::wandb::tests::put(&path, r#"{"file_stream": {"json": {"stopped": true}}}"#).unwrap();
    let options = ["--override", path.to_str().unwrap()];
    let Some(server) = Recorder::with(&json!([]), &options) else {
        return;
    };
    let run = a_run(folder.path());
    let mut driver = Driver::new(server.sink());
    let is_raised = |driver: &Driver| driver.sink.stop.load(Ordering::Relaxed);
    on_runtime(async {
        driver.open(&run).await;
        assert!(!is_raised(&driver));
        driver.metrics(&run, &rows(0..1)).await;
        assert!(is_raised(&driver));
        driver.close(&run, 3).await;
        // Nobody has pressed it since, though the server still reports it.
        let mut driver = driver.again(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(1..2)).await;
        assert!(!is_raised(&driver));
        driver.state.is_stopped = false;
        driver.metrics(&run, &rows(2..3)).await;
        assert!(is_raised(&driver));
    });
}

#[test]
fn a_figure_is_drawn_once_unless_it_waits_for_its_server() {
    let faults = json!([{"match": "CreateRunFiles", "nth": [2], "status": 503}]);
    let Some(server) = Recorder::with(&faults, &[]) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut driver = Driver::new(server.sink());
    put(folder.path().join("a.svg"), FIGURE).unwrap();
    let figure = |step: u64| Stamped {
        row: Row::new(step, Kind::Eval).with("a", Value::File("a.svg".into())),
        time: 1000.0,
    };
    let drawn = || crate::picture::DRAWN.get();
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &[figure(0)]).await;
        assert_eq!((drawn(), driver.state.owed.len()), (1, 0));
        driver.metrics(&run, &[figure(1)]).await;
        assert_eq!((drawn(), driver.state.owed.len()), (2, 1));
        assert!(driver.sink.drawn.is_empty());
        driver.close(&run, 0).await;
        assert_eq!((drawn(), driver.state.owed.len()), (3, 0));
    });
    assert_eq!(
        server.run("abcd1234")["files"].as_object().unwrap().len(),
        2
    );
}

#[test]
fn a_silent_run_says_that_it_is_alive() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..1)).await;
        driver.sink.idle(&run, &mut driver.state).await.unwrap();
        driver.sink.silence = Duration::ZERO;
        driver.sink.idle(&run, &mut driver.state).await.unwrap();
    });
    assert_eq!(server.run("abcd1234")["heartbeats"], 1);
}

#[test]
fn an_alert_is_shown_and_written() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    let alert = Stamped {
        row: Row::new(7, Kind::Alert).with_note("the loss is NaN"),
        time: 1000.0,
    };
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.system(&run, &[alert]).await;
    });
    let exchanges = server.exchanges();
    let told = exchanges
        .iter()
        .find(|one| one["kind"] == "NotifyScriptableRunAlert")
        .unwrap();
    assert_eq!(
        told["request"]["json"]["variables"],
        json!({
            "entityName": ENTITY, "projectName": "spd", "runName": "abcd1234", "title": "the loss is NaN",
            "text": "step 7: the loss is NaN", "severity": "ERROR",
        })
    );
    assert_eq!(
        server.run("abcd1234")["log"],
        json!(["ERROR 1970-01-01T00:16:40.000000 step 7: the loss is NaN"])
    );
}

#[test]
fn environment_fills_in_missing_labels() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let netrc = folder.path().join(".netrc");
    crate::wandb::tests::put(
        &netrc,
        format!("machine 127.0.0.1 login user password {KEY}\n"),
    )
    .unwrap();
    let variables = [
        ("WANDB_BASE_URL", server.address() + "/"),
        ("WANDB_ENTITY", "team".into()),
        ("WANDB_PROJECT", "other".into()),
        ("WANDB_RUN_GROUP", "g".into()),
        ("WANDB_NAME", "n".into()),
        ("WANDB_TAGS", "x, y,".into()),
        ("WANDB_NOTES", "why".into()),
    ];
    let variables: Vec<(&str, &str)> = variables
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let mut run = a_run(folder.path());
    run.tracker = Tracker::default();
    let mut sink = Wandb::of(
        Environment::of(&variables, Some(folder.path())),
        Arc::default(),
    );
    let mut state = State::default();
    on_runtime(sink.open(&run, &mut state)).unwrap();
    let found = server.runs()["team/other/abcd1234"].take();
    assert_eq!(found["group"], "g");
    assert_eq!(found["displayName"], "n");
    assert_eq!(found["tags"], json!(["x", "y"]));
    assert_eq!(found["notes"], "why");
    let header = &server.exchanges()[0]["request"]["headers"]["authorization"];
    assert_eq!(header, "Basic base64(api:<api key, 40 chars>)");
}

#[test]
fn a_sweep_is_a_run_of_a_type_of_its_own_with_its_table() {
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    crate::wandb::tests::put(folder.path().join("table.html"), "<table>").unwrap();
    let about = crate::About::sweep("tms", &Tracker::default(), json!({"runs": 2}));
    let run = RunInfo {
        tracker: about.tracker,
        name: about.name,
        config: about.config,
        job: about.job,
        ..a_run(folder.path())
    };
    let member = Row::new(1, Kind::Eval).with("sweep/seed", 7.0);
    let table = Row::new(2, Kind::Eval)
        .with("sweep/table", Value::Text("| seed |".into()))
        .with("sweep/page", Value::File("table.html".into()));
    let sent = [member, table].map(|row| Stamped { row, time: 1002.0 });
    let mut driver = Driver::new(server.sink());
    on_runtime(async {
        driver.open(&run).await;
        driver.metrics(&run, &sent).await;
        driver.close(&run, 0).await;
    });
    assert_eq!(driver.refusals, []);
    let found = server.run("abcd1234");
    assert_eq!(found["jobType"], "sweep");
    assert_eq!(
        (&found["group"], &found["displayName"]),
        (&json!("tms"), &json!("tms sweep"))
    );
    let history = lines(&found, "history");
    assert_eq!(
        (&history[0]["_step"], &history[0]["sweep/seed"]),
        (&json!(1), &json!(7))
    );
    assert_eq!(history[1]["sweep/table"], "| seed |");
    assert_eq!(history[1]["sweep/page"]["_type"], "html-file");
}
