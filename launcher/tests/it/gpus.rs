//! Runs on several GPUs: emulated ones, each in its own process, with a replacement for NCCL.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use spd_emulated::nccl::make_nccl;

use crate::both::children;
use crate::gpu::{SHORT, is_there};
use crate::scratch::{Running, Scratch, assert_goes, end, send, start, wait_until_it_trains};

/// A replacement for NCCL; the test is skipped without a compiler for it or for kernels.
pub(crate) fn nccl() -> Option<Scratch> {
    let libraries = Scratch::new();
    if !make_nccl(&libraries.path().join("libnccl.so.2")) {
        spd_testing::skip("cc");
        return None;
    }
    is_there().then_some(libraries)
}

/// A run on `gpus` emulated GPUs.
fn run(scratch: &Scratch, libraries: &Scratch, gpus: usize, set: &[&str]) -> Command {
    let set = [&["train.shards=4"], set].concat();
    let mut command = scratch.real("tms_5-2.toml", &format!("r{gpus}"), &set);
    command
        .args(["--threads", "1", "--gpus", &gpus.to_string()])
        .args(["--hang-seconds", "600"])
        .env("SPD_CUDA_LIBRARIES", libraries.path());
    command
}

/// The results of a run without times: rows, and tensors of its checkpoints.
fn left(dir: &Path) -> Vec<Vec<u8>> {
    let mut left = vec![fs::read(dir.join("metrics.jsonl")).unwrap()];
    for step in ["step-00000006", "step-00000009"] {
        let tensors = dir
            .join("checkpoints")
            .join(step)
            .join("tensors.safetensors");
        left.push(fs::read(tensors).unwrap());
    }
    left
}

#[test]
fn any_number_of_gpus_gives_the_same_bits() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let mut found = Vec::new();
    for (gpus, device) in [
        (1, "GPU 0; each batch in 4 shards"),
        (2, "2 GPUs, a rank each; each batch in 4 shards"),
        (4, "4 GPUs, a rank each; each batch in 4 shards"),
    ] {
        let ended = end(start(run(&scratch, &libraries, gpus, &SHORT)));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stdout.contains(device), "{}", ended.stdout);
        found.push(left(&scratch.path().join(format!("r{gpus}"))));
    }
    assert!(found[0][0].len() > 1000);
    for (name, of_several) in ["two", "four"].into_iter().zip(&found[1..]) {
        assert!(*of_several == found[0], "{name} GPUs");
    }
}

/// Launchers on two nodes, both this machine, with two GPUs each.
fn on_two_nodes(scratch: &Scratch, libraries: &Scratch, set: &[&str]) -> [Running; 2] {
    ["0", "1"].map(|node| {
        let mut command = run(scratch, libraries, 2, set);
        command.env("RANK", node).env("WORLD_SIZE", "2");
        start(command)
    })
}

#[test]
fn gpus_of_several_nodes_give_the_same_bits() {
    let Some(libraries) = nccl() else { return };
    let alone = Scratch::with_emulated_gpu();
    let ended = end(start(run(&alone, &libraries, 1, &SHORT)));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let scratch = Scratch::with_emulated_gpu();
    let [first, other] = on_two_nodes(&scratch, &libraries, &SHORT).map(end);
    assert_eq!(
        (first.code, other.code),
        (Some(0), Some(0)),
        "{first:?} {other:?}"
    );
    let device = "4 GPUs, a rank each; each batch in 4 shards";
    assert!(first.stdout.contains(device), "{}", first.stdout);
    let (alone, nodes) = (alone.path().join("r1"), scratch.path().join("r2"));
    assert!(left(&alone) == left(&nodes));
}

