//! Small runs, and the bits of their results.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::both::SHARED_ADVERSARY;
use crate::launch::{launcher, wait};
use crate::random::Random;

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// The run directory in the directory of a case.
pub(crate) const RUN: &str = "runs/x";

/// A shortened run file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Small {
    pub(crate) config: &'static str,
    pub(crate) set: &'static [&'static str],
    /// Further `--set`s.
    pub(crate) more: &'static [&'static str],
}

pub(crate) const TOY: Small = Small {
    config: "tms_5-2.toml",
    set: &[
        "train.steps=400",
        "train.batch_size=128",
        "train.faithfulness_warmup.steps=20",
        "target.train.steps=300",
        "target.train.batch_size=64",
        "checkpoint.every=40",
        "log.every=5",
        "eval.every=100",
        "eval.batches=2",
        "eval.batch_size=64",
    ],
    more: &[],
};

pub(crate) const TEXT: Small = Small {
    config: "shakespeare.toml",
    set: &[
        "train.steps=120",
        "train.batch_size=2",
        "train.faithfulness_warmup.steps=5",
        "target.n_layer=1",
        "target.d_model=16",
        "target.d_mlp=16",
        "target.n_head=2",
        "target.train.steps=60",
        "target.train.batch_size=2",
        "data.seq_len=16",
        "checkpoint.every=20",
        "log.every=3",
        "eval.every=60",
        "eval.batches=2",
        "eval.batch_size=2",
    ],
    more: &[],
};

/// Runs with batches in four shards, which up to four ranks may share: one with adversaries that
/// all ranks share, and language models.
pub(crate) const SHARED_TOY: Small = Small {
    config: "resid_mlp2.toml",
    set: SHARED_ADVERSARY,
    more: &[],
};

pub(crate) const SHARED_TEXT: Small =
    TEXT.with(&["train.batch_size=4", "train.shards=4", "eval.batch_size=4"]);

/// The recipe of 2026 on the same text: adversaries that live on, a transformer that rates all
/// sites.
pub(crate) const SHARED_MODERN: Small = Small {
    config: "shakespeare-modern.toml",
    more: &[
        "train.batch_size=4",
        "train.shards=4",
        "eval.batch_size=4",
        "importance.blocks_per_chunk=1",
        "importance.d_model=16",
        "importance.n_layer=1",
        "importance.n_head=2",
        "importance.hidden=16",
    ],
    ..TEXT
};

pub(crate) const SHARED_TMS: Small = TOY.with(&["train.shards=4"]);

impl Small {
    /// A random number of ranks for its next launch.
    pub(crate) fn ranks(&self, random: &mut Random) -> usize {
        let mut set = self.set.iter().chain(self.more);
        match set.any(|set| *set == "train.shards=4") {
            true => *random.one(&[1, 2, 4]),
            false => 1,
        }
    }

    pub(crate) const fn with(self, more: &'static [&'static str]) -> Self {
        Self { more, ..self }
    }

    /// The command for this run in a directory with its data.
    pub(crate) fn command(&self, dir: &Path) -> Command {
        self.complete(launcher(dir))
    }

    /// Adds the arguments of this run to a command.
    pub(crate) fn complete(&self, mut command: Command) -> Command {
        command.arg(config(self.config));
        command.args(["--out", RUN, "--threads", "1"]);
        for set in self.set.iter().chain(self.more) {
            command.args(["--set", set]);
        }
        command
    }
}

pub(crate) fn config(name: &str) -> PathBuf {
    Path::new(CONFIGS).join(name)
}

/// Makes the datasets of shakespeare.toml, replacing existing ones.
///
/// - `factor`: selects the text; its length is constant
pub(crate) fn make_data(dir: &Path, factor: usize) {
    // Enough for a few thousand windows; the content does not matter.
    let text: String = (0..2000)
        .map(|line| format!("line {line:4} of {:2}\n", line * line * factor % 97))
        .collect();
    fs::write(dir.join("text.txt"), text).unwrap();
    let mut command = launcher(dir);
    command.args(["tokenize", "text.txt", "--tokenizer", "bytes"]);
    command.args(["--out", "data/shakespeare", "--overwrite"]);
    assert!(command.output().unwrap().status.success());
}

/// An undisturbed run.
pub(crate) struct Uninterrupted {
    pub(crate) small: Small,
    pub(crate) took: Duration,
    dir: TempDir,
    remains: Results,
}

/// The bits of a run's results: the tensors of its newest checkpoint (parameters, moments, target)
/// and its rows.
#[derive(PartialEq)]
struct Results {
    tensors: Vec<u8>,
    rows: Vec<u8>,
}

