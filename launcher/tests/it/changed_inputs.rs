//! A run goes on with what it began with, or not at all: the same command after its data, its target, its checkpoints or
//! its files were changed.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, Mode, mkfifoat};

use crate::scratch::{Ended, Scratch, launch, names};

const TOY: [&str; 11] = [
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

const LANGUAGE_MODEL: [&str; 16] = [
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

fn toy(scratch: &Scratch) -> Command {
    scratch.real("tms_5-2.toml", "runs/x", &TOY)
}

fn language_model(scratch: &Scratch) -> Command {
    scratch.real("shakespeare.toml", "runs/x", &LANGUAGE_MODEL)
}

/// Makes a dataset from a repeated word.
fn tokenize(scratch: &Scratch, word: &str, out: &str) {
    let text: String = (0..2000)
        .map(|line| format!("{word} {line} of {}\n", line * line % 97))
        .collect();
    fs::write(scratch.path().join("text.txt"), text).unwrap();
    let made =
        launch(scratch.launcher(&["tokenize", "text.txt", "--tokenizer", "bytes", "--out", out]));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
}

/// Leaves a run as after a kill between steps 20 and 40.
fn interrupted(scratch: &Scratch, command: Command) {
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let run_dir = scratch.run_dir();
    fs::remove_file(run_dir.join("summary.json")).unwrap();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000040")).unwrap();
}

/// Every file below a directory, with its bytes.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
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
fn refused(scratch: &Scratch, command: impl Fn() -> Command) -> String {
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

fn targets(scratch: &Scratch) -> BTreeMap<PathBuf, Vec<u8>> {
    files(&scratch.path().join("cache/targets"))
}

/// The file of the only target in the cache.
fn target(scratch: &Scratch) -> PathBuf {
    let all = scratch.path().join("cache/targets");
    let [only] = names(&all).try_into().unwrap();
    all.join(only).join("target.safetensors")
}

fn goes_on(command: Command) -> Ended {
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

/// The last checkpoint and the rows of a run.
fn remains(scratch: &Scratch) -> [Vec<u8>; 2] {
    [
        "checkpoints/step-00000040/tensors.safetensors",
        "metrics.jsonl",
    ]
    .map(|name| fs::read(scratch.run_dir().join(name)).unwrap())
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// A line without its hashes.
fn without_hashes(line: &str) -> String {
    let is_hash = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let words = line.split_inclusive([' ', ',', ';', ')']);
    words
        .map(|word| match word.split_at_checked(32) {
            Some((hash, rest)) if is_hash(hash) => format!("HASH{rest}"),
            _ => word.to_owned(),
        })
        .collect()
}

#[test]
fn a_changed_dataset_is_refused_before_a_target_is_trained() {
    let scratch = Scratch::new();
    tokenize(&scratch, "line", "data/shakespeare");
    tokenize(&scratch, "verse", "data/other");
    goes_on(language_model(&scratch));
    let straight = remains(&scratch);
    let run_dir = scratch.run_dir();
    fs::remove_file(run_dir.join("summary.json")).unwrap();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000040")).unwrap();
    let data = |name: &str| scratch.path().join("data").join(name);
    for (part, used) in [("train", "trained"), ("val", "evaluated")] {
        let own = data(&format!("shakespeare/{part}"));
        fs::rename(&own, data("own")).unwrap();
        fs::rename(data(&format!("other/{part}")), &own).unwrap();
        assert_eq!(
            without_hashes(&refused(&scratch, || language_model(&scratch))),
            format!(
                "data/shakespeare/{part}: not the dataset that the run was {used} on: its index.json has the hash \
                 HASH, the checkpoint of step 20 says HASH; put that one back, or start over with --fresh or --out"
            )
        );
        // A rank that is started by hand refuses with the same message.
        let ended = launch(scratch.launcher(&["rank", "--run-dir", "runs/x", "--threads", "1"]));
        assert_eq!(ended.code, Some(2));
        assert!(
            ended
                .error()
                .contains(&format!(": not the dataset that the run was {used} on: ")),
            "{}",
            ended.stderr
        );
        fs::rename(&own, data(&format!("other/{part}"))).unwrap();
        fs::rename(data("own"), &own).unwrap();
    }
    let ended = goes_on(language_model(&scratch));
    assert!(
        ended.stdout.contains("runs/x (continued from step 20)"),
        "{}",
        ended.stdout
    );
    assert!(remains(&scratch) == straight);
}

#[test]
fn a_flipped_bit_in_a_shard_is_found_at_start_and_resume() {
    let scratch = Scratch::new();
    tokenize(&scratch, "line", "data/shakespeare");
    let shard = scratch
        .path()
        .join("data/shakespeare/val/tokens-00000.safetensors");
    let expected = "data/shakespeare/val/tokens-00000.safetensors: its tokens hash to HASH, index.json promises HASH; \
                    copy it again, or tokenize again";
    flip(&shard);
    let ended = launch(language_model(&scratch));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert_eq!(without_hashes(ended.error()), expected);
    assert!(!scratch.run_dir().try_exists().unwrap());
    flip(&shard);
    interrupted(&scratch, language_model(&scratch));
    flip(&shard);
    let error = refused(&scratch, || language_model(&scratch));
    assert_eq!(without_hashes(&error), expected);
    flip(&shard);
    goes_on(language_model(&scratch));
}

#[test]
fn an_unwritable_cache_only_disables_caching() {
    let scratch = Scratch::new();
    tokenize(&scratch, "line", "data/shakespeare");
    let blocked = scratch.path().join("blocked");
    fs::create_dir(&blocked).unwrap();
    fs::write(blocked.join("datasets"), "").unwrap();
    let mut command = language_model(&scratch);
    command.arg("--dry-run").env("SPD_CACHE", &blocked);
    goes_on(command);
    let mut command = language_model(&scratch);
    command.arg("--dry-run");
    goes_on(command);
    let records = scratch.path().join("cache/datasets");
    assert_eq!(names(&records).len(), 2, "one of each dataset");
    // An invalid record is written again.
    for name in names(&records) {
        fs::write(records.join(name), "{").unwrap();
    }
    let mut command = language_model(&scratch);
    command.arg("--dry-run");
    goes_on(command);
    for name in names(&records) {
        let text = fs::read_to_string(records.join(name)).unwrap();
        assert!(text.contains("tokens-00000.safetensors"), "{text}");
    }
}

/// A change of a file.
type Damage<'a> = &'a dyn Fn(&Path);

#[test]
fn a_damaged_cached_target_is_reported_and_trained_again() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let (path, straight) = (target(&scratch), remains(&scratch));
    let whole = fs::read(&path).unwrap();
    let header = String::from_utf8_lossy(&whole).into_owned();
    let unsigned = header.find("xxh3_128").unwrap();
    let damages: [(&str, Damage<'_>); 5] = [
        (
            "target.safetensors: its weights have the hash HASH, it promises HASH",
            &|path| {
                let mut bytes = fs::read(path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(path, bytes).unwrap();
            },
        ),
        ("target.safetensors: not a safetensors file: ", &|path| {
            fs::write(path, &whole[..whole.len() - 9]).unwrap();
        }),
        ("target.safetensors: not a safetensors file: ", &|path| {
            fs::write(path, "").unwrap();
        }),
        (
            "target.safetensors: it promises no hash of its weights",
            &|path| {
                let mut bytes = whole.clone();
                bytes[unsigned] = b'X';
                fs::write(path, bytes).unwrap();
            },
        ),
        ("target.safetensors: ", &|path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
    ];
    for (reason, damage) in damages {
        damage(&path);
        assert!(told_to_be_trained_again(&scratch, &path).starts_with(reason));
        assert!(fs::read(&path).unwrap() == whole, "{reason}");
        assert!(remains(&scratch) == straight, "{reason}");
    }
}

/// Runs the toy again beside a damaged target; returns the reported damage.
fn told_to_be_trained_again(scratch: &Scratch, path: &Path) -> String {
    let entry = path.parent().unwrap();
    let aside = PathBuf::from(format!("{}.bad", entry.display()));
    let before = fs::symlink_metadata(entry).unwrap();
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    let ended = goes_on(toy(scratch));
    assert!(
        ended.stdout.contains("to be made again ("),
        "{}",
        ended.stdout
    );
    let told = without_hashes(&ended.stderr);
    let begin = format!("step 0: the cached target {} is damaged: ", entry.display());
    let end = format!("; it is set aside as {} and trained again", aside.display());
    let mut said = told
        .lines()
        .filter_map(|line| line.strip_prefix(&begin)?.strip_suffix(&end));
    let why = said.next().unwrap_or_else(|| panic!("{told}")).to_owned();
    assert_eq!(said.next(), None, "{told}");
    assert_eq!(fs::symlink_metadata(&aside).unwrap().ino(), before.ino());
    if before.is_dir() {
        fs::remove_dir_all(aside).unwrap();
    } else {
        fs::remove_file(aside).unwrap();
    }
    why
}

#[test]
fn anything_in_the_place_of_a_cached_target_is_replaced() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let (path, straight) = (target(&scratch), remains(&scratch));
    let whole = fs::read(&path).unwrap();
    let entry = path.parent().unwrap();
    let pipe = |at: &Path| mkfifoat(CWD, at, Mode::RWXU).unwrap();
    let kinds: [(&str, Damage<'_>); 4] = [
        ("a directory", &|at| fs::create_dir(at).unwrap()),
        ("a named pipe", &pipe),
        ("a link that leads nowhere", &|at| {
            symlink("nowhere", at).unwrap();
        }),
        ("a file", &|at| fs::write(at, "").unwrap()),
    ];
    let files = [
        "lock",
        "metrics.jsonl",
        "metrics.times",
        "starts.jsonl",
        "system.jsonl",
        "saved.json",
    ];
    let places = files.map(|name| (name, &kinds[..3]));
    let places = places
        .into_iter()
        .chain([("", &kinds[1..]), ("checkpoints", &kinds[1..])]);
    for (name, kinds) in places {
        for (kind, put) in kinds {
            fs::remove_file(&path).unwrap();
            let at = if name.is_empty() {
                entry.to_owned()
            } else {
                entry.join(name)
            };
            if at.is_dir() {
                fs::remove_dir_all(&at).unwrap();
            } else {
                fs::remove_file(&at).unwrap();
            }
            put(&at);
            let why = told_to_be_trained_again(&scratch, &path);
            let what = if name.is_empty() { "it" } else { name };
            assert_eq!(why, format!("{what} is {kind}"));
            assert!(fs::read(&path).unwrap() == whole, "{why}");
            assert!(remains(&scratch) == straight, "{why}");
        }
    }
    // Both at once, each of which is repaired alone.
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    flip(&entry.join("starts.jsonl"));
    let why = told_to_be_trained_again(&scratch, &path);
    assert!(
        why.starts_with("target.safetensors: not a safetensors file: "),
        "{why}"
    );
    assert!(remains(&scratch) == straight);
}

#[test]
fn a_target_with_a_damaged_checkpoint_is_reported_and_trained_again() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let path = target(&scratch);
    let whole = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let checkpoints = path.parent().unwrap().join("checkpoints");
    flip(&checkpoints.join("step-00000020/tensors.safetensors"));
    flip(&path.parent().unwrap().join("metrics.jsonl"));
    let ended = goes_on(toy(&scratch));
    let word = format!(
        "step 0: no checkpoint is left in {}; it is trained again",
        checkpoints.display()
    );
    assert!(
        ended.stderr.contains("step 0: checkpoint set aside as ") && ended.stderr.contains(&word),
        "{}",
        ended.stderr
    );
    assert!(fs::read(&path).unwrap() == whole);

    // Damaged rows lose only rows.
    fs::remove_file(&path).unwrap();
    flip(&path.parent().unwrap().join("metrics.jsonl"));
    fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
    let ended = goes_on(toy(&scratch));
    assert!(
        ended
            .stderr
            .contains("/metrics.jsonl: not the rows that the checkpoint saw; "),
        "{}",
        ended.stderr
    );
    assert!(fs::read(&path).unwrap() == whole);
}

#[test]
fn a_changed_target_is_refused() {
    let scratch = Scratch::new();
    let mut other = scratch.real("tms_5-2.toml", "runs/other", &TOY);
    other.args(["--set", "target.train.seed=7"]);
    goes_on(other);
    let others = target(&scratch);
    let moved = scratch.path().join("other.safetensors");
    fs::rename(&others, &moved).unwrap();
    fs::remove_dir_all(others.parent().unwrap()).unwrap();
    interrupted(&scratch, toy(&scratch));
    let path = target(&scratch);
    let own = fs::read(&path).unwrap();
    fs::copy(&moved, &path).unwrap();
    assert_eq!(
        without_hashes(&refused(&scratch, || toy(&scratch))),
        format!(
            "{}: not the target that the run takes apart: its weights have the hash HASH, the checkpoint of step 20 \
             says HASH; put that one back, or start over with --fresh or --out",
            path.display()
        )
    );
    // A missing target is trained again, to the same bits.
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    goes_on(toy(&scratch));
    assert!(fs::read(&path).unwrap() == own);
}

#[test]
fn a_run_that_lost_its_checkpoints_does_not_start_over() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let checkpoints = scratch.run_dir().join("checkpoints");
    flip(&checkpoints.join("step-00000020/tensors.safetensors"));
    assert_eq!(
        without_hashes(&refused(&scratch, || toy(&scratch))),
        "runs/x: no checkpoint is whole: runs/x/checkpoints/step-00000020: tensor `adamw.first._ci_fns.linear1.layers.2.W` \
         has the hash HASH, manifest.json promises HASH; put the checkpoints back, or start over with --fresh, which moves runs/x \
         aside, or with --out"
    );
    fs::remove_dir_all(&checkpoints).unwrap();
    let lost = "runs/x: it has saved checkpoints, the first of them after step 20, and runs/x/checkpoints holds none; put \
                the checkpoints back, or start over with --fresh, which moves runs/x aside, or with --out";
    assert_eq!(refused(&scratch, || toy(&scratch)), lost);
    let rows = fs::read(scratch.run_dir().join("metrics.jsonl")).unwrap();
    // Nor does a rank that is started by hand.
    let ended = launch(scratch.launcher(&["rank", "--run-dir", "runs/x", "--threads", "1"]));
    assert_eq!((ended.code, ended.error()), (Some(2), lost));
    assert_eq!(
        fs::read(scratch.run_dir().join("metrics.jsonl")).unwrap(),
        rows
    );
    let mut anew = toy(&scratch);
    anew.arg("--fresh");
    goes_on(anew);
    let old = scratch.path().join("runs/x.old-1/metrics.jsonl");
    assert_eq!(fs::read(old).unwrap(), rows);
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_over() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let run_dir = scratch.run_dir();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000020")).unwrap();
    fs::remove_file(run_dir.join("saved.json")).unwrap();
    let path = run_dir.join("metrics.jsonl");
    let rows = fs::read_to_string(&path).unwrap();
    let before = rows.split_inclusive('\n').take(3).collect::<String>();
    fs::write(&path, before).unwrap();
    let ended = goes_on(toy(&scratch));
    assert!(
        ended
            .stdout
            .contains("runs/x (begins again: no checkpoint was written yet)"),
        "{}",
        ended.stdout
    );
    assert!(!ended.stderr.contains("continued"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&path).unwrap(), rows);
}

#[test]
fn a_damaged_newest_checkpoint_loses_only_its_steps() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let straight = remains(&scratch);
    fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
    let checkpoints = scratch.run_dir().join("checkpoints");
    flip(&checkpoints.join("step-00000040/tensors.safetensors"));
    let ended = goes_on(toy(&scratch));
    assert!(
        ended.stdout.contains("runs/x (continued from step 20)"),
        "{}",
        ended.stdout
    );
    assert!(
        ended
            .stderr
            .contains("step 20: checkpoint set aside as runs/x/checkpoints/step-00000040.bad: "),
        "{}",
        ended.stderr
    );
    assert!(remains(&scratch) == straight);
}

#[test]
fn a_damaged_summary_is_written_again() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let straight = remains(&scratch);
    let path = scratch.run_dir().join("summary.json");
    let whole = fs::read_to_string(&path).unwrap();
    for (damage, why) in [
        (
            "",
            "is not JSON: EOF while parsing a value at line 1 column 0",
        ),
        ("{}", "does not have the form of a summary; was it edited?"),
        (&whole[..whole.len() / 2], "is not JSON: "),
    ] {
        fs::write(&path, damage).unwrap();
        let ended = goes_on(toy(&scratch));
        assert!(
            ended.stdout.contains("runs/x (continued from step 40)"),
            "{}",
            ended.stdout
        );
        let note = ended.stderr.lines().next().unwrap();
        assert!(
            note.starts_with(&format!("runs/x/summary.json: {why}"))
                && note.ends_with("; it is made again from the newest checkpoint"),
            "{note}"
        );
        assert!(remains(&scratch) == straight);
        let values = |text: &str| {
            let summary: serde_json::Value = serde_json::from_str(text).unwrap();
            summary["values"]["eval/faithfulness"].clone()
        };
        assert_eq!(values(&fs::read_to_string(&path).unwrap()), values(&whole));
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(
        refused(&scratch, || toy(&scratch)),
        "runs/x/summary.json: expected a file for the summary, found something else; move it away, and the same \
         command makes it again"
    );
}

#[test]
fn a_damaged_config_of_a_run_is_refused_with_a_remedy() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("config.toml");
    for (text, first) in [
        ("", "runs/x/config.toml:1:1: missing key `name`; "),
        ("name = \u{0}", "runs/x/config.toml:1:"),
    ] {
        fs::write(&path, text).unwrap();
        let error = refused(&scratch, || toy(&scratch));
        assert!(
            error.starts_with(first)
                && error.ends_with(
                    "; runs/x cannot be continued without its config.toml: put it back, or start over with --fresh, \
                     which moves runs/x aside, or with --out"
                ),
            "{error}"
        );
    }
    let mut anew = toy(&scratch);
    anew.arg("--fresh");
    goes_on(anew);
}

#[test]
fn a_resume_rewrites_the_shared_frozen_tensors() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let straight = remains(&scratch);
    let checkpoints = scratch.run_dir().join("checkpoints");
    let shared: Vec<String> = names(&checkpoints)
        .into_iter()
        .filter(|name| name.starts_with("frozen-"))
        .collect();
    let [shared] = shared.try_into().unwrap();
    let file = checkpoints.join(&shared);
    let whole = fs::read(&file).unwrap();
    let has_target = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("target_model.");
    assert!(has_target(&whole) && !has_target(&straight[0]));
    for damage in [flip, |path: &Path| fs::remove_file(path).unwrap()] {
        fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
        fs::remove_dir_all(checkpoints.join("step-00000040")).unwrap();
        damage(&file);
        for arguments in [
            vec!["figures", "runs/x"],
            vec!["export", "runs/x", "--out", "out"],
            vec!["inspect", "runs/x/checkpoints/step-00000020"],
        ] {
            let ended = launch(scratch.launcher(&arguments));
            let error = ended.error();
            assert!(
                ended.code == Some(2)
                    && error.starts_with(&format!("runs/x/checkpoints/{shared}: "))
                    && error
                        .ends_with("; put it back, or go on with the run, which writes it again"),
                "{arguments:?}: {error}"
            );
        }
        goes_on(toy(&scratch));
        assert!(remains(&scratch) == straight);
        assert!(fs::read(&file).unwrap() == whole);
        goes_on(scratch.launcher(&["figures", "runs/x"]));
        goes_on(scratch.launcher(&["export", "runs/x", "--out", "out"]));
    }
}

#[test]
fn formatting_of_a_run_file_does_not_matter() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let straight = remains(&scratch);
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    interrupted(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("# seed of the paper\n{text}\n")).unwrap();
    let figures = || scratch.launcher(&["figures", "runs/x"]);
    goes_on(figures());
    goes_on(toy(&scratch));
    assert!(remains(&scratch) == straight);
    assert_ne!(fs::read_to_string(&path).unwrap(), text, "it is the user's");
    fs::write(
        &path,
        text.replacen("batch_size = 64", "batch_size = 65", 1),
    )
    .unwrap();
    let ended = launch(figures());
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "config.toml: not that of the checkpoint of step 40: target.train.batch_size: 65 here, 64 there; put it back as it was, \
             or run its run file anew with --fresh"
        )
    );
}

