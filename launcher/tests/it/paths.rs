//! Paths of a run directory, and foreign files in the places of its own.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, Mode, mkfifoat};
use spd_checkpoint::Lock;

use crate::scratch::{Ended, Scratch, launch, names};

fn make_pipe(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

/// Launches a command that must be refused with this line.
fn refused(command: Command, expected: &str) {
    let ended = launch(command);
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (Some(2), format!("error: {expected}\n").as_str())
    );
}

fn done(command: Command) -> Ended {
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

#[test]
fn a_run_is_in_the_given_directory() {
    for (out, lies_in, old) in [
        ("runs/x/", "runs/x", "runs/x.old-1"),
        ("empty", "empty", "empty.old-1"),
        ("link", "disk", "disk/old-1"),
        ("link/", "disk", "disk/old-1"),
        (".", ".", "old-1"),
        ("empty/..", ".", "old-1"),
    ] {
        let scratch = Scratch::new();
        // A working directory as run directory contains nothing else.
        let start = scratch.path().join("start");
        for dir in ["start/empty", "start/disk"] {
            fs::create_dir_all(scratch.path().join(dir)).unwrap();
        }
        symlink("disk", start.join("link")).unwrap();
        if lies_in == "." {
            fs::remove_file(start.join("link")).unwrap();
            fs::remove_dir(start.join("disk")).unwrap();
        }
        if out == "." {
            fs::remove_dir(start.join("empty")).unwrap();
        }
        let command = |arguments: &[&str]| {
            let mut command = scratch.run_at(out, "done", arguments);
            command.current_dir(&start);
            command
        };
        if out == "empty/.." {
            // `..` contains `empty`, which is not part of a run.
            let ended = launch(command(&[]));
            assert_eq!(ended.code, Some(2));
            assert!(ended.stderr.contains("so it is no run directory"));
            continue;
        }
        let planned = done(command(&["--dry-run"]));
        assert!(planned.stdout.contains(" (new)"), "{}", planned.stdout);
        done(command(&[]));
        assert!(start.join(lies_in).join("summary.json").is_file(), "{out}");
        let again = done(command(&[]));
        assert!(again.stderr.contains(" is finished; "), "{}", again.stderr);
        let fresh = done(command(&["--fresh"]));
        assert!(start.join(old).join("summary.json").is_file(), "{out}");
        assert!(start.join(lies_in).join("summary.json").is_file(), "{out}");
        assert!(fresh.stderr.contains("old-1\n"), "{}", fresh.stderr);
        assert_eq!(start.join("link").is_symlink(), lies_in != ".", "{out}");
    }
}

#[test]
fn a_sweep_and_a_dataset_are_in_the_given_directory() {
    for out in ["sweep/", "link", "."] {
        let scratch = Scratch::new();
        let start = scratch.path().join("start");
        fs::create_dir_all(start.join("disk")).unwrap();
        symlink("disk", start.join("link")).unwrap();
        let start = if out == "." {
            start.join("disk")
        } else {
            start
        };
        let mut command = scratch.run_at(out, "sweep_well", &["--seeds", "0..1"]);
        command.current_dir(&start);
        done(command);
        assert!(start.join(out).join("seed=0/summary.json").is_file());

        let text = start.join("text");
        fs::write(&text, "to be or not to be\n".repeat(50)).unwrap();
        let data = if out == "." {
            "seed=0/figures"
        } else {
            "data/"
        };
        fs::create_dir_all(start.join(data)).unwrap();
        for _ in 0..2 {
            let tokenize = ["tokenize", "text", "--tokenizer", "bytes", "--overwrite"];
            let mut command = scratch.launcher(&tokenize);
            command.args(["--out", data]).current_dir(&start);
            done(command);
            assert_eq!(names(&start.join(data)), ["train", "val"]);
        }
    }
}

// No command takes a directory whose name begins with a dash for a flag.
#[test]
fn a_name_may_look_like_a_flag() {
    let scratch = Scratch::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/tms_5-2.toml");
    for more in [&["--out=-rf"][..], &["--out=--fresh", "--seeds", "0..1"]] {
        let mut command = scratch.launcher(&[config]);
        for set in ["train.steps=2", "target.train.steps=2", "eval.batches=1"] {
            command.args(["--set", set]);
        }
        command.args(more);
        done(command);
    }
    for summary in ["-rf/summary.json", "--fresh/seed=0/summary.json"] {
        assert!(scratch.path().join(summary).is_file(), "{summary}");
    }
}

#[test]
fn foreign_files_are_not_moved() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.run_dir()).unwrap();
    fs::File::create_new(scratch.run_dir().join("thesis.tex")).unwrap();
    refused(
        scratch.run("done", &["--fresh"]),
        "runs/x: holds files and no config.toml, so it is no run directory; try --out",
    );
    assert_eq!(names(&scratch.run_dir()), ["thesis.tex"]);
}