impl Uninterrupted {
    pub(crate) fn of(small: Small) -> Self {
        let dir = tempfile::tempdir().unwrap();
        make_data(dir.path(), 1);
        let started = Instant::now();
        let output = small.command(dir.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self {
            small,
            took: started.elapsed(),
            remains: Results::of(&dir.path().join(RUN)).unwrap(),
            dir,
        }
    }

    /// Several runs, as many at a time as there are cores, so that their times are comparable with
    /// those of cases.
    pub(crate) fn of_each(small: &[Small]) -> Vec<Self> {
        let cores = thread::available_parallelism().map_or(1, Into::into);
        let at_a_time = |small: &[Small]| -> Vec<Self> {
            thread::scope(|scope| {
                let runs = small
                    .iter()
                    .map(|&small| scope.spawn(move || Self::of(small)));
                let runs: Vec<_> = runs.collect();
                runs.into_iter().map(|run| run.join().unwrap()).collect()
            })
        };
        small.chunks(cores).flat_map(at_a_time).collect()
    }

    /// Copies the data of the run into another directory, and optionally its trained target.
    pub(crate) fn furnish(&self, dir: &Path, cached: bool) {
        copy(&self.dir.path().join("data"), &dir.join("data"));
        if cached {
            copy(&self.dir.path().join("cache"), &dir.join("cache"));
        }
    }

    /// Replaces a trained target by that of this run.
    pub(crate) fn put_target(&self, place: &Path) {
        let mut files = tree(&self.dir.path().join("cache"));
        files.retain(|path| path.ends_with("target.safetensors"));
        fs::copy(&files[0], place).unwrap();
    }

    /// The directory with the finished run.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A directory with this run stopped halfway, after two checkpoints.
    pub(crate) fn stopped(&self) -> TempDir {
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            self.furnish(dir.path(), true);
            let mut command = self.small.command(dir.path());
            command.stdout(Stdio::null()).stderr(Stdio::null());
            let mut launcher = command.spawn().unwrap();
            let checkpoints = dir.path().join(RUN).join("checkpoints");
            while steps(&checkpoints).len() < 2 && launcher.try_wait().unwrap().is_none() {
                thread::sleep(Duration::from_millis(1));
            }
            send(launcher.id(), Signal::TERM);
            let status = wait(&mut launcher, Duration::from_secs(30)).unwrap();
            if status.code() == Some(3) {
                return dir;
            }
            assert_eq!(status.code(), Some(0));
        }
        panic!("{}: is over before it can be stopped", self.small.config);
    }

    /// Compares the bits of the run in `dir`.
    ///
    /// # Errors
    ///
    /// The first difference.
    pub(crate) fn compare(&self, dir: &Path) -> Result<(), String> {
        self.compare_state(dir)?;
        let remains = Results::of(&dir.join(RUN))?;
        if remains.rows != self.remains.rows {
            return Err("metrics.jsonl differs from that of the straight run".to_owned());
        }
        Ok(())
    }

    /// Compares the last checkpoint only.
    ///
    /// # Errors
    ///
    /// That it differs.
    pub(crate) fn compare_state(&self, dir: &Path) -> Result<(), String> {
        let remains = Results::of(&dir.join(RUN))?;
        if remains.tensors != self.remains.tensors {
            return Err("the last checkpoint differs from that of the straight run".to_owned());
        }
        Ok(())
    }
}

impl Results {
    fn of(run: &Path) -> Result<Self, String> {
        let checkpoints = run.join("checkpoints");
        let steps = steps(&checkpoints);
        let newest = steps.last().ok_or("there is no checkpoint at the end")?;
        let read = |path: &Path| {
            spd_files::read(path).map_err(|error| format!("{} at the end: {error}", path.display()))
        };
        Ok(Self {
            tensors: read(&checkpoints.join(newest).join("tensors.safetensors"))?,
            rows: read(&run.join("metrics.jsonl"))?,
        })
    }
}

/// Names of the complete checkpoints, in order.
pub(crate) fn steps(checkpoints: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(checkpoints) else {
        return vec![];
    };
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut steps: Vec<String> = names
        .filter(|name| {
            let digits = name.strip_prefix("step-");
            digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
        })
        .collect();
    steps.sort();
    steps
}

/// Copies a directory recursively.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// All paths below a directory, sorted, without the cache of verified datasets, which a dry run may
/// extend.
pub(crate) fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut paths = vec![];
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() == "cache"
            && names(&entry.path()).iter().all(|name| name == "datasets")
        {
            continue;
        }
        if dir.ends_with("cache") && entry.file_name() == "datasets" {
            continue;
        }
        paths.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            paths.extend(tree(&entry.path()));
        }
    }
    paths.sort();
    paths
}

/// The names in a directory; none if it does not exist.
fn names(dir: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// Sends a signal to a process, which may have exited.
pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // The process has exited by itself.
    let _ = kill_process(pid, signal);
}