#[test]
fn rows_that_disagree_with_the_checkpoint_are_set_aside_and_rewritten() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("metrics.jsonl");
    let aside = scratch.run_dir().join("metrics.jsonl.bad");
    let rows = fs::read_to_string(&path).unwrap();
    goes_on(toy(&scratch));
    let tensors = || {
        fs::read(
            scratch
                .run_dir()
                .join("checkpoints/step-00000040/tensors.safetensors"),
        )
        .unwrap()
    };
    let straight = tensors();
    for (damaged, left) in [
        (Some(rows.replacen("\"kind\"", "\"king\"", 1)), 1),
        (Some(rows.replacen("\"step\":0", "\"step\":1", 1)), 0),
        (None, 4),
    ] {
        fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
        fs::remove_dir_all(scratch.run_dir().join("checkpoints/step-00000040")).unwrap();
        for name in ["starts.jsonl", "system.jsonl", "metrics.jsonl.bad"] {
            // Only this test resumes several runs in one directory.
            let _ = fs::remove_file(scratch.run_dir().join(name));
        }
        match &damaged {
            Some(damaged) => fs::write(&path, damaged).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let ended = goes_on(toy(&scratch));
        let said = format!(
            "written again from the {} of 4 rows that can be read",
            4 - left
        );
        let lines = ended.stderr.lines().filter(|line| line.contains(&said));
        assert_eq!(lines.count(), 1, "{}", ended.stderr);
        assert_eq!(fs::read_to_string(&aside).ok(), damaged);
        let now = fs::read_to_string(&path).unwrap();
        assert_eq!(now.lines().count(), rows.lines().count() - left);
        assert!(tensors() == straight);
    }
}

