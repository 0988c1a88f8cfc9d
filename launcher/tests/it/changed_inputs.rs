//! A resume after a change of its data, its target or its run file: the same bits, or a refusal.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, mkfifoat};

use crate::begun_run::{
    LANGUAGE_MODEL, TOY, flip, kill_halfway, language_model, refused, results, succeeds, target,
    tokenize, toy, without_hashes,
};
use crate::scratch::{Scratch, launch, names};

#[test]
fn a_changed_dataset_is_refused_before_a_target_is_trained() {
    let scratch = Scratch::new();
    tokenize(&scratch, "line", "data/shakespeare");
    tokenize(&scratch, "verse", "data/other");
    succeeds(language_model(&scratch));
    let straight = results(&scratch);
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
    let ended = succeeds(language_model(&scratch));
    assert!(
        ended.stdout.contains("runs/x (continued from step 20)"),
        "{}",
        ended.stdout
    );
    assert!(results(&scratch) == straight);
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
    kill_halfway(&scratch, language_model(&scratch));
    flip(&shard);
    let error = refused(&scratch, || language_model(&scratch));
    assert_eq!(without_hashes(&error), expected);
    flip(&shard);
    succeeds(language_model(&scratch));
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
    succeeds(command);
    let mut command = language_model(&scratch);
    command.arg("--dry-run");
    succeeds(command);
    let records = scratch.path().join("cache/datasets");
    assert_eq!(names(&records).len(), 2, "one of each dataset");
    // An invalid record is written again.
    for name in names(&records) {
        fs::write(records.join(name), "{").unwrap();
    }
    let mut command = language_model(&scratch);
    command.arg("--dry-run");
    succeeds(command);
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
    succeeds(toy(&scratch));
    let (path, straight) = (target(&scratch), results(&scratch));
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
        assert!(results(&scratch) == straight, "{reason}");
    }
}

/// Runs the toy again beside a damaged target; returns the reported damage.
fn told_to_be_trained_again(scratch: &Scratch, path: &Path) -> String {
    let entry = path.parent().unwrap();
    let aside = PathBuf::from(format!("{}.bad", entry.display()));
    let before = fs::symlink_metadata(entry).unwrap();
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    let ended = succeeds(toy(scratch));
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
    succeeds(toy(&scratch));
    let (path, straight) = (target(&scratch), results(&scratch));
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
            assert!(results(&scratch) == straight, "{why}");
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
    assert!(results(&scratch) == straight);
}

#[test]
fn a_target_with_a_damaged_checkpoint_is_reported_and_trained_again() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let path = target(&scratch);
    let whole = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let checkpoints = path.parent().unwrap().join("checkpoints");
    flip(&checkpoints.join("step-00000020/tensors.safetensors"));
    flip(&path.parent().unwrap().join("metrics.jsonl"));
    let ended = succeeds(toy(&scratch));
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
    let ended = succeeds(toy(&scratch));
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
    succeeds(other);
    let others = target(&scratch);
    let moved = scratch.path().join("other.safetensors");
    fs::rename(&others, &moved).unwrap();
    fs::remove_dir_all(others.parent().unwrap()).unwrap();
    kill_halfway(&scratch, toy(&scratch));
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
    succeeds(toy(&scratch));
    assert!(fs::read(&path).unwrap() == own);
}

#[test]
fn formatting_of_a_run_file_does_not_matter() {
    let scratch = Scratch::new();
    succeeds(toy(&scratch));
    let straight = results(&scratch);
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    kill_halfway(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("# seed of the paper\n{text}\n")).unwrap();
    let figures = || scratch.launcher(&["figures", "runs/x"]);
    succeeds(figures());
    succeeds(toy(&scratch));
    assert!(results(&scratch) == straight);
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
             or run its run file with --fresh"
        )
    );
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
    succeeds(sweep());
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
