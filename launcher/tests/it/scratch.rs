//! A scratch directory to launch in, and the results of launches.

use std::fs;
use std::io::{self, Read};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::both::{Guarded, is_gone, unstamped};

/// Time limit of a wait for the next event; only failures reach it, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// The working directory of a test; `runs/x` is the run directory.
pub(crate) struct Scratch {
    dir: TempDir,
    program: PathBuf,
}

/// The result of a launch.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A child process of a test, and its output.
#[derive(Debug)]
pub(crate) struct Running {
    child: Guarded,
    stdout: Told,
    stderr: Told,
}

/// The output of a stream so far, and the thread that reads it; `None` if it is not read.
#[derive(Debug, Default)]
struct Told {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Told {
    fn by(mut stream: impl Read + Send + 'static) -> Self {
        let text: Arc<Mutex<Vec<u8>>> = Arc::default();
        let kept = Arc::clone(&text);
        let read = move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut piece) {
                kept.lock().unwrap().extend(&piece[..count]);
            }
        };
        let reader = Some(thread::spawn(read));
        Self { text, reader }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }

    fn len(&self) -> usize {
        self.text.lock().unwrap().len()
    }

    fn all(&mut self) -> String {
        self.reader.take().map(JoinHandle::join);
        String::from_utf8(self.text.lock().unwrap().clone()).unwrap()
    }
}

impl Running {
    /// Starts a command, with the streams that it specifies.
    pub(crate) fn of(command: &mut Command) -> Self {
        Self::try_of(command).unwrap()
    }

    /// Like [`Self::of`] for a program that may not be installed.
    pub(crate) fn try_of(command: &mut Command) -> io::Result<Self> {
        Ok(Self {
            child: Guarded(command.spawn()?),
            stdout: Told::default(),
            stderr: Told::default(),
        })
    }

    /// Waits until stderr contains a text, or the process has exited.
    pub(crate) fn has_said(&self, words: &str) {
        wait_until(words, || {
            let is_over = is_gone(self.child.id());
            is_over || self.stderr.so_far().contains(words)
        });
    }
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            program: env!("CARGO_BIN_EXE_spd-launch").into(),
        }
    }

    /// One whose launcher has the emulated GPU in the place of all GPUs.
    pub(crate) fn with_emulated_gpu() -> Self {
        let mut scratch = Self::new();
        scratch.program.pop();
        scratch.program.push("examples/spd-launch-emulated");
        assert!(
            scratch.program.try_exists().unwrap(),
            "no {}: add --examples to what cargo builds",
            scratch.program.display()
        );
        scratch
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path().join("runs/x")
    }

    /// The names of all entries.
    pub(crate) fn names(&self) -> Vec<String> {
        names(self.path())
    }

    /// The launcher with these arguments.
    pub(crate) fn launcher(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .current_dir(self.path())
            .args(arguments)
            .env("SPD_CACHE", self.path().join("cache"))
            .stdin(Stdio::null());
        command
    }

    /// A shell command in which `$LAUNCHER` is the launcher.
    pub(crate) fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .current_dir(self.path())
            .args(["-c", line])
            .env("LAUNCHER", &self.program)
            .stdin(Stdio::null());
        command
    }

    /// The launcher with the smallest shipped run, and a fake rank of the named behaviour.
    pub(crate) fn run(&self, behaviour: &str, arguments: &[&str]) -> Command {
        self.run_at("runs/x", behaviour, arguments)
    }

    /// Like [`Self::run`] in another run directory.
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

    /// The launcher with several such runs, in `runs/s`.
    pub(crate) fn sweep(&self, behaviour: &str, arguments: &[&str]) -> Command {
        self.launch_at("runs/s", behaviour, arguments)
    }

    /// The launcher with a shipped run file and a real rank; targets are cached in this directory.
    pub(crate) fn real(&self, config: &str, out: &str, set: &[&str]) -> Command {
        let config = format!("{}/../configs/{config}", env!("CARGO_MANIFEST_DIR"));
        let mut command = self.launcher(&[&config, "--out", out]);
        for set in set {
            command.args(["--set", set]);
        }
        command
    }

    /// Process id of the fake rank, once it handles signals.
    pub(crate) fn rank_pid(&self) -> u32 {
        self.rank_pid_of("runs/x")
    }

    /// Like [`Self::rank_pid`] for another run directory.
    pub(crate) fn rank_pid_of(&self, run_dir: &str) -> u32 {
        let run_dir = self.path().join(run_dir);
        wait_for_file(&run_dir.join("system.jsonl"));
        fs::read_to_string(run_dir.join("pid"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

/// Waits until a run has finished a step.
pub(crate) fn wait_until_it_trains(run_dir: &Path) {
    wait_until("a step of the run", || {
        let rows = fs::read_to_string(run_dir.join("system.jsonl")).unwrap_or_default();
        rows.lines()
            .any(|row| row.contains("\"train\"") && !row.contains("\"step\":0,"))
    });
}

/// Waits until a process has a handler for a signal; a launcher handles SIGCHLD once it handles
/// requests to stop.
pub(crate) fn wait_until_it_catches(pid: u32, signal: Signal) {
    wait_until("a handler", || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
        caught & 1 << (signal.as_raw() - 1) != 0
    });
}

/// Waits until a file exists.
pub(crate) fn wait_for_file(path: &Path) {
    wait_until(&path.display().to_string(), || fs::metadata(path).is_ok());
}

/// Waits for a condition.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "it never comes: {what}");
        thread::sleep(Duration::from_millis(2));
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

/// Starts a launch and captures its streams.
pub(crate) fn start(mut command: Command) -> Running {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::of(&mut command);
    running.stdout = Told::by(running.child.stdout.take().unwrap());
    running.stderr = Told::by(running.child.stderr.take().unwrap());
    running
}

/// Waits for a launch.
pub(crate) fn end(mut running: Running) -> Ended {
    let mut status = None;
    let mut said = 0;
    // A launch that goes on says something every ten seconds, however busy the machine is.
    while status.is_none() {
        wait_until("the end of a launch, or another line of it", || {
            let before = mem::replace(&mut said, running.stdout.len() + running.stderr.len());
            status = running.child.try_wait().unwrap();
            status.is_some() || said > before
        });
    }
    Ended {
        code: status.unwrap().code(),
        stdout: running.stdout.all(),
        stderr: unstamped(&running.stderr.all()),
    }
}

/// Runs a launch to its end.
pub(crate) fn launch(command: Command) -> Ended {
    end(start(command))
}

impl Ended {
    /// The first error line on stderr.
    pub(crate) fn error(&self) -> &str {
        self.stderr
            .lines()
            .find_map(|line| line.strip_prefix("error: "))
            .unwrap_or_default()
    }
}

/// Waits until a process has exited.
pub(crate) fn assert_goes(pid: u32) {
    wait_until(&format!("the end of process {pid}"), || is_gone(pid));
}
