//! Small finished runs, for tests of commands on a run.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use crate::scratch::{Ended, Scratch, launch};

/// Settings of a toy of 12 steps.
pub(crate) const TOY: [&str; 6] = [
    "train.steps=12",
    "train.batch_size=64",
    "train.faithfulness_warmup.steps=2",
    "target.train.steps=20",
    "eval.batches=2",
    "eval.batch_size=64",
];

/// Settings with which a toy of five features is taken apart in seconds, whatever the seed.
const SOLVED: [&str; 7] = [
    "train.steps=2000",
    "train.batch_size=512",
    "train.lr={ start = 5e-3, shape = 'cosine' }",
    "target.train.steps=3000",
    "eval.batches=5",
    "eval.every=100000",
    "checkpoint.every=100000",
];

/// Settings of a language model of two steps.
const LANGUAGE_MODEL: [&str; 9] = [
    "train.steps=2",
    "train.batch_size=2",
    "train.faithfulness_warmup.steps=1",
    "target.n_layer=1",
    "target.d_model=32",
    "target.d_mlp=64",
    "target.train.steps=2",
    "data.seq_len=16",
    "eval.batches=2",
];

/// The text of [`language_model`], which is repeated.
pub(crate) const TEXT: &str = "some text to be read byte by byte, over and over\n";

/// Finishes a toy in `runs/x` with further `set`s.
pub(crate) fn toy(scratch: &Scratch, set: &[&str]) -> Ended {
    toy_at(scratch, "runs/x", set)
}

/// Finishes a toy in `out` with further `set`s.
pub(crate) fn toy_at(scratch: &Scratch, out: &str, set: &[&str]) -> Ended {
    real(scratch, "tms_5-2-id.toml", out, &[&TOY, set].concat())
}

/// Finishes a toy in `out` with a seed, in which each feature has a component of its own.
pub(crate) fn solved(scratch: &Scratch, out: &str, seed: u32) {
    let seed = format!("seed={seed}");
    let ended = real(
        scratch,
        "tms_5-2.toml",
        out,
        &[&SOLVED, &[&*seed][..]].concat(),
    );
    let verdict = "Solved: 5 of 5 features, importance error 0\n\ntms_5-2: 2000 steps, ";
    assert!(ended.stdout.contains(verdict), "{}", ended.stdout);
}

/// Finishes a language model on [`TEXT`] in `out` with further `set`s.
pub(crate) fn language_model(scratch: &Scratch, out: &str, set: &[&str]) -> Ended {
    tokenize(scratch, TEXT, "data/shakespeare");
    let set = [&LANGUAGE_MODEL, set].concat();
    real(scratch, "shakespeare.toml", out, &set)
}

/// Makes a dataset from a repeated text, if `out` does not exist.
pub(crate) fn tokenize(scratch: &Scratch, text: &str, out: &str) {
    if scratch.path().join(out).is_dir() {
        return;
    }
    fs::write(scratch.path().join("text.txt"), text.repeat(400)).unwrap();
    let arguments = ["tokenize", "text.txt", "--tokenizer", "bytes", "--out", out];
    let ended = launch(scratch.launcher(&arguments));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Finishes a run with a real rank.
fn real(scratch: &Scratch, config: &str, out: &str, set: &[&str]) -> Ended {
    let ended = launch(scratch.real(config, out, set));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}
