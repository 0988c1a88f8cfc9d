//! `spd-launch check`.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use serde_json::Value;

use crate::scratch::{Ended, Scratch, launch};

fn check(scratch: &Scratch, words: &[&str]) -> Ended {
    launch(scratch.launcher(&[&["check", "--threads", "1"], words].concat()))
}

/// A target so small that its own sizes are those of the random stream.
const SMALL: [&str; 8] = [
    "--set",
    "target.d_model=32",
    "--set",
    "target.n_layer=1",
    "--set",
    "target.n_ctx=16",
    "--set",
    "data.seq_len=16",
];

#[test]
fn a_shipped_language_model_is_causal_and_its_control_is_not() {
    let scratch = Scratch::new();
    let words = [&["shakespeare", "--steps", "150"], &SMALL[..]].concat();
    let ended = check(&scratch, &words);
    assert_eq!(ended.code, Some(0), "{} {}", ended.stdout, ended.stderr);
    let first = "gpt2, 1 layers of width 32, 4 heads, mlp 128, 256 tokens, 16 positions: causal\n  suffix probe   0 of 46 earlier \
                 positions changed; control without mask: 46 of 46\n  random stream  2.";
    assert!(ended.stdout.starts_with(first), "{}", ended.stdout);
    let line = "\n  weights        starting values of standard deviation 1/sqrt(fan-in): ";
    assert!(ended.stdout.contains(line), "{}", ended.stdout);

    let json = check(&scratch, &[&words[..], &["--json"]].concat());
    let found: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&found["verdict"], &found["says_leaky"]),
        (&"causal".into(), &false.into())
    );
    assert_eq!(found["probe"]["control"][0]["changed"], 30);
    assert_eq!(found["stream"]["steps"], 150);
}

// Of four steps nothing is learned: the leak of the control is not seen.
#[test]
fn a_control_that_shows_nothing_is_a_failure() {
    let scratch = Scratch::new();
    let ended = check(
        &scratch,
        &[&["shakespeare", "--steps", "4"], &SMALL[..]].concat(),
    );
    assert_eq!(ended.code, Some(1), "{}", ended.stdout);
    assert!(
        ended.error().ends_with(
            "16 positions: the leak without its mask was not seen either, so nothing is known; try more --steps"
        ),
        "{}",
        ended.stderr
    );
}

#[test]
fn bad_input_is_one_line_and_code_2() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path().join("empty")).unwrap();
    fs::write(scratch.path().join("mine.toml"), "name = ").unwrap();
    for (words, line) in [
        (
            &["weights/gpt2"][..],
            "weights/gpt2: expected a run file or weights, found nothing there; `spd-launch configs` lists the run files that \
             are part of this program",
        ),
        (
            &["model.safetensors"],
            "model.safetensors: expected weights, found No such file or directory (os error 2); try a run file, or a directory \
             with a config.json and its weights",
        ),
        (
            &["empty"],
            "empty: no empty/config.json, which says what network the weights are of; put it there, or give `kind` and its \
             sizes",
        ),
        (
            &["empty", "--set", "seed=1"],
            "--set seed=1: expected a run file, found weights, empty; their config.json says the network",
        ),
        (
            &["tms_5-2"],
            "shipped:tms_5-2.toml: expected a network that reads tokens, found tms, 5 features in 2 dimensions, whose rows have no \
             later token to see; try a language model, like shakespeare",
        ),
    ] {
        let ended = check(&scratch, words);
        assert_eq!(
            (ended.code, ended.error()),
            (Some(2), line),
            "{}",
            ended.stderr
        );
        assert_eq!(ended.stdout, "");
        let errors = ended.stderr.matches("error: ").count();
        assert_eq!(errors, 1, "{}", ended.stderr);
    }
    let ended = check(&scratch, &["shakespeare", "--steps", "3"]);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .stderr
            .contains("expected 4 to 1000000 steps; the mean of the last ones needs a few"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_leak_is_not_allowed_to_a_network_that_has_none() {
    let scratch = Scratch::new();
    let set = ["--dry-run", "--set", "target.allow_leak=true"];
    let ended = launch(scratch.launcher(&[&["tms_5-2"], &set[..]].concat()));
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "[target] allow_leak: expected a network that leaks, found tms, 5 features in 2 dimensions, which does not; leave \
             it out"
        )
    );
}

#[test]
fn runs_tail_and_inspect_say_that_a_target_leaks() {
    let scratch = Scratch::new();
    let set = [
        "train.steps=1",
        "train.batch_size=8",
        "target.train.steps=2",
        "eval.batches=1",
    ];
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &set));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let config = scratch.run_dir().join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        text.replace("[target]\n", "[target]\nallow_leak = true\n"),
    )
    .unwrap();
    let seen = launch(scratch.launcher(&["inspect", "runs/x"]));
    let line = "  LEAKY: its target sees the tokens that it is to predict; its losses are none of a language model\n";
    assert!(seen.stdout.contains(line), "{}", seen.stdout);
    let table = launch(scratch.launcher(&["runs"])).stdout;
    assert!(table.contains("LEAKY "), "{table}");
    let rows = launch(scratch.launcher(&["tail", "runs/x"])).stdout;
    assert!(rows.contains("  train LEAKY  loss "), "{rows}");
    assert!(rows.contains("  eval LEAKY  "), "{rows}");
}
