//! Event files are read back, by our reader and by TensorBoard's.
//!
//! `SPD_TENSORBOARD` is the directory that TensorBoard is installed in; without it, its readers are
//! left out:
//!
//! ```text
//! pip install --target /tmp/tensorboard tensorboard
//! SPD_TENSORBOARD=/tmp/tensorboard cargo test --release -p spd-ship -- tensorboard
//! ```

use std::path::Path;
use std::process::Command;

use serde_json::{Value as Json, json};
use spd_files::atomic;
use spd_tracker::{Histogram, Row, Value};
use tempfile::TempDir;

use super::event::{Event, Held};
use super::*;

/// A run directory, and a sink with the state that its driver has written.
pub(super) struct Scratch {
    pub(super) dir: TempDir,
    pub(super) sink: TensorBoard,
    pub(super) state: State,
}

impl Scratch {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (sink, state) = (TensorBoard::default(), State::default());
        Self { dir, sink, state }
    }

    pub(super) fn run(&self) -> RunInfo {
        crate::run::tests::run(self.dir.path())
    }

    /// A new process with the written state. Returns whether it makes the run anew.
    pub(super) fn restart(&mut self) -> bool {
        let state = serde_json::to_string(&self.state).unwrap();
        self.state = serde_json::from_str(&state).unwrap();
        self.sink = TensorBoard::default();
        self.open().unwrap()
    }

    pub(super) fn open(&mut self) -> Result<bool, Refusal> {
        let run = self.run();
        wait(self.sink.open(&run, &mut self.state))
    }

    pub(super) fn send(&mut self, rows: &[Stamped]) {
        let run = self.run();
        wait(self.sink.send_metrics(&run, &mut self.state, rows)).unwrap();
    }

    /// Sends rows and is killed before its driver has written the new state.
    fn send_unacknowledged(&mut self, rows: &[Stamped]) {
        let state = self.state.clone();
        self.send(rows);
        self.state = state;
    }

    fn system(&mut self, rows: &[Stamped]) {
        let run = self.run();
        wait(self.sink.send_system(&run, &mut self.state, rows)).unwrap();
    }

    pub(super) fn roll_back(&mut self, step: u64) {
        let to = RollBack {
            generation: 1,
            rows: step,
            step,
        };
        let run = self.run();
        let after = wait(self.sink.roll_back(&run, &mut self.state, to)).unwrap();
        assert_eq!(after, After::FromStart);
    }

    pub(super) fn files(&self) -> Vec<std::path::PathBuf> {
        let dir = self.dir.path().join("tensorboard");
        let names = atomic::names(&dir).unwrap();
        names.iter().map(|name| dir.join(name)).collect()
    }

    fn events(&self) -> Vec<Vec<Event>> {
        let files = self.files();
        let read = |path: &std::path::PathBuf| event::read(&spd_files::read(path).unwrap());
        files.iter().map(read).collect()
    }

    /// Steps and values of `loss` for a reader of all files, without superseded ones.
    pub(super) fn loss(&self) -> Vec<(i64, f32)> {
        let mut found: Vec<(i64, f32)> = Vec::new();
        for event in self.events().into_iter().flatten() {
            if event.session_log.is_some() {
                found.retain(|(step, _)| *step < event.step);
            }
            for value in event.summary.into_iter().flat_map(|summary| summary.values) {
                if let ("loss", Some(Held::Scalar(value))) = (value.tag.as_str(), value.held) {
                    found.push((event.step, value));
                }
            }
        }
        found
    }
}

pub(super) fn wait<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(future)
}

fn loss(step: u64, value: f64) -> Stamped {
    let row = Row::new(step, Kind::Train).with("loss", value);
    let time = 1_795_000_000.0 + f64::from(u32::try_from(step).unwrap());
    Stamped { row, time }
}

fn losses(steps: std::ops::Range<u32>) -> Vec<Stamped> {
    steps.map(|step| loss(step.into(), step.into())).collect()
}

fn counted(steps: std::ops::Range<u16>) -> Vec<(i64, f32)> {
    steps.map(|step| (step.into(), step.into())).collect()
}

#[test]
fn every_file_begins_with_a_start_that_voids_all_before() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    scratch.send(&losses(0..3));
    let first = scratch.files();
    scratch.roll_back(2);
    scratch.send(&losses(0..4));
    assert_eq!(scratch.loss(), counted(0..4));
    let files = scratch.files();
    assert!(files.len() == 1 && first[0] < files[0], "{files:?}");
    let events = &scratch.events()[0];
    assert_eq!(events[0].file_version.as_deref(), Some(event::VERSION));
    let start = events[1].session_log.as_ref().unwrap();
    assert_eq!((events[1].step, start.status), (0, 1));
    assert_eq!(events[3].wall_time.to_bits(), 1_795_000_000_f64.to_bits());
}

