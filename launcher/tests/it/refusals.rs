//! Refused commands, which create nothing.

use std::fs;

use crate::scratch::{Scratch, launch, names};

#[test]
fn help_has_examples_and_exit_codes() {
    let help = launch(Scratch::new().launcher(&["--help"]));
    assert_eq!(help.code, Some(0));
    for part in [
        "spd-launch configs/tms_5-2.toml",
        "Exit codes:",
        "3  stopped on request",
        "tokenize",
        "bench",
    ] {
        assert!(
            help.stdout.contains(part),
            "{part} is not in\n{}",
            help.stdout
        );
    }
    assert!(!help.stdout.contains("rank-program") && !help.stdout.contains("  rank "));
}

#[test]
fn no_argument_shows_the_help_and_is_bad_input() {
    let ended = launch(Scratch::new().launcher(&[]));
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("Usage: spd-launch"));
}

#[test]
fn an_unknown_run_file_is_refused_with_the_searched_paths() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["qqq"]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: qqq: no such run file; looked at qqq, configs/qqq, configs/qqq.toml, and at those that are part of this program; \
             `spd-launch configs` lists them\n"
        )
    );
    assert!(scratch.names().is_empty());
}

#[test]
fn a_path_with_a_newline_gives_one_error_line() {
    let scratch = Scratch::new();
    for (words, told) in [
        (
            &["a\nerror: forged"][..],
            "error: a\\nerror: forged: no such run file; ",
        ),
        (
            &["inspect", "a\nerror: forged"],
            "error: a\\nerror: forged: ",
        ),
        (
            &["export", "a\nerror: forged", "--out", "b"],
            "error: a\\nerror: forged: holds no config.toml",
        ),
    ] {
        let ended = launch(scratch.launcher(words));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.starts_with(told) && ended.stderr.lines().count() == 1,
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn every_fault_of_a_run_file_is_one_line() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("done", &["--set", "train.stepz=1", "--set", "seed=-1"]));
    assert_eq!(ended.code, Some(2));
    let faults: Vec<&str> = ended.stderr.lines().collect();
    assert!(
        faults.len() == 2 && faults.iter().all(|line| line.starts_with("error: --set ")),
        "{faults:?}"
    );
    assert!(scratch.names().is_empty());
}

#[test]
fn missing_gpus_and_several_runs_on_one_are_refused() {
    let scratch = Scratch::new();
    // No machine has as many.
    let ended = launch(scratch.run("done", &["--gpus", "200"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.starts_with("error: --gpus 200: ")
            && ended.stderr.ends_with(
                "; `spd-launch doctor` says what this machine has; leave it out to run on the CPU\n"
            ),
        "{}",
        ended.stderr
    );
    let ended = launch(scratch.launcher(&["bench", "tiny-gpt2-h1", "--gpus", "2"]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: --gpus 2: only a run uses several GPUs; give --gpus 1\n"
        )
    );
    let one = Scratch::with_emulated_gpu();
    let ended = launch(one.run("done", &["--gpus", "1", "--seeds", "0..2"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .stderr
            .starts_with("error: --gpus 1: several runs use the CPU"),
        "{}",
        ended.stderr
    );
    assert!(scratch.names().is_empty());
}

#[test]
fn the_doctor_lists_resources_and_succeeds() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["doctor"]));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for name in [
        "libcuda.so.1",
        "libnvrtc.so.13",
        "libcublasLt.so.13",
        "libnccl.so.2",
    ] {
        let line = ended.stdout.lines().find(|line| line.contains(name));
        let line = line.unwrap_or_else(|| panic!("{name} is not in\n{}", ended.stdout));
        // Either a version and a path, or a remedy.
        assert!(line.contains('/') || line.contains("not found"), "{line}");
        assert!(
            !line.contains("not found") || line.contains("needed for "),
            "{line}"
        );
    }
    assert!(scratch.names().is_empty());
    // A low limit, and an unwritable directory.
    let limited = |script: &str| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh"]);
        command.arg(scratch.launcher(&[]).get_program());
        command.current_dir(scratch.path());
        launch(command)
    };
    let ended = limited("ulimit -n 64; exec \"$1\" doctor");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let told = "open files (64 at most): a run of many ranks or of a dataset in many shards needs more: raise it with `ulimit -n \
                4096`.\n";
    assert!(ended.stdout.contains(told), "{}", ended.stdout);
    let ended = limited("cd /proc; exec \"$1\" doctor");
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let told =
        "): runs are made in runs/ there: go to another directory, or give each run its --out.\n";
    assert!(
        ended.stdout.contains("/proc (cannot be written: "),
        "{}",
        ended.stdout
    );
    assert!(ended.stdout.contains(told), "{}", ended.stdout);
}

#[test]
fn a_dry_run_prints_the_plan_and_creates_nothing() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("done", &["--dry-run"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.starts_with("tms_5-2\n"), "{}", ended.stdout);
    assert!(ended.stdout.contains("runs/x (new)"));
    assert!(ended.stdout.contains("memory"));
    assert_eq!(ended.stderr, "dry run: nothing was created\n");
    assert!(scratch.names().is_empty());
}

