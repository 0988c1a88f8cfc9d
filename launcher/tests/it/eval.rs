//! `spd-launch eval`: with the run's settings, other settings, other data, and during the run.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::both::is_gone;
use crate::scratch::{Ended, Scratch, end, launch, names, send, start, wait_until_it_trains};
use crate::small_run::{TOY, language_model, tokenize, toy};

fn done(scratch: &Scratch, arguments: &[&str]) -> Ended {
    let ended = launch(scratch.launcher(arguments));
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
    ended
}

fn refused(scratch: &Scratch, arguments: &[&str], expected: &str) {
    let ended = launch(scratch.launcher(arguments));
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout.as_str()),
        (Some(2), format!("error: {expected}\n").as_str(), ""),
        "{arguments:?}"
    );
}

/// Every file of a directory except its evaluations, with its content.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("evaluations") {
            } else if path.is_dir() {
                dirs.push(path);
            } else {
                found.push((path.clone(), fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// The only row of an evaluation.
fn row(place: &Path) -> String {
    let rows = fs::read_to_string(place.join("metrics.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 1, "{rows}");
    rows
}

/// The only evaluation of `runs/x` with a hash in its name.
fn other_place(scratch: &Scratch) -> PathBuf {
    let dir = scratch.run_dir().join("evaluations");
    let mut others = names(&dir);
    others.retain(|name| name.len() > "step-00000012".len());
    let [other] = others.as_slice() else {
        panic!("{others:?}");
    };
    dir.join(other)
}

#[test]
fn unchanged_settings_give_the_same_bits_and_do_not_change_the_run() {
    let scratch = Scratch::new();
    // Batches are in shards, as with several ranks, and a loss is measured only in slow
    // evaluations.
    let slow = "eval.loss=[{kind=\"stochastic_recon\",slow=true}]";
    toy(&scratch, &["train.shards=4", slow]);
    let before = files(&scratch.run_dir());
    let ended = done(&scratch, &["eval", "runs/x", "--threads", "1"]);
    assert_eq!(ended.stderr, "");
    for told in [
        "tms_5-2-id: step 12, seed 0\n",
        "masks",
        "CI-masked",
        "  evaluation ",
        "runs/x/evaluations/step-00000012\n",
        "`spd-launch report runs/x/evaluations/step-00000012` makes a page of them\n",
    ] {
        assert!(ended.stdout.contains(told), "{told}: {}", ended.stdout);
    }
    assert!(before == files(&scratch.run_dir()));
    let place = scratch.run_dir().join("evaluations/step-00000012");
    let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
    let last = rows.lines().rfind(|row| row.contains("\"kind\":\"eval\""));
    assert_eq!(row(&place).trim_end(), last.unwrap());
    let figures = scratch.run_dir().join("figures/step-00000012");
    for name in names(&figures) {
        let drawn = fs::read(place.join("figures/step-00000012").join(&name)).unwrap();
        assert!(drawn == fs::read(figures.join(&name)).unwrap(), "{name}");
    }
    // A repetition gives the same, also as a JSON row.
    let again = done(&scratch, &["eval", "runs/x/", "--json"]);
    assert_eq!(again.stdout, row(&place));
    assert_eq!(names(&scratch.run_dir().join("evaluations")).len(), 1);
    // A page can be made of it, as of a run.
    done(&scratch, &["report", "runs/x/evaluations/step-00000012"]);
    assert!(place.join("report.html").is_file());
}

#[test]
fn other_settings_give_a_separate_evaluation() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    done(&scratch, &["eval", "runs/x"]);
    let before = files(&scratch.run_dir());
    let set = ["--set", "eval.batches=5", "--set", "eval.batch_size=32"];
    let asked = [&["eval", "runs/x"], &set[..]].concat();
    let ended = done(&scratch, &asked);
    assert!(
        ended.stdout.contains("eval.batches: 5 here, 2 there\n"),
        "{}",
        ended.stdout
    );
    assert!(before == files(&scratch.run_dir()));
    let place = other_place(&scratch);
    let own = scratch.run_dir().join("evaluations/step-00000012");
    let value = |place: &Path| {
        let row: Value = serde_json::from_str(&row(place)).unwrap();
        row["eval/l0/linear1"].to_string()
    };
    assert_ne!(value(&place), value(&own));
    let histograms = place.join("figures/step-00000012/importance_histograms.json");
    let histograms: Value = serde_json::from_slice(&fs::read(histograms).unwrap()).unwrap();
    let counts: Vec<u64> = serde_json::from_value(histograms[0]["counts"].clone()).unwrap();
    assert_eq!(counts.iter().sum::<u64>(), 5 * 32 * 20);
    // `figures` takes the same settings, and does not change the run's figures.
    let ended = done(&scratch, &[&["figures", "runs/x"], &set[..]].concat());
    let drawn = place.strip_prefix(scratch.path()).unwrap().display();
    assert_eq!(
        ended.stdout,
        format!(
            "the figures of step 12 are in {drawn}/figures/step-00000012\n`spd-launch report {drawn}` makes a page of them\n"
        )
    );
    assert!(before == files(&scratch.run_dir()));
    // So does another directory, which may contain only an evaluation.
    done(&scratch, &[&asked[..], &["--out", "elsewhere"]].concat());
    assert_eq!(row(&scratch.path().join("elsewhere")), row(&place));
    done(&scratch, &[&asked[..], &["--out", "elsewhere"]].concat());
    for (out, why) in [
        (
            "runs/x",
            "holds files and no evaluated.json, so it is no evaluation; give the name of a new directory",
        ),
        ("runs/x/config.toml", "Not a directory (os error 20)"),
        ("runs/x/config.toml/below", "Not a directory (os error 20)"),
    ] {
        let expected = format!("--out {out}: {why}");
        refused(&scratch, &[&asked[..], &["--out", out]].concat(), &expected);
    }
    // An unwritable directory is refused before anything is computed.
    let ended = launch(scratch.launcher(&[&asked[..], &["--out", "/proc/none"]].concat()));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.error().ends_with("; try --out"), "{}", ended.stderr);
    assert!(before == files(&scratch.run_dir()));
}

#[test]
fn keys_outside_of_the_evaluation_are_refused() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    let before = files(&scratch.run_dir());
    let foreign = "expected a key of [eval], found one that would make it another run";
    for command in ["eval", "figures"] {
        for (set, expected) in [
            ("train.steps=3", format!("--set train.steps: {foreign}")),
            ("seed=3", format!("--set seed: {foreign}")),
            (
                "evaluation.batches=3",
                format!("--set evaluation.batches: {foreign}"),
            ),
            (
                "eval.batchs=3",
                "--set eval.batchs: unknown key `batchs` in [eval]; did you mean `batches`?"
                    .to_owned(),
            ),
            (
                "eval.batches=0",
                "--set eval.batches: expected a whole number of at least 1, found 0".to_owned(),
            ),
            (
                "eval",
                "--set eval: expected KEY=VALUE, such as train.steps=100".to_owned(),
            ),
        ] {
            refused(&scratch, &[command, "runs/x", "--set", set], &expected);
        }
        refused(
            &scratch,
            &[command, "runs/x", "--data", "data/val"],
            "--data data/val: expected a target that reads tokens, found one that reads features, which are generated; \
             `--set eval.batches` makes more",
        );
        refused(
            &scratch,
            &[command, "runs/none"],
            "runs/none: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
        );
    }
    assert!(before == files(&scratch.run_dir()));
    assert!(!scratch.run_dir().join("evaluations").exists());
}

#[test]
fn a_language_model_is_evaluated_on_other_text_and_shows_more_components() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &["eval.components=3"]);
    // With the run's settings, its row and its components are the same.
    let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
    let last = rows.lines().rfind(|row| row.contains("\"kind\":\"eval\""));
    let again = done(&scratch, &["eval", "runs/x", "--json"]);
    assert_eq!(again.stdout.trim_end(), last.unwrap());
    let [drawn, own] = ["evaluations/step-00000002", ""].map(|place| {
        let place = scratch.run_dir().join(place);
        fs::read(place.join("figures/step-00000002/components.json")).unwrap()
    });
    assert!(drawn == own);
    tokenize(
        &scratch,
        "QUITE OTHER WORDS, IN CAPITALS AND 0123456789\n",
        "data/other",
    );
    let other = ["--data", "data/other/val", "--set", "eval.components=7"];
    done(&scratch, &[&["eval", "runs/x"], &other[..]].concat());
    let place = other_place(&scratch);
    let components = fs::read(place.join("figures/step-00000002/components.json")).unwrap();
    let shown: Value = serde_json::from_slice(&components).unwrap();
    for site in shown["sites"].as_array().unwrap() {
        let components = site["components"].as_array().unwrap();
        assert_eq!(components.len(), 7);
        for context in components[0]["contexts"].as_array().unwrap() {
            let tokens: Vec<String> = serde_json::from_value(context["tokens"].clone()).unwrap();
            assert_eq!(tokens.concat(), tokens.concat().to_uppercase());
        }
    }
    let about = fs::read_to_string(place.join("evaluated.json")).unwrap();
    assert!(
        about.contains("\"step\":2") && about.contains("data.eval: "),
        "{about}"
    );

    // Another tokenizer's ids are refused, and so is a path that is not a dataset.
    let refused = |data: &str, expected: &str| {
        refused(&scratch, &["eval", "runs/x", "--data", data], expected);
    };
    refused("data/none", "--data data/none: no such dataset");
    refused(
        "data/other",
        "--data data/other: expected a dataset, found a directory of some; give one, like data/other/val",
    );
    let index = scratch.path().join("data/other/val/index.json");
    let text = fs::read_to_string(&index).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        fs::write(&index, text.replace(from, to)).unwrap();
    };
    changed("\"vocab_size\": 256", "\"vocab_size\": 300");
    refused(
        "data/other/val",
        "data/other/val: made for 300 tokens, the target has 256; tokenize with the tokenizer of data/shakespeare/train",
    );
    let hash = "0123456789abcdef0123456789abcdef";
    let file = format!("\"kind\": \"file\", \"name\": \"t.json\", \"xxh3\": \"{hash}\"");
    changed("\"kind\": \"bytes\"", &file);
    refused(
        "data/other/val",
        &format!(
            "data/other/val: made by t.json of the hash {hash}, data/shakespeare/train by bytes as ids; tokenize both with one \
             tokenizer"
        ),
    );
}