#[test]
fn a_dry_run_is_refused_like_the_run() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    let both = |change: &dyn Fn(&mut Command), expected: &str| {
        for arguments in [&[][..], &["--dry-run"]] {
            let mut command = scratch.run("done", arguments);
            change(&mut command);
            refused(command, expected);
        }
    };
    let held = |dir: &Path, shown: &str| {
        let _hold = Lock::take(dir).unwrap();
        let error = Lock::look(dir).unwrap_err().to_string();
        both(&|_| {}, &error.replace(&dir.display().to_string(), shown));
    };
    held(&scratch.run_dir().join("logs"), "runs/x/logs");
    held(&scratch.run_dir(), "runs/x");

    fs::write(scratch.path().join("file"), "").unwrap();
    let file = scratch.path().join("file");
    let targets = file.join("targets");
    let before = names(&scratch.run_dir());
    for arguments in [&[][..], &["--dry-run"], &["--seeds", "0..2", "--out", "s"]] {
        let mut command = scratch.run("done", arguments);
        if arguments.len() > 1 {
            command = scratch.launcher(&[&config()]);
            command.args(arguments);
        }
        command.env("SPD_CACHE", &file);
        let ended = launch(command);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.starts_with(&format!("error: {}/", targets.display()))
                && ended.stderr.ends_with(&format!(
                    ": cannot be made: {} is a file, not a directory; trained targets are kept there: mend it, or set \
                     SPD_CACHE to a directory that can be written to\n",
                    file.display()
                )),
            "{}",
            ended.stderr
        );
    }
    assert_eq!(names(&scratch.run_dir()), before);
    assert_eq!(scratch.names(), ["file", "runs"]);

    make_pipe(&scratch.run_dir().join("metrics.jsonl"));
    both(
        &|_| {},
        "runs/x/metrics.jsonl: expected a file, found a named pipe; move it away, or try --out",
    );
}

fn config() -> String {
    format!("{}/../configs/tms_5-2.toml", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_pipe_in_the_place_of_a_file_is_refused() {
    let scratch = Scratch::new();
    make_pipe(&scratch.path().join("pipe"));
    for name in ["pipe", "./pipe"] {
        let expected = format!("{name}: expected a file, found a named pipe");
        refused(scratch.launcher(&[name]), &expected);
    }
    refused(
        scratch.launcher(&["/dev/null"]),
        "/dev/null: expected a file, found a character device",
    );
    fs::write(scratch.path().join("text"), "some text").unwrap();
    for (text, tokenizer, expected) in [
        (
            "pipe",
            "bytes",
            "pipe: cannot open: expected a file, found a named pipe",
        ),
        (
            "text",
            "pipe",
            "pipe: cannot read: expected a file, found a named pipe",
        ),
    ] {
        let tokenize = ["tokenize", text, "--tokenizer", tokenizer, "--out", "data"];
        refused(scratch.launcher(&tokenize), expected);
    }
    assert_eq!(scratch.names(), ["pipe", "text"]);

    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    let stored = scratch.run_dir().join("config.toml");
    fs::remove_file(&stored).unwrap();
    make_pipe(&stored);
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: runs/x/config.toml: expected a file, found a named pipe; runs/x cannot be continued without its \
             config.toml: put it back, or start over with --fresh, which moves runs/x aside, or with --out\n"
        )
    );
}

