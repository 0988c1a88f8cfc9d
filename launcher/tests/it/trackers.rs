//! Trackers of a run, from the command line.

use std::fs;

use rustix::process::Signal;

use crate::scratch::{Scratch, end, launch, names, send, start};

pub(crate) const SHORT: [&str; 5] = [
    "train.steps=12",
    "train.batch_size=64",
    "target.train.steps=5",
    "eval.batches=1",
    "eval.batch_size=64",
];

#[test]
fn a_run_is_shipped_during_training_and_the_rest_later() {
    let scratch = Scratch::new();
    let mut command = scratch.real("tms_5-2.toml", "runs/x", &SHORT);
    // A W&B without a key is reported, and only delays the end of the run for a moment.
    command.args(["--tracker", "tensorboard,wandb"]);
    command
        .env_remove("WANDB_API_KEY")
        .env("HOME", scratch.path());
    command.env("WANDB_BASE_URL", "http://127.0.0.1:9");
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let said = |line: &str| ended.stderr.contains(line);
    assert!(said("tensorboard: all 5 rows are sent"), "{}", ended.stderr);
    assert!(
        said("wandb: 5 rows are not sent: no key for 127.0.0.1"),
        "{}",
        ended.stderr
    );
    assert!(
        said("`spd-launch ship runs/x` sends them"),
        "{}",
        ended.stderr
    );
    let run = scratch.run_dir();
    let config = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(
        config.contains("to = [\"tensorboard\", \"wandb\"]"),
        "{config}"
    );
    let events = names(&run.join("tensorboard"));
    let is_events = |name: &String| name.starts_with("events.out.tfevents.");
    assert_eq!(events.iter().filter(|name| is_events(name)).count(), 1);
    // All rows are there already, and nothing changes.
    let again = launch(scratch.launcher(&["ship", "runs/x", "--tracker", "tensorboard"]));
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    let said = "tensorboard: all 5 rows were there before";
    assert!(again.stderr.contains(said), "{}", again.stderr);
    assert_eq!(names(&run.join("tensorboard")), events);
}

#[test]
fn a_resumed_run_is_shipped_to_its_new_trackers() {
    let scratch = Scratch::new();
    let launched = |arguments: &[&str]| {
        // It exists again once the rank is up.
        let _ = fs::remove_file(scratch.run_dir().join("system.jsonl"));
        let launcher = start(scratch.run("polite", arguments));
        scratch.rank_pid();
        send(launcher.id(), Signal::TERM);
        let ended = end(launcher);
        assert_eq!(ended.code, Some(3), "{}", ended.stderr);
        fs::read_to_string(scratch.run_dir().join("config.toml")).unwrap()
    };
    let first = launched(&[]);
    assert!(!first.contains("[tracker]"), "{first}");
    let second = launched(&["--tracker", "tensorboard"]);
    let added = "[tracker]\nto = [\"tensorboard\"]\n";
    assert!(second.contains(added), "{second}");
    assert!(first.lines().all(|line| second.contains(line)), "{second}");
    // The remaining rows are still to be sent.
    assert_eq!(launched(&[]), second);
}

#[test]
fn invalid_runs_are_not_shipped() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["ship", "runs/x"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.error().contains("runs/x/config.toml"),
        "{}",
        ended.stderr
    );
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &SHORT));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = launch(scratch.launcher(&["ship", "runs/x"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains(
            "runs/x: its config.toml names no tracker under [tracker]; name one: --tracker wandb, mlflow or tensorboard"
        ),
        "{}",
        ended.stderr
    );
    let ended = launch(scratch.launcher(&["ship", "runs/x", "--tracker", "comet"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .stderr
            .contains("expected wandb, mlflow or tensorboard"),
        "{}",
        ended.stderr
    );
}
