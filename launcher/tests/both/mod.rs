//! Helpers of both `it` and the farm: a run, and the processes and output of a launch.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::process::Child;

/// resid_mlp2.toml shortened, with batches in four shards, and with adversaries that all ranks
/// share, in the loss and in evaluations.
pub(crate) const SHARED_ADVERSARY: &[&str] = &[
    "train.steps=60",
    "train.batch_size=64",
    "train.shards=4",
    "train.faithfulness_warmup.steps=5",
    "target.n_features=10",
    "target.d_embed=40",
    "target.d_mlp=10",
    "target.train.steps=100",
    "target.train.batch_size=64",
    "decomposition.sites.0.C=20",
    "checkpoint.every=7",
    "log.every=5",
    "eval.every=20",
    "eval.batches=2",
    "eval.batch_size=64",
    "eval.known.0.identity=10",
    "eval.known.1.dense=10",
    "eval.loss.0.steps=3",
    "loss.2.steps=3",
    "loss.2.step_size=0.3",
];

/// A child process that is killed, with its ranks, when this is dropped.
#[derive(Debug)]
pub(crate) struct Guarded(pub(crate) Child);

impl Deref for Guarded {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // It may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lines without their timestamps, which they have because no terminal shows them.
pub(crate) fn unstamped(text: &str) -> String {
    let line = |line: &str| match line.split_once("Z ") {
        Some((time, rest)) if time.len() == "2026-11-23T11:40:05".len() && time.contains('T') => {
            rest.to_owned()
        }
        _ => line.to_owned(),
    };
    text.split_inclusive('\n').map(line).collect()
}

/// The living children of a process, in the order of their start.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let children = processes.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let (state, its_parent) = state(pid)?;
        (its_parent == parent && state != 'Z').then_some(pid)
    });
    let mut children: Vec<u32> = children.collect();
    children.sort_unstable();
    children
}

/// Whether a process has exited, or is a zombie.
pub(crate) fn is_gone(pid: u32) -> bool {
    state(pid).is_none_or(|(state, _)| state == 'Z')
}

/// State and parent of a process.
fn state(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut words = rest.split(' ');
    let state = words.next()?.chars().next()?;
    Some((state, words.next()?.parse().ok()?))
}