#[test]
fn a_damaged_record_of_starts_is_set_aside() {
    let scratch = Scratch::new();
    goes_on(toy(&scratch));
    let straight = remains(&scratch);
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    interrupted(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("starts.jsonl");
    let mut starts = fs::read(&path).unwrap();
    starts[30] ^= 0x80;
    fs::write(&path, &starts).unwrap();
    let ended = goes_on(toy(&scratch));
    let said = "step 20: runs/x/starts.jsonl: 1 of its 1 lines cannot be read; the file is kept as runs/x/starts.jsonl.bad, \
                and written again without them";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert!(remains(&scratch) == straight);
}

#[test]
fn a_run_with_rows_and_without_checkpoints_does_not_start_over_silently() {
    let scratch = Scratch::new();
    interrupted(&scratch, toy(&scratch));
    let run_dir = scratch.run_dir();
    fs::remove_dir_all(run_dir.join("checkpoints")).unwrap();
    fs::remove_file(run_dir.join("saved.json")).unwrap();
    assert_eq!(
        refused(&scratch, || toy(&scratch)),
        "runs/x: its rows go up to step 40, it saves every 20 steps, and runs/x/checkpoints holds none; put the checkpoints back, \
         or start over with --fresh, which moves runs/x aside, or with --out"
    );
    let mut fresh = toy(&scratch);
    fresh.arg("--fresh");
    goes_on(fresh);
}

#[test]
fn a_damaged_sweep_file_is_rewritten_or_refused_with_a_remedy() {
    let scratch = Scratch::new();
    let sweep = || {
        let mut command = scratch.real("tms_5-2.toml", "runs/s", &TOY);
        command.args(["--seeds", "0..2", "--threads", "1"]);
        command
    };
    goes_on(sweep());
    let path = scratch.path().join("runs/s/sweep.json");
    let whole = fs::read(&path).unwrap();
    for damage in ["", "{"] {
        fs::write(&path, damage).unwrap();
        goes_on(sweep());
        assert!(fs::read(&path).unwrap() == whole);
    }
    fs::remove_file(&path).unwrap();
    let ended = launch(sweep());
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "runs/s: holds files and no sweep.json, so it is not a sweep; try --out, or, if it is one, put an \
             empty file of that name there: it is written again"
        )
    );
    fs::write(&path, "").unwrap();
    goes_on(sweep());
    assert!(fs::read(&path).unwrap() == whole);
}

#[test]
fn a_sweep_with_two_datasets_is_refused() {
    let scratch = Scratch::new();
    tokenize(&scratch, "line", "data/shakespeare");
    let sweep = || {
        let mut command = scratch.real("shakespeare.toml", "runs/s", &LANGUAGE_MODEL);
        command.args(["--seeds", "0..2", "--threads", "1"]);
        command
    };
    goes_on(sweep());
    // One run is finished, and one is not.
    fs::remove_dir_all(scratch.path().join("runs/s/seed=1")).unwrap();
    fs::remove_dir_all(scratch.path().join("data")).unwrap();
    tokenize(&scratch, "verse", "data/shakespeare");
    let left = names(&scratch.path().join("runs/s"));
    let ended = launch(sweep());
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended
            .error()
            .starts_with("data/shakespeare/train: not the dataset that the run was trained on: "),
        "{}",
        ended.stderr
    );
    assert_eq!(names(&scratch.path().join("runs/s")), left);
}
