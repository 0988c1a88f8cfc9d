//! A run whose files a test changes before the same command continues it.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scratch::{Ended, Scratch, launch, names};

pub(crate) const TOY: [&str; 11] = [
    "train.steps=40",
    "train.batch_size=64",
    "train.faithfulness_warmup.steps=2",
    "target.train.steps=20",
    "target.train.batch_size=64",
    "eval.batches=1",
    "eval.batch_size=64",
    "log.every=10",
    "eval.every=20",
    "checkpoint.every=20",
    "checkpoint.keep=2",
];

pub(crate) const LANGUAGE_MODEL: [&str; 16] = [
    "train.steps=40",
    "train.batch_size=2",
    "train.faithfulness_warmup.steps=2",
    "target.n_layer=1",
    "target.d_model=32",
    "target.d_mlp=64",
    "target.train.steps=20",
    "target.train.batch_size=4",
    "data.seq_len=32",
    "eval.batches=1",
    "eval.batch_size=2",
    "log.every=10",
    "eval.every=20",
    "eval.slow_every=0",
    "checkpoint.every=20",
    "checkpoint.keep=2",
];

pub(crate) fn toy(scratch: &Scratch) -> Command {
    scratch.real("tms_5-2.toml", "runs/x", &TOY)
}

pub(crate) fn language_model(scratch: &Scratch) -> Command {
    scratch.real("shakespeare.toml", "runs/x", &LANGUAGE_MODEL)
}

/// Makes a dataset from a repeated word.
pub(crate) fn tokenize(scratch: &Scratch, word: &str, out: &str) {
    let text: String = (0..2000)
        .map(|line| format!("{word} {line} of {}\n", line * line % 97))
        .collect();
    fs::write(scratch.path().join("text.txt"), text).unwrap();
    let made =
        launch(scratch.launcher(&["tokenize", "text.txt", "--tokenizer", "bytes", "--out", out]));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
}

/// Leaves a run as after a kill between steps 20 and 40.
pub(crate) fn kill_halfway(scratch: &Scratch, command: Command) {
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let run_dir = scratch.run_dir();
    fs::remove_file(run_dir.join("summary.json")).unwrap();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000040")).unwrap();
}

/// Every file below a directory, with its bytes.
pub(crate) fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for name in names(dir) {
        let path = dir.join(name);
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.insert(path.clone(), fs::read(path).unwrap());
        }
    }
    all
}

/// Asserts that a command is refused with one line, in a launch and in a dry run, and that no file
/// changes.
pub(crate) fn refused(scratch: &Scratch, command: impl Fn() -> Command) -> String {
    let before = [files(&scratch.run_dir()), targets(scratch)];
    let mut dry = command();
    dry.arg("--dry-run");
    let ended = [dry, command()].map(launch);
    for ended in &ended {
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert_eq!(ended.stdout, "", "no plan");
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    assert_eq!(ended[0].stderr, ended[1].stderr);
    assert!(before == [files(&scratch.run_dir()), targets(scratch)]);
    ended[1].error().to_owned()
}

pub(crate) fn targets(scratch: &Scratch) -> BTreeMap<PathBuf, Vec<u8>> {
    files(&scratch.path().join("cache/targets"))
}

/// The file of the only target in the cache.
pub(crate) fn target(scratch: &Scratch) -> PathBuf {
    let all = scratch.path().join("cache/targets");
    let [only] = names(&all).try_into().unwrap();
    all.join(only).join("target.safetensors")
}

pub(crate) fn succeeds(command: Command) -> Ended {
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

/// The last checkpoint and the rows of a run.
pub(crate) fn results(scratch: &Scratch) -> [Vec<u8>; 2] {
    [
        "checkpoints/step-00000040/tensors.safetensors",
        "metrics.jsonl",
    ]
    .map(|name| fs::read(scratch.run_dir().join(name)).unwrap())
}

pub(crate) fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// A line without its hashes.
pub(crate) fn without_hashes(line: &str) -> String {
    let is_hash = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let words = line.split_inclusive([' ', ',', ';', ')']);
    words
        .map(|word| match word.split_at_checked(32) {
            Some((hash, rest)) if is_hash(hash) => format!("HASH{rest}"),
            _ => word.to_owned(),
        })
        .collect()
}
