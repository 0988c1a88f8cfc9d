//! Tests with a fake server that fails on request, and with a real one.

mod fake;
mod faults;
mod real;
mod stories;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;
use spd_tracker::Row;
use tempfile::TempDir;

use super::*;

/// The time of step 0.
const BEGUN: f64 = 1_795_000_000.0;

/// A run directory, and a sink with the state that its driver has written.
struct Scratch {
    dir: TempDir,
    sink: Mlflow,
    state: State,
    info: RunInfo,
    variables: Vec<(&'static str, String)>,
}

impl Scratch {
    fn new(uri: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut info = crate::run::tests::run(dir.path());
        info.id = dir.path().file_name().unwrap().to_str().unwrap()[4..].to_owned();
        info.tracker.project = Some("toys".to_owned());
        let mut scratch = Self {
            dir,
            sink: Mlflow::default(),
            state: State::default(),
            info,
            variables: vec![("MLFLOW_TRACKING_URI", uri.to_owned())],
        };
        scratch.restart();
        scratch
    }

    /// A new process with the written state.
    fn restart(&mut self) {
        let state = serde_json::to_string(&self.state).unwrap();
        self.state = serde_json::from_str(&state).unwrap();
        let variables = self.variables.iter();
        let variables: Vec<_> = variables
            .map(|(key, value)| (*key, value.as_str()))
            .collect();
        self.sink = Mlflow::of(Environment::of(&variables, None));
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn open(&mut self) -> Result<bool, Refusal> {
        wait(self.sink.open(&self.info, &mut self.state))
    }

    fn send(&mut self, rows: &[Stamped]) -> Taken {
        wait(self.sink.send_metrics(&self.info, &mut self.state, rows))
    }

    fn system(&mut self, rows: &[Stamped]) -> Taken {
        wait(self.sink.send_system(&self.info, &mut self.state, rows))
    }

    fn roll_back(&mut self, generation: u64) -> Result<After, Refusal> {
        let to = RollBack {
            generation,
            rows: 0,
            step: 0,
        };
        wait(self.sink.roll_back(&self.info, &mut self.state, to))
    }

    fn close(&mut self, code: u8) -> Taken {
        wait(self.sink.close(&self.info, &mut self.state, End { code }))
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}

fn row(step: u32) -> Row {
    Row::new(step.into(), Kind::Train).with("loss", f64::from(step))
}

fn stamped(row: Row) -> Stamped {
    let time = BEGUN + f64::from(u32::try_from(row.step).unwrap());
    Stamped { row, time }
}

fn losses(steps: std::ops::Range<u32>) -> Vec<Stamped> {
    steps.map(|step| stamped(row(step))).collect()
}

/// Steps and values of that many losses.
fn counted(steps: std::ops::Range<u32>) -> Vec<(u64, String)> {
    let counted = steps.map(|step| (step.into(), format!("{step}.0")));
    counted.collect()
}

#[test]
fn a_sweep_is_a_run_with_a_tag_and_its_table() {
    let fake = fake::Fake::new();
    let mut scratch = Scratch::new(&fake.uri);
    let about = crate::About::sweep(
        "tms",
        &spd_configs::Tracker::default(),
        json!({"sweep": {"seed": [0, 1]}}),
    );
    scratch.info.tracker = about.tracker;
    (scratch.info.name, scratch.info.config) = (about.name, about.config);
    scratch.info.job = about.job;
    spd_files::atomic::write_file(&scratch.path().join("table.html"), &[b"<table>"]).unwrap();
    let row = Row::new(2, Kind::Eval)
        .with("sweep/table", Value::Text("| seed |".to_owned()))
        .with("sweep/page", Value::File("table.html".to_owned()));
    scratch.open().unwrap();
    scratch.send(&[stamped(row)]).unwrap();
    scratch.close(0).unwrap();
    let kept = fake.kept();
    let (id, run) = kept.runs.first_key_value().unwrap();
    let tag = |name: &str| run.tags.get(name).map(String::as_str);
    assert_eq!(
        (tag("spd.job"), tag("spd.group")),
        (Some("sweep"), Some("tms"))
    );
    assert_eq!(run.parameters["sweep.seed"], "[0,1]");
    for (file, text) in [
        ("table.html", "<table>"),
        ("text/sweep/table/step-00000002.txt", "| seed |"),
    ] {
        let stored = kept.files.iter().find(|(path, _)| path.ends_with(file));
        let (path, stored) = stored.unwrap_or_else(|| panic!("{file}: {:?}", kept.files.keys()));
        assert!(path.contains(id.as_str()), "{path}");
        assert_eq!(stored, text.as_bytes());
    }
}

#[test]
fn a_run_of_a_sweep_is_shown_below_it() {
    let fake = fake::Fake::new();
    let (mut sweep, mut member) = (Scratch::new(&fake.uri), Scratch::new(&fake.uri));
    member.info.sweep = Some(sweep.info.id.clone());
    member.info.dir = sweep.path().join("seed=0");
    let parent = |fake: &fake::Fake, member: &Scratch| {
        let run = fake.kept().runs[&member.state.run].clone();
        run.tags.get("mlflow.parentRunId").cloned()
    };
    member.open().unwrap();
    assert_eq!(parent(&fake, &member), None);
    // A sweep that is shipped now will have a run.
    let held = Files::hold(sweep.path(), Mlflow::NAME).unwrap();
    let Err(Refusal::Later { why, .. }) = member.close(0) else {
        panic!("there is no run of the sweep");
    };
    assert_eq!(why, "the run of the sweep is not there yet");
    // One that is not may never have one.
    drop(held);
    member.close(0).unwrap();
    sweep.open().unwrap();
    member.close(0).unwrap();
    assert_eq!(parent(&fake, &member), Some(sweep.state.run.clone()));
    // The run that replaces it after a roll-back is below it too.
    assert_eq!(member.roll_back(1).unwrap(), After::FromStart);
    assert_eq!(parent(&fake, &member), Some(sweep.state.run.clone()));
    assert_eq!(parent(&fake, &sweep), None);
}