#[test]
fn a_restart_goes_on_in_the_same_file() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    scratch.send(&losses(0..3));
    scratch.restart();
    scratch.send(&losses(3..5));
    assert_eq!(scratch.files().len(), 1);
    assert_eq!(scratch.loss(), counted(0..5));
}

#[test]
fn changed_file_is_replaced_by_a_new_one() {
    for torn in [1, 11, 12, 20, 0] {
        let mut scratch = Scratch::new();
        scratch.open().unwrap();
        scratch.send(&losses(0..3));
        let path = scratch.files().swap_remove(0);
        let whole = spd_files::read(&path).unwrap();
        if torn == 0 {
            scratch.send_unacknowledged(&losses(3..9));
        } else {
            atomic::write_file(&path, &[&whole, &whole[..torn]]).unwrap();
        }
        assert!(scratch.restart(), "{torn}");
        scratch.send(&losses(0..5));
        assert_eq!(scratch.loss(), counted(0..5), "{torn}");
        assert_eq!(scratch.files().len(), 1);
        assert!(!scratch.restart(), "{torn}");
    }
}

#[test]
fn a_roll_back_that_is_made_twice_holds_once() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    scratch.send(&losses(0..6));
    let state = scratch.state.clone();
    scratch.roll_back(4);
    scratch.send(&losses(0..9));
    scratch.state = state;
    scratch.restart();
    scratch.roll_back(4);
    scratch.send(&losses(0..5));
    assert_eq!(scratch.loss(), counted(0..5));
}

#[test]
fn late_rows_stay() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    scratch.send(&losses(0..3));
    scratch.send(&[loss(1, 9.0)]);
    let expected = [(0, 0.0), (1, 1.0), (2, 2.0), (1, 9.0)];
    assert_eq!(scratch.loss(), expected);
}

#[test]
fn a_run_of_an_earlier_version_is_listed_once() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    scratch.send(&losses(0..3));
    let old = scratch.dir.path().join("tensorboard/system");
    std::fs::create_dir(&old).unwrap();
    atomic::write_file(&old.join("events.out.tfevents.1"), &[b"x"]).unwrap();
    assert!(scratch.restart() && !old.is_dir());
    scratch.send(&losses(0..3));
    assert_eq!((scratch.loss(), scratch.files().len()), (counted(0..3), 1));
}

#[test]
fn missing_files_are_made_again() {
    let mut scratch = Scratch::new();
    scratch.open().unwrap();
    for harm in ["cut", "remove", "forget"] {
        scratch.send(&losses(0..3));
        let path = scratch.files().pop().unwrap();
        match harm {
            "cut" => atomic::cut_file(&path, 40).unwrap(),
            "remove" => atomic::remove(&path).unwrap(),
            _ => scratch.state = State::default(),
        }
        // Without a written state, the driver begins at the first row by itself.
        assert_eq!(scratch.restart(), harm != "forget", "{harm}");
        scratch.send(&losses(0..4));
        assert_eq!(scratch.loss(), counted(0..4), "{harm}");
        assert!(!scratch.restart());
        assert_eq!(scratch.files().len(), 1);
        scratch.roll_back(0);
    }
}

/// Rows of all kinds of a run that is killed twice and rolls back from step 5 to 3; the last record
/// is torn.
fn everything() -> Scratch {
    let figure = r##"<svg width="30" height="20" xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9" fill="#123456"/></svg>"##;
    let mut scratch = Scratch::new();
    let path = scratch.dir.path().join("figure.svg");
    atomic::write_file(&path, &[figure.as_bytes()]).unwrap();
    atomic::write_file(&scratch.dir.path().join("table.html"), &[b"<table>"]).unwrap();
    let rich = |step: u64| {
        let mut row = loss(step, f64::from(u32::try_from(step).unwrap()) / 2.0);
        let spread = Histogram {
            edges: vec![0.0, 0.5, 2.0],
            counts: vec![3.0, 4.0],
        };
        row.row = row
            .row
            .with("spread", Value::Histogram(spread))
            .with("words", Value::Text(format!("step *{step}*")))
            .with("figure", Value::File("figure.svg".to_owned()))
            .with("lost", Value::File("nowhere.svg".to_owned()))
            .with("outside", Value::File("../secret".to_owned()))
            .with("other", Value::File("table.html".to_owned()));
        row
    };
    let first = |scratch: &mut Scratch| {
        scratch.send(&[rich(0), loss(1, f64::NAN), loss(2, f64::INFINITY)]);
        let cpu = |seconds: f64| Stamped {
            row: Row::new(0, Kind::System).with("system/cpu_percent", 50.0),
            time: 1_795_000_000.0 + seconds,
        };
        scratch.system(&[cpu(15.0), cpu(30.0)]);
        let note = Row::new(2, Kind::Event).with_note("saved");
        scratch.system(&[Stamped {
            row: note,
            time: 1_795_000_003.0,
        }]);
    };
    scratch.open().unwrap();
    first(&mut scratch);
    scratch.send(&[rich(3)]);
    scratch.restart();
    scratch.send_unacknowledged(&[loss(4, 77.0)]);
    scratch.restart();
    first(&mut scratch);
    scratch.send(&[rich(3), rich(4), loss(5, 78.0)]);
    scratch.roll_back(3);
    first(&mut scratch);
    scratch.send(&[rich(3), loss(4, 4.0), loss(5, 5.0)]);
    let path = scratch.files().pop().unwrap();
    let found = spd_files::read(&path).unwrap();
    atomic::write_file(&path, &[&found, &found[..30]]).unwrap();
    scratch
}

