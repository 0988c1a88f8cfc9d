//! `spd-launch tail`.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use rustix::process::Signal;
use spd_tracker::{Kind, Mark, Row, Spool, now};

use crate::scratch::{Running, Scratch, assert_goes, end, launch, send, start};

/// A run directory with rows of this test, which holds its lock like a launcher.
struct Written {
    scratch: Scratch,
    spool: Spool,
    lock: Option<spd_checkpoint::Lock>,
}

impl Written {
    fn new() -> Self {
        let scratch = Scratch::new();
        let dir = scratch.run_dir();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("config.toml"), "name = \"x\"\n").unwrap();
        let spool = Spool::start(&dir, &Mark::default(), 0).unwrap();
        let lock = spd_checkpoint::Lock::take(&dir.join("logs")).unwrap();
        Self {
            scratch,
            spool,
            lock: Some(lock),
        }
    }

    fn train(&self, step: u64, loss: f64) {
        let row = Row::new(step, Kind::Train).with("loss/total", loss);
        self.spool.append(row);
    }

    fn event(&self, step: u64, note: &str) {
        let row = Row::new(step, Kind::Event).with_note(note);
        self.spool.append(row.with("time", now()));
    }
}

/// The text of a line after its time.
fn words(line: &str) -> &str {
    line.split_once("  ").map_or(line, |(_, words)| words)
}

#[test]
fn rows_are_printed_until_the_run_is_over() {
    let mut run = Written::new();
    (1..=20).for_each(|step| run.train(step, 0.5));
    run.event(20, "continued from the checkpoint of step 20");
    run.spool.sync().unwrap();
    let mut command = run.scratch.launcher(&["tail", "runs/x", "-n", "3"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running::of(&mut command);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert_eq!(words(&next()), "step 19  train  loss 5.000e-1");
    let row = next();
    assert_eq!(words(&row), "step 20  train  loss 5.000e-1");
    assert!(row.starts_with("20") && row.contains("Z  "), "{row}");
    assert_eq!(
        words(&next()),
        "step 20: continued from the checkpoint of step 20"
    );
    run.train(21, 0.25);
    run.spool.sync().unwrap();
    assert_eq!(words(&next()), "step 21  train  loss 2.500e-1");
    // The run is rolled back, and writes other rows.
    drop(std::mem::replace(
        &mut run.spool,
        Spool::system(&run.scratch.run_dir()).unwrap(),
    ));
    run.spool = Spool::start(&run.scratch.run_dir(), &Mark::default(), 0).unwrap();
    (1..=30).for_each(|step| run.train(step, 4.0));
    run.spool.sync().unwrap();
    let back = next();
    assert_eq!(
        words(&back),
        "the run was rolled back to step 0: rows of later steps above are discarded, those below replace them"
    );
    for step in 1..=30 {
        assert_eq!(words(&next()), format!("step {step}  train  loss 4.000e0"));
    }
    run.train(31, 1.0);
    run.spool.sync().unwrap();
    run.lock = None;
    assert_eq!(words(&next()), "step 31  train  loss 1.000e0");
    assert!(lines.next().is_none());
    let mut stderr = String::new();
    let mut stream = child.stderr.take().unwrap();
    stream.read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(
        stderr.starts_with("runs/x is killed: its launcher (process "),
        "{stderr}"
    );
}

#[test]
fn a_finished_run_is_printed_to_its_end() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let ended = launch(scratch.launcher(&["tail", "runs/x"]));
    assert_eq!(ended.code, Some(0));
    let lines: Vec<&str> = ended.stdout.lines().map(words).collect();
    assert_eq!(
        lines,
        [
            "step 1  train  loss 5.000e-1  L0 2.50",
            "step 0: target trained"
        ]
    );
    assert_eq!(ended.stderr, "runs/x is done\n");
    let json = launch(scratch.launcher(&["tail", "runs/x", "--json", "--all", "-n", "99"])).stdout;
    for row in [
        "{\"step\":1,\"kind\":\"train\",\"loss/total\":0.5,\"l0/linear1\":1.5,\"l0/linear2\":1.0}\n",
        "{\"step\":3,\"kind\":\"system\",\"note\":\"target\",\"steps\":9.0,\"steps_per_s\":3.0}\n",
        "\"system/cpu_percent\"",
    ] {
        assert!(json.contains(row), "{row}: {json}");
    }
    assert_eq!(
        launch(scratch.launcher(&["tail", "runs/x", "-n", "0"])).stdout,
        ""
    );
}

#[test]
fn wait_waits_for_a_run_to_begin() {
    let scratch = Scratch::new();
    let waiting = start(scratch.launcher(&["tail", "runs/x", "--wait"]));
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let ended = end(waiting);
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (Some(0), "runs/x is done\n")
    );
    assert!(
        ended
            .stdout
            .contains("  step 1  train  loss 5.000e-1  L0 2.50\n"),
        "{}",
        ended.stdout
    );
}

#[test]
fn other_paths_are_refused_with_one_line() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path().join("s")).unwrap();
    fs::write(scratch.path().join("s/sweep.json"), "").unwrap();
    fs::write(scratch.path().join("file"), "").unwrap();
    for (path, refused) in [
        (
            "none",
            "none: not a run directory, as it has no config.toml; --wait waits for a run to begin there, `spd-launch runs` lists those \
             there are",
        ),
        (
            "s",
            "s: is the directory of a sweep; name one of its runs, like s/seed=0",
        ),
        ("file", "file: expected a run directory, found a file"),
    ] {
        let ended = launch(scratch.launcher(&["tail", path]));
        assert_eq!((ended.code, ended.error()), (Some(2), refused));
    }
}

#[test]
fn it_ends_when_its_output_is_closed() {
    let run = Written::new();
    (1..=20).for_each(|step| run.train(step, 0.5));
    run.spool.sync().unwrap();
    let ended = launch(run.scratch.shell("\"$LAUNCHER\" tail runs/x | head -1"));
    assert_eq!(ended.code, Some(0));
    assert_eq!(
        words(ended.stdout.trim_end()),
        "step 11  train  loss 5.000e-1"
    );
}

#[test]
fn a_signal_ends_it_at_once() {
    let run = Written::new();
    run.train(1, 0.5);
    run.spool.sync().unwrap();
    let mut command = run.scratch.launcher(&["tail", "runs/x"]);
    let mut child = Running::of(command.stdout(Stdio::piped()));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().is_some());
    send(child.id(), Signal::INT);
    assert_eq!(child.wait().unwrap().code(), None);
    assert_goes(child.id());
}