#[test]
fn a_dead_rank_on_another_node_is_named_with_its_host() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let set = [&SHORT[..], &["train.steps=200000", "eval.every=100000"]].concat();
    let nodes = on_two_nodes(&scratch, &libraries, &set);
    wait_until_it_trains(&scratch.path().join("r2"));
    let ranks = nodes.each_ref().map(|node| children(node.id())).concat();
    assert_eq!(ranks.len(), 4);
    send(ranks[3], Signal::KILL);
    ranks.iter().for_each(|&rank| assert_goes(rank));
    let [first, other] = nodes.map(end);
    assert_eq!((first.code, other.code), (Some(1), Some(1)));
    let (error, who) = (first.error(), format!("rank 3 (pid {} on ", ranks[3]));
    assert!(
        error.starts_with(&who) && error.contains("SIGKILL"),
        "{error}"
    );
}

#[test]
fn a_gpu_job_can_be_planned_without_gpus() {
    let scratch = Scratch::new();
    let mut command = scratch.real("tms_5-2.toml", "r", &[]);
    command
        .args(["--gpus", "4", "--dry-run", "--slurm=2"])
        .env("SPD_CUDA_LIBRARIES", scratch.path());
    let ended = end(start(command));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("#SBATCH --gpus-per-node=4"));
    assert!(
        ended.stderr.contains("8 GPUs, a rank each"),
        "{}",
        ended.stderr
    );
    // A plan alone needs none either, and names what it does not know.
    let mut command = scratch.real("tms_5-2.toml", "r", &[]);
    command
        .args(["--gpus", "4", "--dry-run"])
        .env("SPD_CUDA_LIBRARIES", scratch.path());
    let ended = end(start(command));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in [
        "4 GPUs, a rank each",
        "GPU memory",
        "not visible here (",
        "): their memory is checked when the run starts",
    ] {
        assert!(ended.stdout.contains(part), "{}", ended.stdout);
    }
    assert!(!scratch.path().join("r").try_exists().unwrap());
}

#[test]
fn the_fast_reduction_is_kept_in_the_run_file() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let set = [&SHORT[..], &["train.shards=2", "train.reduction=fast"]].concat();
    let ended = end(start(run(&scratch, &libraries, 2, &set)));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let resolved = fs::read_to_string(scratch.path().join("r2/config.toml")).unwrap();
    assert!(resolved.contains("\nreduction = \"fast\"\n"), "{resolved}");
}

#[test]
fn an_nccl_error_is_passed_on() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let mut command = run(&scratch, &libraries, 2, &SHORT);
    command.env("STAND_IN_NCCL", "refuse");
    let ended = end(start(command));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let error = ended.error();
    let words = "NCCL cannot join 2 ranks: invalid usage: Duplicate GPU detected";
    assert!(
        error.starts_with("rank ") && error.contains(words),
        "{error}"
    );
}

#[test]
fn a_request_to_stop_is_heard_while_ranks_join() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let mut command = run(&scratch, &libraries, 2, &SHORT);
    command.arg("--verbose").env("STAND_IN_NCCL", "wait");
    let launcher = start(command);
    for rank in 0..2 {
        launcher.has_said(&format!("rank {rank}: joining, step 0"));
    }
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let said =
        "stopped at the beginning (joining); nothing new is saved, and the same command goes on";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
}

/// The ranks that wait for it on their GPUs are killed.
#[test]
fn a_dead_rank_is_named_and_the_others_are_killed() {
    let Some(libraries) = nccl() else { return };
    let scratch = Scratch::with_emulated_gpu();
    let set = [&SHORT[..], &["train.steps=200000", "eval.every=100000"]].concat();
    let launcher = start(run(&scratch, &libraries, 4, &set));
    wait_until_it_trains(&scratch.path().join("r4"));
    let ranks = children(launcher.id());
    assert_eq!(ranks.len(), 4);
    send(ranks[2], Signal::KILL);
    ranks.iter().for_each(|&rank| assert_goes(rank));
    let ended = end(launcher);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let who = format!("rank 2 (pid {})", ranks[2]);
    let error = ended.error();
    assert!(
        error.starts_with(&who) && error.contains("SIGKILL"),
        "{error}"
    );
}
