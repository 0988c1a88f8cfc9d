//! A scratch directory to launch in, and what came out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::both::{is_gone, unstamped};

/// Where launches of one test happen; `runs/x` is the run directory.
pub(crate) struct Scratch(TempDir);

/// What a launch ended with.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path().join("runs/x")
    }

    /// Everything that stands here.
    pub(crate) fn names(&self) -> Vec<String> {
        names(self.path())
    }

    /// The launcher with arguments of its own.
    pub(crate) fn launcher(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spd-launch"));
        command
            .current_dir(self.path())
            .args(arguments)
            .env("SPD_CACHE", self.path().join("cache"))
            .stdin(Stdio::null());
        command
    }

    /// A line of shell in which `$LAUNCHER` is the launcher.
    pub(crate) fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .current_dir(self.path())
            .args(["-c", line])
            .env("LAUNCHER", env!("CARGO_BIN_EXE_spd-launch"))
            .stdin(Stdio::null());
        command
    }

    /// The launcher with the smallest shipped run, and a fake rank of the named behaviour.
    pub(crate) fn run(&self, behaviour: &str, arguments: &[&str]) -> Command {
        self.run_at("runs/x", behaviour, arguments)
    }

    /// The same in another run directory.
    pub(crate) fn run_at(&self, run_dir: &str, behaviour: &str, arguments: &[&str]) -> Command {
        let mut command = self.launch_at(run_dir, behaviour, &["--threads", "1"]);
        command.args(arguments);
        command
    }

    fn launch_at(&self, run_dir: &str, behaviour: &str, arguments: &[&str]) -> Command {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/tms_5-2.toml");
        let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/fake_rank.sh");
        let mut command = self.launcher(&[config, "--out", run_dir, "--rank-program", fake]);
        command
            .args(["--set", "train.batch_size=8"])
            .args(arguments);
        command.env("FAKE_RANK", behaviour);
        command
    }

    /// The launcher with several of those runs, in `runs/s`.
    pub(crate) fn sweep(&self, behaviour: &str, arguments: &[&str]) -> Command {
        self.launch_at("runs/s", behaviour, arguments)
    }

    /// The launcher with a run file of ours and a real rank; what it trains is kept in this directory.
    pub(crate) fn real(&self, config: &str, out: &str, set: &[&str]) -> Command {
        let config = format!("{}/../configs/{config}", env!("CARGO_MANIFEST_DIR"));
        let mut command = self.launcher(&[&config, "--out", out]);
        for set in set {
            command.args(["--set", set]);
        }
        command
    }

    /// Process id of the fake rank, once it is up and listens.
    pub(crate) fn rank_pid(&self) -> u32 {
        self.rank_pid_of("runs/x")
    }

    /// The same of a run in another directory.
    pub(crate) fn rank_pid_of(&self, run_dir: &str) -> u32 {
        let run_dir = self.path().join(run_dir);
        let started = Instant::now();
        while fs::metadata(run_dir.join("system.jsonl")).is_err() {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "no rank came up"
            );
            thread::sleep(Duration::from_millis(5));
        }
        fs::read_to_string(run_dir.join("pid"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

/// Waits until the run in a directory has made a step.
pub(crate) fn wait_until_it_trains(run_dir: &Path) {
    let started = Instant::now();
    let is_training = || {
        let rows = fs::read_to_string(run_dir.join("system.jsonl")).unwrap_or_default();
        rows.lines()
            .any(|row| row.contains("\"train\"") && !row.contains("\"step\":0,"))
    };
    while !is_training() {
        assert!(started.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Starts a launch whose streams are kept.
pub(crate) fn start(mut command: Command) -> Child {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a launch.
pub(crate) fn end(child: Child) -> Ended {
    Ended::of(child.wait_with_output().unwrap())
}

/// Launches and waits.
pub(crate) fn launch(command: Command) -> Ended {
    let mut command = assert_cmd::Command::from_std(command);
    Ended::of(command.timeout(Duration::from_secs(60)).output().unwrap())
}

impl Ended {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: unstamped(&String::from_utf8(output.stderr).unwrap()),
        }
    }

    /// The first line on stderr that tells of an error.
    pub(crate) fn error(&self) -> &str {
        self.stderr
            .lines()
            .find_map(|line| line.strip_prefix("error: "))
            .unwrap_or_default()
    }
}

/// Waits until a process is gone; fails after a second.
pub(crate) fn assert_goes(pid: u32) {
    let started = Instant::now();
    while !is_gone(pid) {
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "process {pid} lives on"
        );
        thread::sleep(Duration::from_millis(2));
    }
}
