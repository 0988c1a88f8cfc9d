//! `spd-launch harvest`: the same files by any number of ranks, from shards and after kills; and
//! refusals.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use rustix::process::Signal;
use serde_json::Value;

use crate::scratch::{Scratch, end, launch, names, send, start, wait_until};
use crate::small_run::{TEXT, language_model, tokenize, toy};

const FILES: [&str; 8] = [
    "components.parquet",
    "details.jsonl",
    "examples.parquet",
    "harvest.json",
    "harvest.safetensors",
    "list.jsonl",
    "pairs.parquet",
    "tokens.parquet",
];

fn harvest(scratch: &Scratch, arguments: &[&str]) -> String {
    let arguments = [&["harvest"], arguments].concat();
    let ended = launch(scratch.launcher(&arguments));
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
    ended.stdout
}

fn refused(scratch: &Scratch, arguments: &[&str], expected: &str) {
    let arguments = [&["harvest"], arguments].concat();
    let ended = launch(scratch.launcher(&arguments));
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout.as_str()),
        (Some(2), format!("error: {expected}\n").as_str(), ""),
        "{arguments:?}"
    );
}

/// The files of a harvest, which has no others but its lock.
fn files(scratch: &Scratch, dir: &str) -> Vec<Vec<u8>> {
    let dir = scratch.path().join(dir);
    let mut found = names(&dir);
    found.retain(|name| name != "lock");
    found.sort();
    assert_eq!(found, FILES);
    FILES.map(|name| fs::read(dir.join(name)).unwrap()).to_vec()
}

/// A run of few components on some six parts of text.
fn run(scratch: &Scratch) {
    tokenize(scratch, &TEXT.repeat(10), "data/shakespeare");
    let sites = "decomposition.sites=[{pattern=\"*.mlp.*\",C=24},{pattern=\"*.c_attn\",C=16}]";
    language_model(scratch, "runs/x", &[sites]);
}

#[test]
fn any_number_of_ranks_and_shards_and_kills_give_the_same_files() {
    let scratch = Scratch::new();
    run(&scratch);
    let few = ["runs/x", "--examples", "20", "--removals", "2"];
    let said = harvest(&scratch, &[&few[..], &["--out", "one"]].concat());
    assert!(said.ends_with("; the tables are in one\n"), "{said}");
    let whole = files(&scratch, "one");
    let about: Value = serde_json::from_slice(&whole[3]).unwrap();
    assert_eq!(about["parts"], serde_json::json!([6, 6]), "{about}");
    assert_eq!(about["format"], 1);
    for ranks in ["2", "4"] {
        let asked = ["--cpus", ranks, "--threads", "2", "--out", ranks];
        let [run, few @ ..] = few;
        harvest(&scratch, &[&few[..], &asked, &["--", run]].concat());
        assert!(files(&scratch, ranks) == whole, "{ranks} ranks");
    }
    for shard in ["0/2", "1/2"] {
        let out = shard.replace('/', "-");
        harvest(
            &scratch,
            &[&few[..], &["--shard", shard, "--out", &out]].concat(),
        );
    }
    harvest(&scratch, &["1-2", "0-2", "--merge", "--out", "merged"]);
    assert!(files(&scratch, "merged") == whole, "merged shards");

    // Killed whenever it has saved more, by other numbers of ranks, until it ends by itself.
    let dir = scratch.path().join("killed");
    let mut kills = 0;
    for ranks in ["1", "2", "1", "3", "2", "1", "1"] {
        let asked = ["--out", "killed", "--save-seconds", "0", "--cpus", ranks];
        let mut running = start(scratch.launcher(&[&["harvest"], &few[..], &asked].concat()));
        let size = || {
            let counts = fs::read_dir(&dir).into_iter().flatten().flatten();
            let counts = counts.filter(|entry| entry.file_name() != "lock");
            counts
                .filter_map(|entry| Some(entry.metadata().ok()?.len()))
                .sum::<u64>()
        };
        let before = size();
        let mut ended = false;
        wait_until("more is saved", || {
            ended = running.try_wait().unwrap().is_some();
            ended || size() != before
        });
        send(running.id(), Signal::KILL);
        let code = end(running).code;
        kills += usize::from(code.is_none());
        if dir.join("harvest.json").is_file() {
            break;
        }
    }
    assert!(kills > 0, "it ended before it was killed");
    harvest(&scratch, &[&few[..], &["--out", "killed"]].concat());
    assert!(files(&scratch, "killed") == whole, "after {kills} kills");

    let said = harvest(&scratch, &[&few[..], &["--out", "one"]].concat());
    assert_eq!(said, "the harvest of step 2 is in one already\n");
}

