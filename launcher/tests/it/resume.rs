//! A run that was killed ends in the same bits as one that was not, also by other numbers of ranks.
//!
//! The shipped run files, cut short: their targets, sites, losses and update are what is repeated, not their length.
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use tempfile::TempDir;

use crate::both::{self, children};

const BINARY: &str = env!("CARGO_BIN_EXE_spd-launch");
const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// Kills of a case, shared among its runs.
const KILLS: usize = 20;

struct Case {
    config: &'static str,
    set: &'static [&'static str],
    /// Said after those.
    more: &'static [&'static str],
    /// Ranks of its lives, one after the other.
    ranks: &'static [usize],
    /// Longest life before a kill, for a start.
    longest_ms: u64,
}

/// Ranks that share the batches of a run in four shards.
const WORLDS: &[usize] = &[4, 2, 1, 4];

const TOY: Case = Case {
    config: "tms_5-2.toml",
    set: &[
        "train.steps=600",
        "train.batch_size=512",
        "train.faithfulness_warmup.steps=20",
        "target.train.steps=400",
        "checkpoint.every=25",
        "log.every=7",
        "eval.every=100",
        "eval.batches=2",
        "eval.batch_size=256",
    ],
    more: &[],
    ranks: &[1],
    longest_ms: 400,
};

const SHARED_TOY: Case = Case {
    more: &["train.shards=4"],
    ranks: WORLDS,
    ..TOY
};

/// Adversaries that all ranks climb together, in the loss and in evaluations.
const SHARED_ADVERSARY: Case = Case {
    config: "resid_mlp2.toml",
    set: both::SHARED_ADVERSARY,
    more: &["train.steps=200", "eval.every=50"],
    ranks: WORLDS,
    longest_ms: 700,
};

const SHARED_LANGUAGE_MODEL: Case = Case {
    more: &[
        "train.steps=200",
        "train.batch_size=4",
        "train.shards=4",
        "eval.batch_size=4",
    ],
    ranks: WORLDS,
    longest_ms: 700,
    ..LANGUAGE_MODEL
};

const LANGUAGE_MODEL: Case = Case {
    config: "shakespeare.toml",
    set: &[
        "train.steps=500",
        "train.batch_size=2",
        "train.faithfulness_warmup.steps=5",
        "target.dtype=bf16",
        "target.n_layer=1",
        "target.d_model=32",
        "target.d_mlp=64",
        "target.train.steps=200",
        "target.train.batch_size=4",
        "data.seq_len=32",
        "checkpoint.every=4",
        "log.every=3",
        "eval.every=100",
        "eval.batches=2",
        "eval.batch_size=2",
    ],
    more: &[],
    ranks: &[1],
    longest_ms: 250,
};

/// Who is killed.
#[derive(Clone, Copy)]
enum Victim {
    Launcher,
    Rank(usize),
}

/// What came of a launcher that was to be killed.
enum Life {
    Killed,
    /// The rank of the last life was not quite dead yet, and held its lock.
    LockedOut,
    Finished,
}

