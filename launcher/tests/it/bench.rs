//! `spd-launch bench` and `profile`.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

use crate::both::children;
use crate::scratch::{Scratch, assert_goes, end, launch, start, wait_until};

#[test]
fn stdout_and_the_file_have_one_line_for_each_workload() {
    let scratch = Scratch::new();
    let file = scratch.path().join("bench.jsonl");
    let args = "bench tiny-tms tiny-gpt2-h1 --steps 2 --warmup 1 --threads 1 --batch 8 --out";
    let mut args: Vec<&str> = args.split(' ').collect();
    args.push(file.to_str().unwrap());
    let ended = launch(scratch.launcher(&args));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines: Vec<serde_json::Value> = ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = lines
        .iter()
        .map(|line| line["workload"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["tiny-tms@8@fp32", "tiny-gpt2-h1@8x16@fp32"]);
    assert!(lines.iter().all(|line| line["finite"] == true));
    assert_eq!(fs::read_to_string(file).unwrap(), ended.stdout);
    assert_eq!(ended.stderr, "");
}

// If both ranks got the file's name, both would write to it; it is the name of a workload.
#[test]
fn only_the_first_rank_writes_a_line() {
    let scratch = Scratch::new();
    let args =
        "bench --steps 2 --warmup 1 --cpus 2 --batch 8 --out tiny-tms -- tiny-tms tiny-gpt2-h1";
    let ended = launch(scratch.launcher(&args.split(' ').collect::<Vec<_>>()));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(ended.stdout.lines().count(), 2);
    let written = fs::read_to_string(scratch.path().join("tiny-tms")).unwrap();
    assert_eq!(written, ended.stdout);
}

#[test]
fn ranks_that_cannot_share_a_batch_are_refused_before_any_is_started() {
    let scratch = Scratch::new();
    let args = "bench tiny-tms --cpus 3 --batch 8 --out o";
    let ended = launch(scratch.launcher(&args.split(' ').collect::<Vec<_>>()));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert_eq!(
        ended.stderr,
        "error: bench tiny-tms@8@fp32: expected a divisor of the rows of a batch, batch_size = 8, found 3\n"
    );
    assert!(scratch.names().is_empty());
}

#[test]
fn a_dead_rank_is_named_and_none_is_left() {
    for rank in [0, 1] {
        let scratch = Scratch::new();
        let args = "bench tiny-tms --steps 100000000 --cpus 2 --batch 8";
        let launcher = start(scratch.launcher(&args.split(' ').collect::<Vec<_>>()));
        wait_until("both ranks", || children(launcher.id()).len() == 2);
        let ranks = children(launcher.id());
        let pid = Pid::from_raw(i32::try_from(ranks[rank]).unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        let ended = end(launcher);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
        let expected = format!("error: bench tiny-tms: rank {rank} of 2 was killed by SIGKILL\n");
        assert_eq!(ended.stderr, expected);
        ranks.into_iter().for_each(assert_goes);
    }
}

#[test]
fn phases_are_a_table_on_stderr() {
    let scratch = Scratch::new();
    let args = "bench tiny-tms --steps 2 --threads 1 --phases";
    let ended = launch(scratch.launcher(&args.split(' ').collect::<Vec<_>>()));
    assert_eq!((ended.code, ended.stdout.lines().count()), (Some(0), 1));
    for part in [
        "tiny-tms@fp32, 1 thread:",
        "ceilings: gemm ",
        "part of the step",
        "masked passes and losses",
        "unaccounted",
        "longest single ops",
    ] {
        assert!(
            ended.stderr.contains(part),
            "{part} is not in\n{}",
            ended.stderr
        );
    }
}

#[test]
fn profile_shows_the_step_of_a_run() {
    let scratch = Scratch::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/shakespeare.toml");
    let args = "--steps 2 --threads 1 --trace step.json --set train.batch_size=1 --set data.seq_len=8 --set target.n_layer=1";
    let args: Vec<&str> = ["profile", config]
        .into_iter()
        .chain(args.split(' '))
        .collect();
    let ended = launch(scratch.launcher(&args));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in [
        "shakespeare, 1 thread:",
        "ceilings: gemm ",
        "matmul",
        "memory: ",
    ] {
        assert!(
            ended.stdout.contains(part),
            "{part} is not in\n{}",
            ended.stdout
        );
    }
    let trace = fs::read(scratch.path().join("step.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 50);
    assert_eq!(scratch.names(), ["step.json"]);
}

#[test]
fn an_unknown_workload_names_the_known_ones_and_times_nothing() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["bench", "tiny-tms", "tmz", "--out", "bench.jsonl"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert!(
        ended
            .stderr
            .starts_with("error: bench tmz: no such workload; known: tms_5-2, "),
        "{}",
        ended.stderr
    );
    assert!(scratch.names().is_empty());
}
