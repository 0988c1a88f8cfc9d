//! Runs with the same target: one trains it, the others wait and say so.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::scratch::{Scratch, end, start};

/// Enough steps for the wait to be visible on a fast machine too.
const STEPS: f64 = 20_000.0;

const SMALL: [&str; 7] = [
    "target.train.steps=20_000",
    "target.train.batch_size=2048",
    "train.steps=5",
    "train.batch_size=64",
    "train.faithfulness_warmup.steps=2",
    "eval.batches=1",
    "eval.batch_size=64",
];

fn command(scratch: &Scratch, seed: u32) -> Command {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/tms_5-2.toml");
    let mut command = scratch.launcher(&[config, "--threads", "1"]);
    command.args([
        "--out",
        &format!("runs/{seed}"),
        "--set",
        &format!("seed={seed}"),
    ]);
    for set in SMALL {
        command.args(["--set", set]);
    }
    command.env("SPD_CACHE", scratch.path().join("cache"));
    command
}

/// The rows of a run in one phase.
fn rows(run_dir: &Path, phase: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run_dir.join("system.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.filter(|row: &serde_json::Value| row["note"] == phase)
        .collect()
}

#[test]
fn a_target_is_trained_once_while_other_runs_show_its_progress() {
    let scratch = Scratch::new();
    let launches = [0, 1].map(|seed| start(command(&scratch, seed)));
    let ended = launches.map(end);
    for ended in &ended {
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    let dirs = [0, 1].map(|seed| scratch.path().join(format!("runs/{seed}")));
    let trained = dirs.clone().map(|dir| !rows(&dir, "target").is_empty());
    assert_eq!(
        trained.iter().filter(|trained| **trained).count(),
        1,
        "{trained:?}"
    );
    let waiter = usize::from(trained[0]);
    let waits = rows(&dirs[waiter], "wait");
    assert!(waits.iter().all(|row| row["steps"] == STEPS));
    let steps: Vec<f64> = waits
        .iter()
        .map(|row| row["step"].as_f64().unwrap())
        .collect();
    assert!(
        steps.is_sorted() && steps.last().unwrap() > &0.0,
        "{steps:?}"
    );
    let told = &ended[waiter].stderr;
    assert!(
        told.contains("step 0: waits for process ")
            && told.contains(", which trains the same target"),
        "{told}"
    );
    assert!(told.contains("waiting for target  step "), "{told}");
    // The target is the same; only the seed of the decomposition differs.
    let cached: Vec<_> = fs::read_dir(scratch.path().join("cache/targets"))
        .unwrap()
        .collect();
    assert_eq!(cached.len(), 1);
}
