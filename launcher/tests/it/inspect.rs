//! `spd-launch inspect`.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;

use crate::scratch::{Ended, Scratch, launch};

fn inspect(scratch: &Scratch, words: &[&str]) -> Ended {
    launch(scratch.launcher(&[&["inspect"], words].concat()))
}

fn flip_last(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_dataset_is_described_and_verified() {
    let scratch = Scratch::new();
    let text = "to be|or not to be".repeat(20);
    fs::write(scratch.path().join("text"), text).unwrap();
    let words = [
        "tokenize",
        "text",
        "--tokenizer",
        "bytes",
        "--separator",
        "|",
        "--out",
        "data",
    ];
    assert_eq!(launch(scratch.launcher(&words)).code, Some(0));
    let seen = inspect(&scratch, &["data/train"]);
    assert_eq!(seen.code, Some(0), "{}", seen.stderr);
    for line in [
        "  tokenizer    bytes as ids\n",
        "  intact: all hashes match, all ids are below the vocabulary\n",
        "  from token 0 on: \"to beor not to beto be",
    ] {
        assert!(seen.stdout.contains(line), "{line}: {}", seen.stdout);
    }
    flip_last(&scratch.path().join("data/train/tokens-00000.safetensors"));
    let seen = inspect(&scratch, &["data/train"]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(2), ""));
    assert!(
        seen.error()
            .starts_with("data/train/tokens-00000.safetensors: its tokens hash to "),
        "{}",
        seen.stderr
    );
    fs::write(scratch.path().join("ids.bin"), [1, 0, 2, 0]).unwrap();
    let seen = inspect(&scratch, &["ids.bin", "--dtype", "u16"]);
    assert!(
        seen.stdout.contains("  from token 0 on: \"1 2\"\n"),
        "{}",
        seen.stdout
    );
    let seen = inspect(&scratch, &["nowhere"]);
    assert_eq!(
        (seen.code, seen.error()),
        (Some(2), "nowhere: no such dataset")
    );
}

#[test]
fn a_run_its_checkpoint_and_weights_are_described_and_verified() {
    let scratch = Scratch::new();
    let set = [
        "train.steps=4",
        "train.batch_size=8",
        "train.faithfulness_warmup.steps=0",
        "target.train.steps=2",
        "eval.batches=1",
        "eval.batch_size=8",
    ];
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &set));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let seen = inspect(&scratch, &["runs/x"]);
    assert!(
        seen.stdout
            .contains("  its newest good checkpoint is of step 4\n"),
        "{} {}",
        seen.stdout,
        seen.stderr
    );
    let step = "runs/x/checkpoints/step-00000004";
    let seen = inspect(&scratch, &[step]);
    let first = format!("  checkpoint of step 4 in {step}\n  intact: all hashes match\n");
    assert!(
        seen.stdout.starts_with(&first) && seen.stdout.contains("linear1"),
        "{} {}",
        seen.stdout,
        seen.stderr
    );
    let file = format!("{step}/tensors.safetensors");
    let seen = inspect(&scratch, &[&file]);
    assert!(
        seen.stdout.starts_with(&format!("  weights in {file}\n")),
        "{}",
        seen.stderr
    );
    let path = scratch.path().join(&file);
    flip_last(&path);
    let seen = inspect(&scratch, &[step]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(2), ""));
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let seen = inspect(&scratch, &[&file]);
    assert!(
        seen.error()
            .contains("tensors.safetensors: not a safetensors file: its header says "),
        "{}",
        seen.stderr
    );
}
