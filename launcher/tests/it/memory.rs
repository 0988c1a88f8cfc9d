//! Memory: planned, measured, and refused if it is not enough.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;

use crate::scratch::{Scratch, end, launch, start};

/// Every shipped size, and every feature once.
const SHORT: [&str; 6] = [
    "train.steps=1",
    "train.faithfulness_warmup.steps=1",
    "target.train.steps=1",
    "eval.batches=1",
    "checkpoint.every=1",
    "log.every=1",
];

/// Maximum relative difference between planned and measured memory.
const TOLERANCE: f64 = 0.1;

/// Bytes of any difference that allocators may keep, or have kept before: of the smallest runs they
/// are more than that.
const ALLOCATORS: f64 = (1 << 20) as f64;

#[test]
fn shipped_runs_use_the_planned_memory() {
    let scratch = Scratch::new();
    fs::write(
        scratch.path().join("text.txt"),
        "some text to be read byte by byte, over and over\n".repeat(400),
    )
    .unwrap();
    let text = [
        "tokenize",
        "text.txt",
        "--tokenizer",
        "bytes",
        "--out",
        "data/shakespeare",
    ];
    assert_eq!(launch(scratch.launcher(&text)).code, Some(0));
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut shipped: Vec<String> = fs::read_dir(&configs)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".toml") && name != "Cargo.toml")
        // Third-party weights are not available here.
        .filter(|name| {
            !fs::read_to_string(configs.join(name))
                .unwrap()
                .contains("\nweights = ")
        })
        // It is for a GPU: a step takes minutes on two cores.
        .filter(|name| name != "nmgpt-shakespeare.toml")
        .collect();
    shipped.sort();
    let mut told = Vec::new();
    let mut wrong = false;
    for config in &shipped {
        for threads in ["1", "2"] {
            let out = format!("runs/{config}-{threads}");
            let mut command = scratch.real(config, &out, &SHORT);
            command.args(["--threads", threads]);
            // The largest take their time.
            let ended = end(start(command));
            assert_eq!(ended.code, Some(0), "{config}: {}", ended.stderr);
            let summary = fs::read(scratch.path().join(&out).join("summary.json")).unwrap();
            let summary: serde_json::Value = serde_json::from_slice(&summary).unwrap();
            let bytes = |name: &str| summary["values"][name].as_f64().unwrap();
            let (planned, most) = (bytes("memory/planned_bytes"), bytes("memory/most_bytes"));
            wrong |= (most - planned).abs() > ALLOCATORS.max(TOLERANCE * planned);
            told.push(format!(
                "{config}, {threads} threads: {:.2} MiB planned, {:.2} measured ({:+.1} %)",
                planned / f64::from(1 << 20),
                most / f64::from(1 << 20),
                100.0 * (most / planned - 1.0)
            ));
        }
    }
    println!("{}", told.join("\n"));
    assert!(!wrong, "{}", told.join("\n"));
}

#[test]
fn a_run_beyond_the_memory_is_refused_with_advice() {
    let scratch = Scratch::new();
    for arguments in [&[][..], &["--dry-run"], &["--seeds", "0..2"]] {
        let mut command = scratch.real("tms_5-2.toml", "runs/x", &["train.batch_size=65536"]);
        command
            .args(["--threads", "1", "--memory", "10MiB"])
            .args(arguments);
        let ended = launch(command);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.starts_with("error: the run needs ")
                && ended
                    .stderr
                    .contains(" of memory, and 10.00 MiB are available; --set ")
                && ended.stderr.contains(" reduces it most, to ")
                && ended.stderr.lines().count() == 1,
            "{}",
            ended.stderr
        );
        assert!(scratch.names().is_empty(), "nothing is created");
    }
}

// With memory between what the run needs when it keeps intermediates and when it makes them again.
#[test]
fn a_run_that_does_not_fit_makes_intermediates_again() {
    let scratch = Scratch::new();
    let dry_run = |set: &[&str], memory: &str| {
        let mut command = scratch.real("resid_mlp2.toml", "runs/x", set);
        command.args(["--threads", "1", "--dry-run", "--memory", memory]);
        launch(command)
    };
    let planned = |plan: &str| -> f64 {
        let line = plan.lines().find(|line| line.contains(" memory "));
        let line = line.unwrap_or_else(|| panic!("{plan}"));
        let mut words = line.split_whitespace().skip(1);
        let size = words.next().unwrap().parse::<f64>().unwrap();
        assert_eq!(words.next(), Some("MiB"), "{plan}");
        size
    };
    let [kept, again] = ["never", "always"].map(|word| {
        let ended = dry_run(&[&format!("train.recompute={word}")], "20GiB");
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        planned(&ended.stdout)
    });
    assert!(again < 0.9 * kept, "{again} of {kept} MiB");
    let between = format!("{}k", (512.0 * (kept + again)).round());
    let fits = dry_run(&[], &between);
    assert_eq!(fits.code, Some(0), "{}", fits.stderr);
    assert!(fits.stdout.contains("  recompute   "), "{}", fits.stdout);
    assert!(
        (planned(&fits.stdout) - again).abs() < 0.01,
        "{}",
        fits.stdout
    );
    let refused = dry_run(&["train.recompute=never"], &between);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
}

#[test]
fn an_absurd_size_is_refused_without_allocating() {
    let scratch = Scratch::new();
    let set = [
        "train.batch_size=4000000000",
        "decomposition.sites.0.C=4000000000",
    ];
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &set));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.starts_with("error: the run needs ") && ended.stderr.lines().count() == 1,
        "{}",
        ended.stderr
    );
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &["train.batch_size=4300000000"]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: --set train.batch_size: expected a whole number of at most 4294967295, found 4300000000\n"
        )
    );
    assert!(scratch.names().is_empty(), "nothing is created");
}

#[test]
fn runs_that_do_not_fit_together_run_in_sequence() {
    let scratch = Scratch::new();
    let arguments = ["--seeds", "0..2", "--threads", "2", "--memory", "8MiB"];
    let mut command = scratch.real("tms_5-2.toml", "runs/x", &[]);
    command.args(arguments).arg("--dry-run");
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .starts_with("1 at a time instead of 2: more do not fit in memory\n"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stdout.contains("; 1 at a time, 2 threads each"),
        "{}",
        ended.stdout
    );
}

#[test]
fn an_invalid_size_is_refused() {
    let ended = launch(Scratch::new().run("done", &["--memory", "lots"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("expected a size like 4GiB or 512MiB"),
        "{}",
        ended.stderr
    );
}