#[test]
fn the_directory_of_another_run_is_refused_with_the_difference() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    let before = fs::read(scratch.run_dir().join("config.toml")).unwrap();
    let ended = launch(scratch.run("done", &["--set", "train.steps=77"]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: runs/x: holds a run of another config (train.steps: 77 here, 10000 there); \
             try --out, or --fresh to move it aside\n"
        )
    );
    assert_eq!(
        fs::read(scratch.run_dir().join("config.toml")).unwrap(),
        before
    );
}

#[test]
fn a_foreign_directory_is_not_changed() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.run_dir()).unwrap();
    fs::File::create_new(scratch.run_dir().join("thesis.tex")).unwrap();
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: runs/x: holds files and no config.toml, so it is no run directory; try --out\n"
        )
    );
    assert_eq!(names(&scratch.run_dir()), ["thesis.tex"]);
}

#[test]
fn an_unwritable_path_gives_one_error_line() {
    let scratch = Scratch::new();
    fs::File::create_new(scratch.path().join("runs")).unwrap();
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(ended.code, Some(2));
    assert_eq!(
        ended.stderr,
        "error: runs/x: expected a run directory, found a file; try --out\n"
    );
}

// Even root cannot create a directory in /proc, so this holds for every user.
#[cfg(target_os = "linux")]
#[test]
fn a_failed_creation_gives_one_error_line_and_leaves_nothing() {
    let scratch = Scratch::new();
    for arguments in [&[][..], &["--dry-run"], &["--seeds", "0..2"]] {
        let ended = launch(scratch.run_at("/proc/spd/x", "done", arguments));
        assert_eq!(ended.code, Some(2));
        assert_eq!(
            ended.stderr,
            "error: /proc: nothing can be made there: No such file or directory (os error 2); try --out\n"
        );
    }
    assert!(scratch.names().is_empty());
}

#[test]
fn disagreeing_variables_are_refused_with_both_pairs() {
    let slurm = [
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "1"),
        ("SLURM_STEP_NUM_TASKS", "2"),
    ];
    let by_hand = [("RANK", "0"), ("WORLD_SIZE", "1")];
    for (commands, variables, expected) in [
        (
            &[&[][..], &["--dry-run"], &["--seeds", "0..2"]][..],
            [&slurm[..], &by_hand].concat(),
            "SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=2 and RANK=0 of WORLD_SIZE=1 disagree; \
             unset the wrong pair",
        ),
        (
            &[&["--seeds", "0..2"]],
            slurm.to_vec(),
            "SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=2: several runs at once share the cores of one node; start one launcher",
        ),
    ] {
        let scratch = Scratch::new();
        for arguments in commands {
            let mut command = scratch.run("done", arguments);
            command.envs(variables.iter().copied());
            let ended = launch(command);
            assert_eq!(ended.code, Some(2));
            assert_eq!(ended.stderr, format!("error: {expected}\n"));
        }
        assert!(scratch.names().is_empty());
    }
}

#[test]
fn a_plan_shows_the_variables_of_the_nodes() {
    let scratch = Scratch::new();
    let mut command = scratch.run("done", &["--dry-run"]);
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
    let stdout = launch(command).stdout;
    assert!(
        stdout.contains("  node        RANK=0 of WORLD_SIZE=1\n"),
        "{stdout}"
    );
}

#[test]
fn tokenize_makes_a_dataset() {
    let scratch = Scratch::new();
    let text = scratch.path().join("a.txt");
    spd_checkpoint::atomic::write_file(&text, "to be or not to be\n".repeat(50).as_bytes())
        .unwrap();
    let arguments = [
        "tokenize",
        "a.txt",
        "--tokenizer",
        "bytes",
        "--out",
        "data/a",
    ];
    let made = launch(scratch.launcher(&arguments));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(made.stdout.contains("data/a/train"), "{}", made.stdout);
    assert_eq!(names(&scratch.path().join("data/a")), ["train", "val"]);
    let again = launch(scratch.launcher(&arguments));
    assert_eq!(again.code, Some(2));
    assert!(again.error().starts_with("data/a"), "{}", again.stderr);
}

#[test]
fn slurm_prints_only_the_script() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("done", &["--dry-run", "--slurm"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stdout
            .starts_with("#!/bin/bash\n#SBATCH --job-name=tms_5-2\n")
    );
    let starts = |line: &&str| line.starts_with("srun --kill-on-bad-exit=1 /");
    let command = ended.stdout.lines().find(starts).unwrap();
    assert!(
        command.contains("tms_5-2.toml --out runs/x") && !command.contains("--dry-run"),
        "{command}"
    );
    assert!(ended.stderr.contains("  directory   runs/x (new)"));
    let alone = launch(scratch.run("done", &["--slurm"]));
    assert_eq!(alone.code, Some(2));
    assert!(scratch.names().is_empty());
}
