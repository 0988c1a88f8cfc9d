//! A killed run gives the same bits as an undisturbed one, also with other numbers of ranks.
//!
//! The cases are shortened shipped run files, with their targets, sites, losses and updates.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

use tempfile::TempDir;

use crate::scratch::Running;

use crate::both::{self, children};

const BINARY: &str = env!("CARGO_BIN_EXE_spd-launch");
const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// Kills of a case, shared among its runs.
const KILLS: usize = 20;

struct Case {
    config: &'static str,
    set: &'static [&'static str],
    /// Further `--set`s.
    more: &'static [&'static str],
    /// Nodes of its launches, in turn, and ranks of each node.
    worlds: &'static [World],
    /// Maximum time before the first kill.
    longest_ms: u64,
}

/// Nodes, all of them this machine, and ranks of each.
type World = (usize, usize);

/// Ranks that share the batches of a run in four shards.
const WORLDS: &[World] = &[(1, 4), (1, 2), (1, 1), (1, 4)];

/// The same on several nodes.
const NODES: &[World] = &[(2, 2), (4, 1), (1, 1), (2, 1)];

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
    worlds: &[(1, 1)],
    longest_ms: 400,
};

const SHARED_TOY: Case = Case {
    more: &["train.shards=4"],
    worlds: WORLDS,
    ..TOY
};

const TOY_ON_NODES: Case = Case {
    worlds: NODES,
    ..SHARED_TOY
};

/// Adversaries that all ranks share, in the loss and in evaluations.
const SHARED_ADVERSARY: Case = Case {
    config: "resid_mlp2.toml",
    set: both::SHARED_ADVERSARY,
    more: &["train.steps=200", "eval.every=50"],
    worlds: WORLDS,
    longest_ms: 700,
};

/// Two of its sites have a row for each head of a position.
const SHARED_HEADS: Case = Case {
    config: "kaufmann-toy.toml",
    set: &[
        "train.steps=120",
        "train.batch_size=8",
        "train.faithfulness_warmup.steps=5",
        "target.train.steps=40",
        "target.train.batch_size=8",
        "checkpoint.every=10",
        "log.every=7",
        "eval.every=40",
        "eval.batches=1",
        "eval.batch_size=8",
    ],
    more: &["train.shards=4"],
    worlds: WORLDS,
    longest_ms: 700,
};

/// Some of its sites have a row for each sequence.
const SHARED_FILTERS: Case = Case {
    config: "byte-filters.toml",
    set: &[
        "train.steps=120",
        "train.batch_size=8",
        "train.faithfulness_warmup.steps=5",
        "target.d_model=16",
        "target.train.steps=40",
        "target.train.batch_size=8",
        "data.seq_len=32",
        "checkpoint.every=10",
        "log.every=7",
        "eval.every=40",
        "eval.batches=1",
        "eval.batch_size=8",
    ],
    ..SHARED_HEADS
};

/// Adversaries that live on: sources that all ranks share, and those of elements of the batch.
const LIVING_ADVERSARIES: Case = Case {
    more: &[
        "train.steps=100",
        "train.batch_size=4",
        "train.shards=4",
        "eval.batch_size=4",
        "eval.every=50",
        "loss=[\
         { kind = 'importance_minimality', coeff = 1e-3, p = 2.0 }, \
         { kind = 'persistent_pgd_recon', coeff = 0.5, scope = 'broadcast_across_batch', \
           optimizer = 'adam', lr = { start = 0.05, shape = 'cosine' }, n_warmup_steps = 1 }, \
         { kind = 'persistent_pgd_recon_subset', coeff = 0.5, scope = 'per_batch_per_position', \
           optimizer = 'adam', beta1 = 0.5, lr = 0.05, start_frac = 0.1 }, \
         { kind = 'merged_recon', coeff = 0.5, scope = 'bc', pool = 2, adv_fraction = 0.5, \
           optimizer = 'momentum', momentum = 0.9, lr = 1 }]",
    ],
    worlds: WORLDS,
    longest_ms: 700,
    ..LANGUAGE_MODEL
};

const SHARED_LANGUAGE_MODEL: Case = Case {
    more: &[
        "train.steps=200",
        "train.batch_size=4",
        "train.shards=4",
        "eval.batch_size=4",
    ],
    worlds: WORLDS,
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
    worlds: &[(1, 1)],
    longest_ms: 250,
};

/// The process to kill.
#[derive(Clone, Copy)]
enum Victim {
    /// The launcher of a node.
    Launcher(usize),
    /// A rank of a node.
    Rank(usize, usize),
}

/// The result of a launch that was to be killed.
enum Life {
    Killed,
    /// The rank of the previous launch was not quite dead, and held its lock.
    LockedOut,
    Finished,
}

