//! Runs that earlier versions wrote are resumed, and read by every command.
//!
//! `tests/runs-of/VERSION` holds those of a version. A new version adds its own, once, when it is
//! released: `launcher/tests/runs-of/make VERSION`. The test finds them by itself.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::scratch::{Scratch, launch, names};

/// Of a loss, relative: another processor rounds otherwise, by far less.
const TOLERANCE: f64 = 1e-3;

const RUNS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/runs-of");

/// The output of a command that succeeds.
fn told(scratch: &Scratch, command: &str) -> String {
    let arguments: Vec<&str> = command.split(' ').collect();
    let ended = launch(scratch.launcher(&arguments));
    assert_eq!(ended.code, Some(0), "{command}: {}", ended.stderr);
    ended.stdout
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn runs_of_earlier_versions_are_read_and_go_on() {
    let mut versions = names(Path::new(RUNS));
    versions.retain(|name| name != "make");
    assert!(versions.contains(&"0.1.0".to_owned()), "{versions:?}");
    for version in versions {
        let scratch = Scratch::new();
        let copy = format!("cp -r {RUNS}/{version}/. . && cp -r words copy");
        assert!(scratch.shell(&copy).status().unwrap().success());
        every_command_reads(&scratch);
        the_language_model_is_finished(&scratch);
        the_toy_goes_on(&scratch);
    }
}

fn every_command_reads(scratch: &Scratch) {
    let commands = [
        ("runs .", "./words  done "),
        ("inspect text/train", "intact: all hashes match"),
        (
            "inspect toy/checkpoints/step-00000006",
            "intact: all hashes match",
        ),
        (
            "inspect words/checkpoints/step-00000004",
            "intact: all hashes match",
        ),
        ("tail words -n 1", "ce/ci_masked "),
        ("report words toy --out page.html", ""),
        ("figures words", "words/figures/step-00000004\n"),
        ("export words --out of-words", "model_4.pth\n"),
        ("export toy --out of-toy", "model_6.pth\n"),
        ("compare words copy", "12  100.0 %       1.0000"),
        ("probe words text", "words, step 4: 4 tokens\n"),
        ("ablate words --remove *.c_fc:3", "CE of the next token"),
        (
            "harvest words/harvests/all --merge --out merged",
            "in merged\n",
        ),
    ];
    for (command, expected) in commands {
        let said = told(scratch, command);
        assert!(said.contains(expected), "{command}: {said}");
    }
    let page = fs::read_to_string(scratch.path().join("page.html")).unwrap();
    assert!(page.contains("transformer.h.0.mlp.c_fc"));
    let [all, merged] = ["words/harvests/all", "merged"]
        .map(|dir| json(&scratch.path().join(dir).join("harvest.json")));
    assert_eq!(all["positions"], merged["positions"]);
    assert_eq!(all["setup"], merged["setup"]);

    let said = told(scratch, "eval words --out evaluated --json");
    let evaluated: Value = serde_json::from_str(&said).unwrap();
    let rows = fs::read_to_string(scratch.path().join("words/metrics.jsonl")).unwrap();
    let row: Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
    for name in ["eval/ce/target", "eval/ce/ci_masked", "eval/kl/unmasked"] {
        let [new, old] = [&evaluated, &row].map(|row| row[name].as_f64().unwrap());
        assert!((new / old - 1.0).abs() < TOLERANCE, "{name}: {new}, {old}");
    }
}

fn the_language_model_is_finished(scratch: &Scratch) {
    let said = told(scratch, "words/config.toml --out words");
    assert!(said.contains("\nshakespeare: 4 steps, seed 0\n"), "{said}");
    let harvest = "harvest words --out words/harvests/all --tokens 320 --examples 3 --removals 2";
    let said = told(scratch, harvest);
    assert_eq!(
        said,
        "the harvest of step 4 is in words/harvests/all already\n"
    );
}

fn the_toy_goes_on(scratch: &Scratch) {
    let toy = scratch.path().join("toy");
    let meta = json(&toy.join("checkpoints/step-00000006/meta.json"));
    let kept = usize::try_from(meta["metrics"]["offset"].as_u64().unwrap()).unwrap();
    let before = fs::read(toy.join("metrics.jsonl")).unwrap();
    let plan = told(scratch, "toy/config.toml --out toy");
    assert!(plan.contains("toy (continued from step 6)"), "{plan}");
    let after = fs::read(toy.join("metrics.jsonl")).unwrap();
    assert!(kept > 0 && after[..kept] == before[..kept]);
    let steps = |rows: &[u8]| {
        let rows = rows
            .split(|&byte| byte == b'\n')
            .filter(|row| !row.is_empty());
        let row = |row| serde_json::from_slice::<Value>(row).unwrap();
        let steps = rows.map(|bytes| row(bytes)["step"].as_u64().unwrap());
        steps.collect::<Vec<_>>()
    };
    assert_eq!(steps(&after), steps(&before));
    let starts = fs::read_to_string(toy.join("starts.jsonl")).unwrap();
    assert_eq!(starts.lines().count(), 2, "{starts}");
}