#[test]
fn every_kind_of_value_is_written() {
    let scratch = everything();
    let files = scratch.events();
    let row = &files[0][3];
    let values = &row.summary.as_ref().unwrap().values;
    let tags: Vec<&str> = values.iter().map(|value| value.tag.as_str()).collect();
    let expected = [
        "loss", "spread", "words", "figure", "lost", "outside", "other",
    ];
    assert_eq!(tags, expected);
    let Some(Held::Histogram(bins)) = &values[1].held else {
        panic!("{values:?}");
    };
    // By hand: three at 0.25, four at 1.25.
    assert_eq!((bins.num, bins.sum, bins.sum_squares), (7.0, 5.75, 6.4375));
    let text = |at: usize| match &values[at].held {
        Some(Held::Tensor(strings)) => strings.strings[0].clone(),
        held => panic!("{held:?}"),
    };
    assert_eq!(text(2), "step *0*");
    assert!(text(4).starts_with("nowhere.svg: "), "{}", text(4));
    assert_eq!(text(5), "../secret: no file of the run directory");
    // A file that is no figure is named.
    assert_eq!(text(6), "table.html");
    let config = &files[0][2].summary.as_ref().unwrap().values[0];
    assert_eq!(config.tag, "config");
}

#[test]
fn tensorboard_reads_every_row_once() {
    let Some(packages) = std::env::var_os("SPD_TENSORBOARD") else {
        return spd_testing::skip("SPD_TENSORBOARD");
    };
    let scratch = everything();
    let dir = scratch.dir.path().join("tensorboard");
    let found = read(&dir, Path::new(&packages));
    let losses = json!([
        [0, "0.0"],
        [1, "nan"],
        [2, "inf"],
        [3, "1.5"],
        [4, "4.0"],
        [5, "5.0"]
    ]);
    let metrics = &found["metrics"];
    assert_eq!(metrics["scalars"]["loss"], losses);
    assert_eq!(
        metrics["images"]["figure"],
        json!([[0, 30, 20, "89504e47"], [3, 30, 20, "89504e47"]])
    );
    let bins = json!([[0.5, 2.0], [3.0, 4.0]]);
    assert_eq!(
        metrics["histograms"]["spread"],
        json!([[0, bins[0], bins[1]], [3, bins[0], bins[1]]])
    );
    // Texts are left out: the accumulator, unlike the servers, does not void them.
    assert_eq!(
        metrics["scalars"]["system/cpu_percent"],
        json!([[15, "50.0"], [30, "50.0"]])
    );
    assert_eq!(metrics["texts"]["events"], json!([[2, "saved"]]));
    for loader in ["slow", "fast"] {
        let found = &found[loader];
        assert_eq!(found["runs"], json!(["."]), "{loader}");
        assert_eq!(found["loss"], losses, "{loader}");
        assert_eq!(found["images"], json!([0, 3]), "{loader}");
        let bins = json!([[0.0, 0.5, 3.0], [0.5, 2.0, 4.0]]);
        assert_eq!(
            found["histograms"],
            json!([[0, bins], [3, bins]]),
            "{loader}"
        );
        let texts = json!([[0, "<p>step <em>0</em></p>"], [3, "<p>step <em>3</em></p>"]]);
        assert_eq!(found["texts"], texts, "{loader}");
        assert_eq!(found["system"], json!([[15, 50.0], [30, 50.0]]), "{loader}");
    }
}

/// TensorBoard's own view of a directory.
fn read(dir: &Path, packages: &Path) -> Json {
    let python = std::env::var_os("SPD_PYTHON").unwrap_or("python3".into());
    let output = Command::new(python)
        .args(["-c", include_str!("read.py")])
        .arg(dir)
        .arg("5")
        .env("PYTHONPATH", packages)
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    serde_json::from_slice(&output.stdout).unwrap()
}
