//! Launches with a time limit, and checks common to all of them.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::both::{Guarded, children, is_gone, unstamped};
use crate::suite::Case;

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_spd-launch");

/// Time limit of a launch: the small runs take a second, alone on the machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Maximum resident memory of a launcher, in KiB.
pub(crate) const MOST_KIB: u64 = 50 << 10;

/// Lines of a stream that a fault report shows.
const SHOWN: usize = 12;

/// A running launch.
pub(crate) struct Running {
    pub(crate) child: Guarded,
    command: String,
    streams: [Option<JoinHandle<Vec<u8>>>; 2],
}

/// The result of a launch.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stderr: String,
}

/// The launcher in a directory; trained targets are kept in `cache` there.
pub(crate) fn launcher(dir: &Path) -> Command {
    in_place(Command::new(BINARY), dir)
}

/// The launcher as `"$@"` of a script.
pub(crate) fn scripted(dir: &Path, script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", BINARY]);
    in_place(command, dir)
}

/// The launcher with 6 GB of address space, so that no file exhausts the machine's memory.
pub(crate) fn guarded(dir: &Path) -> Command {
    scripted(dir, "ulimit -v 6000000; exec \"$@\"")
}

fn in_place(mut command: Command, dir: &Path) -> Command {
    command
        .current_dir(dir)
        .env("SPD_CACHE", dir.join("cache"))
        .stdin(Stdio::null());
    command
}

impl Case {
    /// Starts a launch whose streams are read.
    pub(crate) fn start(&mut self, mut command: Command) -> Running {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        self.start_unread(command)
    }

    /// Starts a launch whose streams are those of the command.
    pub(crate) fn start_unread(&mut self, mut command: Command) -> Running {
        let mut child = Guarded(command.spawn().unwrap());
        let streams = [
            child.stdout.take().map(read_to_end),
            child.stderr.take().map(read_to_end),
        ];
        Running {
            child,
            command: format!("{command:?}"),
            streams,
        }
    }

    /// Waits for a launch for at most `limit`.
    ///
    /// # Errors
    ///
    /// It is still running, panicked, or printed control characters.
    pub(crate) fn end(&mut self, mut running: Running, limit: Duration) -> Result<Ended, String> {
        let Some(status) = wait(&mut running.child, limit) else {
            let children = children(running.child.id());
            running.child.kill().unwrap();
            running.child.wait().unwrap();
            children.into_iter().for_each(wait_until_gone);
            let [_, stderr] = texts(running.streams);
            self.launches
                .push(told(&running.command, "killed by the farm", "", &stderr));
            return Err(format!("hangs: lives on after {} s", limit.as_secs()));
        };
        let [stdout, stderr] = texts(running.streams);
        self.launches.push(told(
            &running.command,
            &status.to_string(),
            &stdout,
            &stderr,
        ));
        for text in [&stdout, &stderr] {
            if text.contains("panicked") {
                return Err("panics".to_owned());
            }
            if let Some(control) = text.chars().find(|&c| c.is_control() && c != '\n') {
                return Err(format!("prints the control character {control:?}"));
            }
        }
        Ok(Ended { status, stderr })
    }

    /// Starts a launch and waits for it.
    ///
    /// # Errors
    ///
    /// As [`Self::end`], and when the exit code is not in `codes`.
    pub(crate) fn launch(&mut self, command: Command, codes: &[i32]) -> Result<Ended, String> {
        let running = self.start(command);
        let ended = self.end(running, LIMIT)?;
        ended.one_of(codes)?;
        Ok(ended)
    }
}

impl Ended {
    /// The exit code, which must be listed in `--help`.
    ///
    /// # Errors
    ///
    /// Another code, or none: it died of a signal.
    pub(crate) fn code(&self) -> Result<i32, String> {
        match self.status.code() {
            Some(code) if documented().contains(&code) => Ok(code),
            Some(code) => Err(format!("leaves with code {code}, which --help has not")),
            None => Err(format!("ends by a signal: {}", self.status)),
        }
    }

    /// The exit code, which must be in `codes`.
    pub(crate) fn one_of(&self, codes: &[i32]) -> Result<i32, String> {
        let code = self.code()?;
        if codes.contains(&code) {
            return Ok(code);
        }
        Err(format!(
            "leaves with code {code}, expected one of {codes:?}"
        ))
    }

    /// The first error line.
    ///
    /// # Errors
    ///
    /// There is none, or it is empty.
    pub(crate) fn error(&self) -> Result<&str, String> {
        let mut lines = self.stderr.lines();
        match lines.find_map(|line| line.strip_prefix("error: ")) {
            Some(line) if !line.trim().is_empty() => Ok(line),
            _ => Err("no line begins with `error: `".to_owned()),
        }
    }
}

/// The exit codes listed in `--help`.
fn documented() -> &'static BTreeSet<i32> {
    static CODES: OnceLock<BTreeSet<i32>> = OnceLock::new();
    CODES.get_or_init(|| {
        let help = Command::new(BINARY).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let (_, list) = help.split_once("Exit codes:").unwrap();
        let codes = list.lines().flat_map(|line| {
            let words = line
                .trim()
                .split([',', ' '])
                .filter(|word| !word.is_empty());
            words.map_while(|word| word.parse().ok())
        });
        let codes: BTreeSet<i32> = codes.collect();
        assert!(codes.contains(&0) && codes.contains(&2), "{codes:?}");
        codes
    })
}

fn read_to_end(mut stream: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = vec![];
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// A stream that is not UTF-8 becomes one with a control character, which is a fault.
fn texts(streams: [Option<JoinHandle<Vec<u8>>>; 2]) -> [String; 2] {
    streams.map(|stream| {
        let bytes = stream.map_or(vec![], |stream| stream.join().unwrap());
        let text = String::from_utf8(bytes)
            .unwrap_or_else(|error| format!("\0{}", String::from_utf8_lossy(error.as_bytes())));
        unstamped(&text)
    })
}

fn told(command: &str, end: &str, stdout: &str, stderr: &str) -> String {
    let mut text = format!("  $ {command}\n  {end}\n");
    for (stream, name) in [(stdout, "stdout"), (stderr, "stderr")] {
        let lines: Vec<&str> = stream.lines().collect();
        for line in &lines[lines.len().saturating_sub(SHOWN)..] {
            let line: String = line.chars().take(400).collect();
            text.push_str(&format!("  {name}| {}\n", line.escape_debug()));
        }
    }
    text
}

/// Waits for a child for at most `limit`.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if started.elapsed() > limit {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for a process that is not a child.
pub(crate) fn wait_until_gone(pid: u32) {
    let started = Instant::now();
    while !is_gone(pid) {
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "process {pid} outlives its launcher"
        );
        thread::sleep(Duration::from_millis(2));
    }
}

/// Resident memory of a process, in KiB.
pub(crate) fn held_kib(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let mut lines = status.lines();
    let held = lines.find_map(|line| line.strip_prefix("RssAnon:"))?;
    held.trim().trim_end_matches(" kB").parse().ok()
}