#[test]
fn other_text_is_added_and_the_same_text_is_not_counted_twice() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &[]);
    tokenize(
        &scratch,
        "another text, of other words; it is read too. ",
        "other",
    );
    let few = ["--examples", "5", "--removals", "0", "--no-pairs"];
    harvest(&scratch, &[&["runs/x"], &few[..]].concat());
    let of_run = names(&scratch.run_dir().join("harvests"));
    let [own] = of_run.as_slice() else {
        panic!("{of_run:?}");
    };
    assert!(own.starts_with("step-00000002-"), "{own}");
    let own = format!("runs/x/harvests/{own}");
    // A component is active without an example of it too.
    let none = [
        "runs/x",
        "--tokens",
        "64",
        "--examples",
        "0",
        "--out",
        "few",
    ];
    let said = harvest(&scratch, &none);
    assert!(!said.starts_with("0 of "), "{said}");
    let asked = ["runs/x", "--data", "other/val", "--out", "other-text"];
    harvest(&scratch, &[&asked, &few[..]].concat());
    harvest(&scratch, &[&own, "other-text", "--merge", "--out", "both"]);
    let positions = |dir: &str| {
        let text = fs::read(scratch.path().join(dir).join("harvest.json")).unwrap();
        let about: Value = serde_json::from_slice(&text).unwrap();
        (
            about["positions"].as_u64().unwrap(),
            about["datasets"].as_array().unwrap().len(),
        )
    };
    let [one, other] = [own.as_str(), "other-text"].map(positions);
    assert_eq!(positions("both"), (one.0 + other.0, 2));
    assert!(!scratch.path().join("both/pairs.parquet").exists());
    refused(
        &scratch,
        &[&own, "both", "--merge", "--out", "twice"],
        "both: counts rows that another of the harvests counts too; merge shards, or other datasets",
    );
    refused(
        &scratch,
        &[&own, "data", "--merge", "--out", "twice"],
        "data: expected a harvest, found no harvest.safetensors; run `spd-launch harvest` to its end first",
    );
    assert!(!scratch.path().join("twice").exists());
    refused(
        &scratch,
        &["runs/x", "--examples", "6", "--out", "other-text"],
        "other-text/harvest.safetensors: belongs to a harvest of another checkpoint, other text or other settings; give another \
         directory with --out",
    );
    refused(
        &scratch,
        &["runs/x", "--out", "data"],
        "data: holds shakespeare, which is of no harvest; give the name of a new directory with --out",
    );
    refused(
        &scratch,
        &["runs/x", "--out", "/proc/x"],
        "/proc/x: cannot be made: No such file or directory (os error 2); give another directory with --out",
    );
    refused(
        &scratch,
        &["data"],
        "data: holds no config.toml, so it is no run directory; give one, like runs/shakespeare",
    );
    refused(
        &scratch,
        &["runs/x", "runs/x"],
        "harvest: expected one run, found several; --merge adds up harvests",
    );
    // One flipped bit.
    let path = scratch.path().join("both/harvest.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    refused(
        &scratch,
        &["both", "other-text", "--merge", "--out", "twice"],
        "both/harvest.safetensors: expected the counts of a harvest, found other bytes than were written; remove it, and harvest \
         again",
    );
}

#[test]
fn a_toy_is_refused() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    refused(
        &scratch,
        &["runs/x"],
        "runs/x: expected a language model, found a target that reads features; its figures show all of its components",
    );
    assert!(!scratch.run_dir().join("harvests").exists());
}
