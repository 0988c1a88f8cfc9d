//! Language models after 200 steps, compared with PyTorch on the same target, data and settings.
//! Its numbers are means of two seeds from `.ci/against-pytorch`; the bounds are several times
//! wider than the spread of seeds, since other processors round differently.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::scratch::{Scratch, end, start};

const SETTINGS: [&str; 4] = [
    "train.steps=200",
    "train.faithfulness_warmup.steps=100",
    "eval.batches=20",
    "log.every=50",
];

/// A number of the last evaluation: its name, PyTorch's value, and the allowed relative difference.
type End = (&'static str, f64, f64);

fn text() -> Option<PathBuf> {
    let shared = env::var_os("SPD_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let text = shared.join("data/tinyshakespeare.txt");
    let is_there = text.is_file();
    if !is_there {
        spd_testing::skip("shared/data/tinyshakespeare.txt");
    }
    is_there.then_some(text)
}

fn tokenized(text: &Path) -> Scratch {
    let scratch = Scratch::new();
    let text = text.to_str().unwrap();
    let make = [
        "tokenize",
        text,
        "--tokenizer",
        "bytes",
        "--out",
        "data/shakespeare",
    ];
    run(scratch.launcher(&make));
    scratch
}

/// Runs to the end, however long that takes.
fn run(command: Command) {
    let ended = end(start(command));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Checks the last evaluation of a run, with the L0 of all sites.
fn hold(scratch: &Scratch, out: &str, ends: &[End]) {
    let rows = fs::read_to_string(scratch.path().join(out).join("metrics.jsonl")).unwrap();
    let last = rows.lines().rfind(|row| row.contains("\"eval/ce/target\""));
    let last: Value = serde_json::from_str(last.unwrap()).unwrap();
    let keys = last.as_object().unwrap().iter();
    // Groups of sites have names without dots.
    let l0 = keys.filter(|(key, _)| key.starts_with("eval/l0/") && key.contains('.'));
    let l0: f64 = l0.map(|(_, value)| value.as_f64().unwrap()).sum();
    for (key, theirs, part) in ends {
        let ours = match *key {
            "l0" => l0,
            key => last[key].as_f64().unwrap(),
        };
        assert!(
            (ours / theirs - 1.0).abs() < *part,
            "{key}: {ours}, PyTorch has {theirs}"
        );
    }
}

#[test]
fn a_llama_trained_here_agrees_with_pytorch() {
    let Some(text) = text() else { return };
    let scratch = tokenized(&text);
    let set = [&SETTINGS[..], &["target.train.steps=200"]].concat();
    run(scratch.real("shakespeare-llama.toml", "runs/x", &set));
    hold(&scratch, "runs/x", &LLAMA);
}

/// The target's weights are in a directory in Hugging Face's format.
#[test]
fn a_gpt2_of_hugging_face_agrees_with_pytorch() {
    let Some(text) = text() else { return };
    let scratch = tokenized(&text);
    let only_target = ["train.steps=1", "eval.batches=1", "target.train.steps=200"];
    run(scratch.real("shakespeare.toml", "runs/target", &only_target));
    let targets = scratch.path().join("cache/targets");
    let target = fs::read_dir(targets).unwrap().next().unwrap().unwrap();
    let dir = scratch.path().join("gpt2");
    fs::create_dir(&dir).unwrap();
    let weights = target.path().join("target.safetensors");
    fs::copy(weights, dir.join("model.safetensors")).unwrap();
    fs::write(
        dir.join("config.json"),
        r#"{"model_type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}"#,
    )
    .unwrap();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/shakespeare.toml");
    let text = fs::read_to_string(config).unwrap();
    let (before, rest) = text.split_once("[target]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    let text = format!("{before}[target]\nweights = \"gpt2\"\n[data]{after}");
    fs::write(scratch.path().join("run.toml"), text).unwrap();
    let mut command = scratch.launcher(&["run.toml", "--out", "runs/x"]);
    command.args(SETTINGS.iter().flat_map(|set| ["--set", set]));
    run(command);
    hold(&scratch, "runs/x", &GPT2);
}

const LLAMA: [End; 6] = [
    ("eval/ce/target", 2.22, 0.07),
    ("eval/ce/stochastic", 2.41, 0.07),
    ("eval/kl/stochastic", 0.137, 0.25),
    ("eval/kl/rounded", 0.384, 0.4),
    ("eval/faithfulness", 3.63e-7, 0.4),
    ("l0", 159.0, 0.2),
];

const GPT2: [End; 6] = [
    ("eval/ce/target", 2.47, 0.07),
    ("eval/ce/stochastic", 2.57, 0.07),
    ("eval/kl/stochastic", 0.072, 0.25),
    ("eval/kl/rounded", 0.243, 0.4),
    ("eval/faithfulness", 1.44e-7, 0.4),
    ("l0", 49.5, 0.25),
];
