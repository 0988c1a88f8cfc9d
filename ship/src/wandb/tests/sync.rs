//! `wandb sync`, W&B's own program, makes of an exported run what the sink makes of it.
//!
//! Not compared: `_wandb` of the config, which names the program that wrote a run; `config.yaml`,
//! `output.log` and `wandb-summary.json`, which that program adds; and the time that it puts before
//! each line of the console, which is the time of the sync. The line's own time follows.

use spd_tracker::{Histogram, Spool, Value};

use super::super::offline;
use super::meaning::SAME;
use super::official::Python;
use super::*;

/// Makes the directory of a run with rows of every kind, and an unusual name.
fn make(dir: &Path) -> Spool {
    spd_files::atomic::make_dirs(dir).unwrap();
    let spool = Spool::start(dir, &Default::default(), 0).unwrap();
    put(dir.join("a.svg"), FIGURE).unwrap();
    put(dir.join("a.json"), "{}").unwrap();
    put(dir.join("config.toml"), "steps = 3\n").unwrap();
    for step in [0, 10, 20] {
        let row = Row::new(step, Kind::Train);
        spool.append(
            row.with("loss/total", 1.0 / (step + 3) as f64)
                .with("a.b", 1e300),
        );
    }
    let bins = Histogram {
        edges: (0..=700).map(f64::from).collect(),
        counts: vec![3.0; 700],
    };
    spool.append(
        Row::new(20, Kind::Eval)
            .with("loss/total", 0.25)
            .with("odd", f64::NAN)
            .with("up", f64::INFINITY)
            .with("down", f64::NEG_INFINITY)
            .with("bins", Value::Histogram(bins))
            .with("said", Value::Text("one \"word\"\n\u{3b2}".into()))
            .with("figures/a", Value::File("a.svg".into()))
            .with("figures/numbers", Value::File("a.json".into())),
    );
    // A late row.
    spool.append(Row::new(10, Kind::Eval).with("late", 1.0));
    let at = |row: Row, time: f64| row.with("time", time);
    let started = 1_795_000_000.25;
    spool.append(at(
        Row::new(0, Kind::System)
            .with("system/cpu_percent", 50.0)
            .with("system/rank0/rss_bytes", 3e9),
        started + 1.5,
    ));
    spool.append(at(
        Row::new(1, Kind::Event).with_note("saved"),
        started + 2.0,
    ));
    spool.append(at(
        Row::new(2, Kind::Alert).with_note("hot\nhotter"),
        started + 2.5,
    ));
    spool
}

/// The part that must be the same at the server by either way.
///
/// - `times`: number of times at the beginning of a console line; its own is the last
fn compared(run: &Json, times: usize) -> Json {
    let mut config = run["config"].clone();
    config.as_object_mut().unwrap().remove("_wandb");
    let mut events = lines(run, "events");
    for event in &mut events {
        // A time is in nanoseconds there, and in seconds here.
        for name in ["_timestamp", "_runtime"] {
            let seconds = event[name].as_f64().unwrap();
            event[name] = json!((seconds * 1e6).round());
        }
    }
    let log = run["log"].as_array().unwrap().iter();
    let log: Vec<(bool, String)> = log
        .map(|line| {
            let line = line.as_str().unwrap();
            let words = line.strip_prefix("ERROR ");
            let own = words.unwrap_or(line).splitn(times, ' ').last();
            (line.starts_with("ERROR "), own.unwrap().into())
        })
        .collect();
    let same: BTreeMap<&str, Json> = SAME.map(|name| (name, run[name].clone())).into();
    json!({
        "same": same, "config": config, "events": events, "log": log, "history": lines(run, "history"), "summary": run["summary"],
    })
}

#[test]
fn a_run_that_goes_on_is_synced_as_one_and_later_under_another_name() {
    let Some(python) = Python::found() else {
        return;
    };
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let spool = make(&dir);
    spool.mark().wait().unwrap();
    let (run, environment) = (a_run(&dir), server.environment());
    for (place, name, end) in [
        ("a", "abcd1234", None),
        ("b", "later", Some(End { code: 3 })),
    ] {
        let out = folder.path().join(place);
        let exported = offline::write(&run, &environment, &out, end).unwrap();
        let exported = exported.dir.to_str().unwrap();
        let arguments = ["-m", "wandb", "sync", "--id", name, exported];
        assert_eq!(python.run(&server, &out, &arguments), Some(0));
    }
    let (first, later) = (server.run("abcd1234"), server.run("later"));
    assert_eq!(
        (&first["complete"], &first["exitcode"]),
        (&Json::Null, &Json::Null)
    );
    assert_eq!(
        (&later["complete"], &later["exitcode"]),
        (&json!(true), &json!(255))
    );
    // The last step may get more rows while the run goes on.
    assert_eq!((steps(&first).len(), steps(&later).len()), (3, 4));
}

#[test]
fn synced_export_equals_the_sent_run() {
    let Some(python) = Python::found() else {
        return;
    };
    let (Some(sent), Some(synced)) = (Recorder::start(), Recorder::start()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    drop(make(&dir));
    let run = RunInfo {
        started: 1_795_000_000.25,
        ..a_run(&dir)
    };
    on_runtime(async {
        let mut driver = Driver::new(sent.sink());
        driver.open(&run).await;
        driver.all(&run).await;
        driver.close(&run, 0).await;
    });
    let end = Some(End { code: 0 });
    let exported = offline::write(&run, &sent.environment(), folder.path(), end).unwrap();
    let exported = exported.dir.to_str().unwrap();
    let ended = python.run(&synced, folder.path(), &["-m", "wandb", "sync", exported]);
    assert_eq!(ended, Some(0));
    let (sent_run, synced_run) = (sent.run("abcd1234"), synced.run("abcd1234"));
    let (a, b) = (compared(&sent_run, 1), compared(&synced_run, 2));
    for (part, value) in a.as_object().unwrap() {
        assert_eq!(&b[part], value, "{part}");
    }
    for (name, file) in sent_run["files"].as_object().unwrap() {
        assert_eq!(&synced_run["files"][name], file, "{name}");
    }
    for name in sent_run["uploaded"].as_array().unwrap() {
        assert!(synced_run["uploaded"].as_array().unwrap().contains(name));
    }
    let more: Vec<&String> = synced_run["files"].as_object().unwrap().keys().collect();
    assert_eq!(
        more.len(),
        sent_run["files"].as_object().unwrap().len() + 3,
        "{more:?}"
    );
    let alerts = |server: &Recorder| -> Vec<Json> {
        let all = server.exchanges().into_iter();
        let alerts = all.filter(|one| one["kind"] == "NotifyScriptableRunAlert");
        alerts
            .map(|mut one| one["request"]["json"]["variables"].take())
            .collect()
    };
    let (a, b) = (alerts(&sent), alerts(&synced));
    assert_eq!((a.len(), b.len()), (1, 1));
    for name in ["title", "text", "severity", "runName"] {
        assert_eq!(a[0][name], b[0][name]);
    }
}