/// A working directory with the data of shakespeare.toml, and its own cache of targets.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        // Enough text for a few thousand windows; the content does not matter.
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

    /// The launchers of a run, one for each node.
    fn run(&self, case: &Case, out: &str, threads: &str, (nodes, ranks): World) -> Vec<Command> {
        let config = Path::new(CONFIGS).join(case.config);
        let ranks = ranks.to_string();
        let mut args = vec![config.to_str().unwrap(), "--out", out, "--threads", threads];
        args.extend(["--cpus", &ranks]);
        for set in case.set.iter().chain(case.more) {
            args.extend(["--set", set]);
        }
        let launcher = |node: usize| {
            let mut command = self.command(&args);
            if nodes > 1 {
                // Launchers whose peers are killed during the start need not wait for long.
                command.args(["--join-seconds", "10"]);
                let place = [("RANK", node), ("WORLD_SIZE", nodes)];
                command.envs(place.map(|(key, value)| (key, value.to_string())));
            }
            command
        };
        (0..nodes).map(launcher).collect()
    }

    /// An undisturbed run.
    fn straight(&self, case: &Case, out: &str, threads: &str, world: World) {
        let run = self.run(case, out, threads, world);
        for status in ends(started(run)) {
            assert!(status.success(), "{}, {out}: {status}", case.config);
        }
    }

    /// A run whose launcher or rank is killed after `life`, unless the run ends before.
    fn life(&self, run: Vec<Command>, victim: Victim, life: Duration) -> Life {
        let mut launchers = started(run);
        sleep(life);
        let (node, rank) = match victim {
            Victim::Launcher(node) => (node, None),
            Victim::Rank(node, rank) => (node, children(launchers[node].id()).get(rank).copied()),
        };
        match rank {
            Some(pid) => {
                let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                // The process has exited by itself.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            None => launchers[node].kill().unwrap(),
        }
        let ended = ends(launchers);
        // The ranks of a launcher die with it, a moment later.
        sleep(Duration::from_millis(30));
        let codes: Vec<Option<i32>> = ended.iter().map(ExitStatus::code).collect();
        assert!(
            codes.iter().all(|code| matches!(code, None | Some(0..=2))),
            "{codes:?}"
        );
        match codes[0] {
            Some(0) => Life::Finished,
            Some(2) => Life::LockedOut,
            _ => Life::Killed,
        }
    }

    /// The bits of a run's results: the tensors of its newest checkpoint (parameters, moments,
    /// target) and its rows.
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

fn started(run: Vec<Command>) -> Vec<Running> {
    let launchers = run.into_iter();
    launchers
        .map(|mut command| Running::of(&mut command))
        .collect()
}

fn ends(launchers: Vec<Running>) -> Vec<ExitStatus> {
    let launchers = launchers.into_iter();
    launchers
        .map(|mut launcher| launcher.wait().unwrap())
        .collect()
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
    place.straight(case, "straight", "1", (1, 1));
    place.straight(case, "two-threads", "2", (1, 1));
    assert_same(case, &place, "straight", "two-threads");
    for &world in &case.worlds[1..] {
        let out = format!("by-{world:?}");
        place.straight(case, &out, "2", world);
        assert_same(case, &place, "straight", &out);
    }

    // A killed run trains its target again, and is killed in that too. How far a launch gets
    // depends on the machine: a run that ends before enough kills is followed by one with shorter
    // launches.
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
            let world = case.worlds[kills % case.worlds.len()];
            let (nodes, ranks) = world;
            let node = kills / 2 % nodes;
            let victim = match kills % 3 {
                1 => Victim::Rank(node, kills / 3 % ranks),
                _ => Victim::Launcher(node),
            };
            let run = place.run(case, &killed, threads, world);
            match place.life(run, victim, life) {
                Life::Killed => kills += 1,
                Life::LockedOut => (),
                Life::Finished => break,
            }
        }
        place.straight(case, &killed, "2", case.worlds[0]);
        assert_same(case, &place, "straight", &killed);
        if kills == KILLS {
            return;
        }
        longest_ms = (longest_ms / 2).max(1);
    }
    panic!("{}: eight runs finished after {kills} kills", case.config);
}

#[test]
fn a_killed_toy_gives_the_same_bits() {
    killed_is_unkilled(&TOY);
}

#[test]
fn a_killed_language_model_gives_the_same_bits() {
    killed_is_unkilled(&LANGUAGE_MODEL);
}

#[test]
fn a_killed_toy_gives_the_same_bits_with_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_TOY);
}

#[test]
fn a_killed_toy_gives_the_same_bits_with_any_number_of_nodes() {
    killed_is_unkilled(&TOY_ON_NODES);
}

#[test]
fn a_killed_toy_with_a_shared_adversary_gives_the_same_bits() {
    killed_is_unkilled(&SHARED_ADVERSARY);
}

#[test]
fn a_killed_toy_with_rows_for_heads_gives_the_same_bits_with_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_HEADS);
}

#[test]
fn a_killed_run_with_rows_for_sequences_gives_the_same_bits_with_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_FILTERS);
}

#[test]
fn a_killed_language_model_gives_the_same_bits_with_any_number_of_ranks() {
    killed_is_unkilled(&SHARED_LANGUAGE_MODEL);
}

#[test]
fn a_killed_run_with_adversaries_that_live_on_gives_the_same_bits_with_any_number_of_ranks() {
    killed_is_unkilled(&LIVING_ADVERSARIES);
}

/// After SIGTERM the last finished step is saved, and the same command continues from there.
#[test]
fn a_stopped_run_continues_from_its_last_step() {
    let place = Place::new();
    place.straight(&TOY, "straight", "2", (1, 1));
    let launcher = started(place.run(&TOY, "stopped", "2", (1, 1)));
    sleep(Duration::from_millis(700));
    let pid = rustix::process::Pid::from_raw(i32::try_from(launcher[0].id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = ends(launcher)[0];
    assert!(matches!(status.code(), Some(0 | 3)), "{status}");
    place.straight(&TOY, "stopped", "1", (1, 1));
    assert_same(&TOY, &place, "straight", "stopped");
}