#[test]
fn pipes_as_dataset_or_weights_are_refused() {
    let scratch = Scratch::new();
    let data = scratch.path().join("data/shakespeare/train");
    fs::create_dir_all(&data).unwrap();
    make_pipe(&data.join("index.json"));
    let command = |config: &str| scratch.real(config, "runs/x", &[]);
    refused(
        command("shakespeare.toml"),
        "data/shakespeare/train/index.json: cannot read: expected a file, found a named pipe",
    );
    make_pipe(&scratch.path().join("w.safetensors"));
    let text = fs::read_to_string(config()).unwrap();
    let (before, rest) = text.split_once("[target.train]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    let run = format!("{before}weights = \"w.safetensors\"\n[data]{after}");
    fs::write(scratch.path().join("run.toml"), run).unwrap();
    refused(
        scratch.launcher(&["run.toml"]),
        "w.safetensors: the target's weights cannot be read: expected a file, found a named pipe",
    );
}

#[test]
fn control_characters_are_never_printed() {
    let scratch = Scratch::new();
    for (arguments, expected) in [
        (
            &["no\u{1b}[31m.toml"][..],
            "error: no\\u{1b}[31m.toml: no such run file; looked at no\\u{1b}[31m.toml, configs/no\\u{1b}[31m.toml, \
             configs/no\\u{1b}[31m.toml.toml, and at those that are part of this program; `spd-launch configs` lists them\n",
        ),
        (
            &["tms", "--\u{1b}]0;title\u{7}"],
            "error: unexpected argument '--",
        ),
    ] {
        let ended = launch(scratch.launcher(arguments));
        assert_eq!(ended.code, Some(2));
        assert!(
            ended.stderr.starts_with(expected) && !ended.stderr.contains('\u{1b}'),
            "{:?}",
            ended.stderr
        );
    }
    let out = "runs/\u{1b}[2Jx";
    let planned = done(scratch.run_at(out, "done", &["--dry-run"]));
    assert!(planned.stdout.contains("runs/\\u{1b}[2Jx (new)"));
    let ended = done(scratch.run_at(out, "done", &[]));
    let printed = ended.stdout + &ended.stderr;
    assert!(!printed.contains('\u{1b}'), "{printed:?}");
}

#[test]
fn an_absurd_number_of_threads_is_refused() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run_at("runs/x", "done", &["--dry-run"]));
    assert_eq!(ended.code, Some(0));
    let ended = launch(scratch.launcher(&[&config(), "--threads", "1000000"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .stderr
            .starts_with("error: invalid value '1000000' for '--threads <N>': expected at most ")
            && ended
                .stderr
                .contains(" threads; more than there are cores ("),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_fresh_run_ignores_the_state_of_the_old_one() {
    let scratch = Scratch::new();
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 5] = [
        ("logs", |path| fs::write(path, "").unwrap()),
        ("checkpoints", |path| fs::write(path, "").unwrap()),
        ("metrics.jsonl", make_pipe),
        ("system.jsonl", |path| fs::create_dir(path).unwrap()),
        ("config.toml", |path| {
            std::os::unix::fs::symlink("config.toml", path).unwrap();
        }),
    ];
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    for (name, damage) in damages {
        let path = scratch.run_dir().join(name);
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir_all(&path);
        damage(&path);
        let ended = launch(scratch.run("fail", &[]));
        assert_eq!(ended.code, Some(2), "{name}: {}", ended.stderr);
        assert!(ended.error().contains(name), "{}", ended.stderr);
        let ended = launch(scratch.run("fail", &["--fresh"]));
        assert!(
            ended.stderr.contains("the old runs/x is now "),
            "{}",
            ended.stderr
        );
        assert_eq!(ended.code, Some(1), "{name}: {}", ended.stderr);
    }
}