/// A working directory with the data that shakespeare.toml names, and a cache of targets of its own.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        // Text enough for a few thousand windows; what it says does not matter.
        let text: String = (0..4000)
            .map(|line| format!("line {line} of {}\n", line * line % 97))
            .collect();
        fs::write(dir.path().join("text.txt"), text).unwrap();
        let place = Self(dir);
        let status = place
            .command(&[
                "tokenize",
                "text.txt",
                "--tokenizer",
                "bytes",
                "--out",
                "data/shakespeare",
            ])
            .status();
        assert!(status.unwrap().success());
        place
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command
            .args(args)
            .current_dir(self.0.path())
            .env("SPD_CACHE", self.0.path().join("cache"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    fn run(&self, case: &Case, out: &str, threads: &str, ranks: usize) -> Command {
        let config = Path::new(CONFIGS).join(case.config);
        let ranks = ranks.to_string();
        let mut args = vec![config.to_str().unwrap(), "--out", out, "--threads", threads];
        args.extend(["--cpus", &ranks]);
        for set in case.set.iter().chain(case.more) {
            args.extend(["--set", set]);
        }
        self.command(&args)
    }

    /// A launcher, or one of its ranks, killed after `life`, unless it ends before.
    fn life(&self, mut command: Command, victim: Victim, life: Duration) -> Life {
        let mut launcher = command.spawn().unwrap();
        sleep(life);
        let of_launcher = children(launcher.id());
        if let Victim::Rank(rank) = victim
            && let Some(&pid) = of_launcher.get(rank)
        {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            // One that is gone has ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            return match launcher.wait().unwrap().code() {
                Some(1) => Life::Killed,
                Some(0) => Life::Finished,
                code => panic!("{code:?}"),
            };
        }
        let lived = match launcher.try_wait().unwrap() {
            None => {
                launcher.kill().unwrap();
                launcher.wait().unwrap();
                Life::Killed
            }
            Some(status) if status.success() => Life::Finished,
            Some(status) => {
                assert_eq!(status.code(), Some(2), "{status}");
                Life::LockedOut
            }
        };
        // The rank dies with its launcher, a moment later.
        sleep(Duration::from_millis(30));
        lived
    }

    /// Every bit that a run leaves: its newest checkpoint's tensors (parameters, moments, target) and its rows.
    fn remains(&self, out: &str) -> (Vec<u8>, Vec<u8>) {
        let dir = self.0.path().join(out);
        let mut steps: Vec<PathBuf> = fs::read_dir(dir.join("checkpoints"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        steps.sort();
        let newest = steps.last().unwrap();
        (
            fs::read(newest.join("tensors.safetensors")).unwrap(),
            fs::read(dir.join("metrics.jsonl")).unwrap(),
        )
    }
}

fn assert_same(case: &Case, place: &Place, a: &str, b: &str) {
    let (tensors_a, rows_a) = place.remains(a);
    let (tensors_b, rows_b) = place.remains(b);
    assert!(
        tensors_a == tensors_b,
        "{}: the states of {a} and {b} differ",
        case.config
    );
    assert!(
        rows_a == rows_b,
        "{}: the rows of {a} and {b} differ",
        case.config
    );
    assert!(
        rows_a.iter().filter(|&&byte| byte == b'\n').count() > 20,
        "there are rows to compare"
    );
}

fn killed_is_unkilled(case: &Case) {
    let place = Place::new();
    let straight = |out: &str, threads: &str, ranks| {
        let status = place.run(case, out, threads, ranks).status();
        assert!(status.unwrap().success(), "{out}");
    };
    straight("straight", "1", 1);
    straight("two-threads", "2", 1);
    assert_same(case, &place, "straight", "two-threads");
    for &ranks in &case.ranks[1..] {
        let out = format!("ranks-{ranks}");
        straight(&out, "2", ranks);
        assert_same(case, &place, "straight", &out);
    }

    // A killed run trains its target anew, and is killed in that too. How far a life gets depends on the machine: a run
    // that ends before it was killed often is followed by one of shorter lives.
    let mut random = 88_172_645_463_325_252_u64;
    let mut longest_ms = case.longest_ms;
    let mut kills = 0;
    for round in 0..8 {
        let killed = format!("killed-{round}");
        fs::remove_dir_all(place.0.path().join("cache")).unwrap();
        while kills < KILLS {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let life = Duration::from_millis(30 + random % longest_ms);
            let threads = if kills % 2 == 0 { "1" } else { "2" };
            let ranks = case.ranks[kills % case.ranks.len()];
            let victim = match kills % 3 {
                1 => Victim::Rank(kills / 3 % ranks),
                _ => Victim::Launcher,
            };
            let command = place.run(case, &killed, threads, ranks);
            match place.life(command, victim, life) {
                Life::Killed => kills += 1,
                Life::LockedOut => (),
                Life::Finished => break,
            }
        }
        straight(&killed, "2", case.ranks[0]);
        assert_same(case, &place, "straight", &killed);
        if kills == KILLS {
            return;
        }
        longest_ms = (longest_ms / 2).max(1);
    }
    panic!("{}: eight runs finished after {kills} kills", case.config);
}

#[test]
fn a_killed_toy_ends_in_the_same_bits() {
    killed_is_unkilled(&TOY);
}

#[test]
fn a_killed_language_model_ends_in_the_same_bits() {
    killed_is_unkilled(&LANGUAGE_MODEL);
}

#[test]
fn a_killed_toy_ends_in_the_same_bits_by_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_TOY);
}

#[test]
fn so_does_one_with_an_adversary_that_all_ranks_share() {
    killed_is_unkilled(&SHARED_ADVERSARY);
}

#[test]
fn a_killed_language_model_ends_in_the_same_bits_by_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_LANGUAGE_MODEL);
}

/// SIGTERM: the state of the last finished step is saved, and the same command goes on from there.
#[test]
fn a_stopped_run_continues_where_it_was() {
    let place = Place::new();
    assert!(
        place
            .run(&TOY, "straight", "2", 1)
            .status()
            .unwrap()
            .success()
    );
    let launcher = place.run(&TOY, "stopped", "2", 1).spawn().unwrap();
    sleep(Duration::from_millis(700));
    let pid = rustix::process::Pid::from_raw(i32::try_from(launcher.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = launcher.wait_with_output().unwrap().status;
    assert!(matches!(status.code(), Some(0 | 3)), "{status}");
    assert!(
        place
            .run(&TOY, "stopped", "1", 1)
            .status()
            .unwrap()
            .success()
    );
    assert_same(&TOY, &place, "straight", "stopped");
}
