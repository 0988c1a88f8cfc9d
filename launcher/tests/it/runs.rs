//! `spd-launch runs`, as a table and as JSON.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::Value;

use crate::both::is_gone;
use crate::scratch::{Ended, Scratch, assert_goes, end, launch, send, start, wait_until};

fn runs(scratch: &Scratch, arguments: &[&str]) -> Ended {
    let ended = launch(scratch.launcher(&[&["runs"], arguments].concat()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

/// The objects of `--json`.
fn told(scratch: &Scratch, arguments: &[&str]) -> Vec<Value> {
    let ended = runs(scratch, &[arguments, &["--json"]].concat());
    let lines = ended.stdout.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The row of a run in the table, split into words.
fn row(scratch: &Scratch, run: &str) -> String {
    let table = runs(scratch, &[]).stdout;
    let row = table
        .lines()
        .find(|line| line.split_whitespace().next() == Some(run));
    let row = row.unwrap_or_else(|| panic!("{run}: {table}"));
    row.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Waits until the list shows the first step of the run.
fn is_running(scratch: &Scratch) {
    wait_until("the row of the first step", || {
        row(scratch, "runs/x").starts_with("runs/x running 1/10,000 - ")
    });
}

#[test]
fn every_state_of_a_run_is_listed() {
    let scratch = Scratch::new();
    let child = start(scratch.run("polite", &[]));
    scratch.rank_pid();
    is_running(&scratch);
    let one = told(&scratch, &[]);
    assert_eq!(
        (&one[0]["kind"], &one[0]["state"]),
        (&"run".into(), &"running".into())
    );
    assert_eq!(
        (&one[0]["pid"], &one[0]["steps"]),
        (&child.id().into(), &10_000.into())
    );
    send(child.id(), Signal::TERM);
    assert_eq!(end(child).code, Some(3));
    let stopped = row(&scratch, "runs/x");
    assert!(
        stopped.starts_with("runs/x stopped 1/10,000 - "),
        "{stopped}"
    );
    assert!(stopped.ends_with("stopped after step 120, which is saved; the same command goes on"));

    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    let failed = row(&scratch, "runs/x");
    assert!(failed.starts_with("runs/x failed 4/10,000 - "), "{failed}");
    assert!(
        failed.ends_with("failed after step 4 (decomposing): loss is NaN at step 5"),
        "{failed}"
    );

    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let done = row(&scratch, "runs/x");
    assert!(done.starts_with("runs/x done 4/10,000 5.000e-1 "), "{done}");
    let one = told(&scratch, &["runs/x"]);
    assert_eq!(
        (&one[0]["state"], &one[0]["note"]),
        (&"done".into(), &Value::Null)
    );
    assert_eq!(
        (&one[0]["name"], &one[0]["target"]),
        (&"tms_5-2".into(), &"tms".into())
    );
    assert!(one[0]["seconds"].as_f64().unwrap() > 0.5);
}

#[test]
fn a_killed_run_is_listed_with_its_newest_checkpoint() {
    let scratch = Scratch::new();
    let mut child = start(scratch.run("polite", &[]));
    let rank = scratch.rank_pid();
    is_running(&scratch);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_goes(rank);
    fs::create_dir_all(scratch.run_dir().join("checkpoints/step-00000120")).unwrap();
    let one = told(&scratch, &[]);
    assert_eq!(
        (&one[0]["state"], &one[0]["saved"]),
        (&"killed".into(), &120.into())
    );
    let note = format!(
        "its launcher (process {}) exited without a message: it was killed, or its machine went down; the same command goes on from step 120",
        child.id()
    );
    assert_eq!(one[0]["note"], note);
    assert!(is_gone(child.id()));
}

#[test]
fn the_runs_of_a_sweep_are_listed_below_it() {
    let scratch = Scratch::new();
    let ended = launch(scratch.sweep("sweep", &["--seeds", "0..3", "--threads", "2"]));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let all = told(&scratch, &[]);
    let states: Vec<_> = all
        .iter()
        .map(|one| one["state"].as_str().unwrap())
        .collect();
    assert_eq!(states, ["failed", "done", "done", "failed"]);
    assert_eq!(
        (&all[0]["kind"], &all[0]["runs"]),
        (&"sweep".into(), &3.into())
    );
    assert_eq!(all[0]["note"], "2 done, 1 failed");
    assert_eq!(
        (&all[3]["path"], &all[3]["sweep"]),
        (&"runs/s/seed=2".into(), &"runs/s".into())
    );
    assert!(
        all[3]["note"].as_str().unwrap().contains("loss is NaN"),
        "{}",
        all[3]["note"]
    );
    let table = runs(&scratch, &["runs/s"]).stdout;
    let first: Vec<&str> = table
        .lines()
        .map(|line| line.split("  ").nth(1).unwrap_or_default())
        .collect();
    assert_eq!(first, ["run", "runs/s", "", "", ""], "{table}");
    assert!(table.contains("\n    seed=0  done "), "{table}");
}

#[test]
fn damaged_and_foreign_directories_do_not_stop_the_list() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let root = scratch.path().join("runs");
    for name in ["damaged", "foreign", "closed", "odd \u{1b}[31mname"] {
        fs::create_dir(root.join(name)).unwrap();
    }
    fs::write(root.join("damaged/config.toml"), "").unwrap();
    fs::write(root.join("damaged/metrics.jsonl"), [0xff, b'\n']).unwrap();
    fs::write(root.join("foreign/notes.txt"), "mine").unwrap();
    fs::write(
        root.join("odd \u{1b}[31mname/config.toml"),
        "name = \"x\"\n",
    )
    .unwrap();
    fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
    let ended = runs(&scratch, &[]);
    fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o755)).unwrap();
    let states = |name: &str, state: &str| {
        let is_row = |line: &str| line.contains(name) && line.contains(state);
        assert!(ended.stdout.lines().any(is_row), "{name}: {}", ended.stdout);
    };
    states("runs/x", "done");
    states("runs/damaged", "killed");
    states("runs/odd  [31mname", "waiting");
    assert!(
        !ended.stdout.contains('\u{1b}') && !ended.stdout.contains("foreign"),
        "{}",
        ended.stdout
    );
    for told in [
        "runs/damaged/config.toml: is not a readable run file\n",
        "runs/damaged/metrics.jsonl: no row can be read: ",
    ] {
        assert!(ended.stderr.contains(told), "{told}: {}", ended.stderr);
    }
    // Root can read everything.
    if !rustix::process::geteuid().is_root() {
        assert!(
            ended.stderr.contains("runs/closed: cannot be listed: "),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn a_lack_of_runs_is_reported() {
    let scratch = Scratch::new();
    let none = "no runs here: there is no directory runs; `spd-launch runs DIR` looks elsewhere\n";
    assert_eq!(runs(&scratch, &[]).stderr, none);
    fs::create_dir(scratch.path().join("runs")).unwrap();
    assert_eq!(runs(&scratch, &[]).stderr, "runs: no runs there\n");
    let ended = launch(scratch.launcher(&["runs", "no\u{1b}where"]));
    let refused = "error: no\\u{1b}where: expected a directory with runs, found nothing; give one, like runs\n";
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(2), refused));
}

// Listing holds the lock for a moment.
#[test]
fn listing_a_run_repeatedly_does_not_disturb_it() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let mut looking = start(scratch.shell("while :; do \"$LAUNCHER\" runs > /dev/null; done"));
    for _ in 0..4 {
        fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
        let ended = launch(scratch.run("done", &[]));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    looking.kill().unwrap();
    looking.wait().unwrap();
}