#[test]
fn a_running_run_can_be_evaluated() {
    let scratch = Scratch::new();
    let set = [&TOY[..], &["train.steps=100000000", "checkpoint.every=5"]].concat();
    let mut run = scratch.real("tms_5-2-id.toml", "runs/x", &set);
    run.args(["--threads", "1"]);
    let run = start(run);
    wait_until_it_trains(&scratch.run_dir());
    let saved = || {
        let dir = scratch.run_dir().join("checkpoints");
        dir.is_dir() && names(&dir).iter().any(|name| name.starts_with("step-"))
    };
    while !saved() {
        assert!(
            !is_gone(run.id()),
            "the run ended before its first checkpoint"
        );
        thread::sleep(Duration::from_millis(5));
    }
    done(&scratch, &["eval", "runs/x", "--threads", "1"]);
    done(
        &scratch,
        &[
            "figures",
            "runs/x",
            "--set",
            "eval.batches=3",
            "--threads",
            "1",
        ],
    );
    // Only the run itself writes its figures.
    let ended = launch(scratch.launcher(&["figures", "runs/x"]));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("runs/x/lock: held by process "),
        "{}",
        ended.stderr
    );
    send(run.id(), Signal::TERM);
    let ended = end(run);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
}

#[test]
fn a_damaged_checkpoint_is_named_and_not_renamed() {
    let scratch = Scratch::new();
    toy(&scratch, &["checkpoint.every=6", "checkpoint.keep=2"]);
    let newest = scratch.run_dir().join("checkpoints/step-00000012");
    let tensors = newest.join("tensors.safetensors");
    let mut bytes = fs::read(&tensors).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&tensors, bytes).unwrap();
    let ended = done(&scratch, &["eval", "runs/x"]);
    assert!(
        ended
            .stderr
            .starts_with("runs/x/checkpoints/step-00000012: tensor `"),
        "{}",
        ended.stderr
    );
    assert!(
        ended
            .stderr
            .ends_with("; step 6 is the newest that holds\n"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stdout.contains("tms_5-2-id: step 6, seed 0\n"),
        "{}",
        ended.stdout
    );
    assert!(newest.is_dir());
}
