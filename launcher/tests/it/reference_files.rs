//! Run files of the SPD reference.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use crate::scratch::{Ended, Scratch, launch};

const TOY: &str = include_str!("../../../trainer/src/run_file/tests/reference/toy.yaml");

const TARGET: &str =
    r#"target={kind="tms",n_features=6,n_hidden=3,train={steps=20,batch_size=16,lr=5e-3}}"#;

fn run(scratch: &Scratch, set: &[&str]) -> Ended {
    let mut words = vec!["toy.yaml", "--threads", "1", "--out", "runs/x"];
    words.extend(set.iter().flat_map(|one| ["--set", one]));
    launch(scratch.launcher(&words))
}

#[test]
fn a_reference_file_is_run_and_kept_as_toml() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("toy.yaml"), TOY).unwrap();
    let refused = run(&scratch, &[]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let line = refused.stderr.trim_end();
    let told = "toy.yaml:57:1: pretrained_model_path: \"wandb:";
    assert!(line.contains(told) && line.lines().count() == 1, "{line}");
    assert!(
        !scratch.run_dir().try_exists().unwrap(),
        "nothing is created"
    );

    let set = [
        TARGET,
        "train.steps=6",
        "eval.every=3",
        "eval.slow_every=0",
        "checkpoint.every=2",
    ];
    let ended = run(&scratch, &set);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let told = "toy.yaml: without effect here: wandb_project";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    let resolved = fs::read_to_string(scratch.run_dir().join("config.toml")).unwrap();
    assert!(
        resolved.starts_with("name = \"toy\"\nseed = 3\n"),
        "{resolved}"
    );

    let again = run(&scratch, &set);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    let other = run(&scratch, &[TARGET, "train.steps=7"]);
    assert_eq!(other.code, Some(2), "another run: {}", other.stderr);
}
