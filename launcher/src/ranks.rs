//! Ranks and runs of a sweep as child processes: this program again, never outliving its launcher.

use std::env;
use std::ffi::OsString;
use std::io::{self, PipeWriter};
use std::net::TcpListener;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use spd_trainer::SharedMemory;

use crate::channel;
use crate::nodes::mesh::Peers;
use crate::wait::wait_until;
use crate::world::{self, Node};

/// The path of this program's executable. It stays valid if the file is replaced or removed, so
/// that launcher and ranks have the same version.
///
/// # Errors
///
/// When the operating system does not provide it.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") {
        // `self` would be that of the process that follows the link; between fork and exec, a child
        // still has its parent's executable.
        return Ok("/proc/self/exe".into());
    }
    env::current_exe()
}

/// Sets the name of this process in process lists; after [`own_program`] it has another at first.
pub(crate) fn name_process() {
    #[cfg(target_os = "linux")]
    // The name is only informative.
    let _ = rustix::thread::set_name(c"spd-launch");
}

/// A command for a program, under its usual name.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    if program.starts_with("/proc") {
        command.arg0("spd-launch");
    }
    command
}

/// How long to wait for a killed process.
const GIVE_UP: Duration = Duration::from_secs(5);

/// Environment variables of glibc's heaps, which keep freed memory that no plan counts: one heap
/// for all threads, as a step allocates nothing, and what is larger than 1 MiB goes back to the
/// kernel when it is freed.
const HEAPS: [(&str, &str); 2] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "1048576"),
];

/// The program of a run's ranks.
#[derive(Debug)]
pub(crate) struct RankProgram {
    /// This program, except in tests of the launcher.
    pub(crate) path: PathBuf,
    /// Prepared run directory.
    pub(crate) run_dir: PathBuf,
    /// CPU threads of each rank.
    pub(crate) threads: usize,
    /// CPU threads of the rank that trains the target while the others wait.
    pub(crate) target_threads: usize,
    /// Whether each rank has a GPU.
    pub(crate) on_gpu: bool,
    /// Number of ranks on all nodes.
    pub(crate) ranks: usize,
    /// The ranks of this node.
    pub(crate) here: Range<usize>,
}

/// How the ranks of an attempt communicate.
#[derive(Debug)]
pub(crate) enum Transport {
    /// There is only one.
    Alone,
    /// In this shared memory.
    Memory(OwnedFd),
    /// Over network connections; each rank of this node has a listener.
    Connections {
        listeners: Vec<TcpListener>,
        peers: Peers,
    },
}

/// A child process. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    status: Option<ExitStatus>,
}

impl Transport {
    /// For the ranks of a program on one node.
    ///
    /// # Errors
    ///
    /// When no shared memory can be created.
    pub(crate) fn of(program: &RankProgram) -> io::Result<Self> {
        if program.ranks == 1 {
            return Ok(Self::Alone);
        }
        SharedMemory::file().map(Self::Memory)
    }
}

impl RankProgram {
    /// The command for a rank of this node.
    pub(crate) fn command(&self, rank: usize, meeting: &Transport) -> Command {
        let mut command = command(&self.path);
        command
            .arg("rank")
            .arg("--run-dir")
            .arg(&self.run_dir)
            .args(["--threads", &self.threads.to_string()]);
        if self.ranks > 1 {
            command.args(["--rank", &rank.to_string()]);
            command.args(["--ranks", &self.ranks.to_string()]);
        }
        let local = rank - self.here.start;
        if self.on_gpu {
            command.args(["--gpu", &local.to_string()]);
        }
        match meeting {
            Transport::Alone => {}
            Transport::Memory(memory) => share_memory(&mut command, memory),
            Transport::Connections { listeners, .. } => {
                hand_down(&mut command, "--listener-fd", listeners[local].as_fd());
            }
        }
        if self.target_threads > self.threads {
            command.args(["--target-threads", &self.target_threads.to_string()]);
        }
        for key in world::variables() {
            command.env_remove(key);
        }
        command.envs(Node::environment(rank, local, self.ranks));
        command.env(channel::KEY, "stdin");
        let open = HEAPS.iter().filter(|(key, _)| env::var_os(key).is_none());
        command.envs(open.copied());
        command
    }
}

impl Process {
    /// Starts a process that reads `input`; both its output streams go to `output`.
    ///
    /// It leads its own process group, so Ctrl-C on the terminal reaches the launcher only. Call
    /// this on the main thread: the kernel ties the child's life to the *thread* that started it.
    ///
    /// # Errors
    ///
    /// When the program cannot be started.
    pub(crate) fn start(
        mut command: Command,
        input: Stdio,
        output: PipeWriter,
    ) -> io::Result<Self> {
        command
            .stdin(input)
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        die_with_launcher(&mut command);
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            child,
            pid,
            status: None,
        })
    }

    /// Process id, for messages.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, or `None` while it runs.
    ///
    /// # Errors
    ///
    /// When the operating system cannot say.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Asks it to save and exit.
    pub(crate) fn ask(&self) {
        if self.status.is_none() {
            // It fails only if the process has exited, which `ended` reports.
            let _ = kill_process(self.pid, Signal::TERM);
        }
    }

    /// Kills it with everything it started, without waiting.
    pub(crate) fn send_kill(&self) {
        if self.status.is_none() {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Kills it with everything it started, and waits for its exit, for a limited time: a process
    /// that waits for a disk or a driver dies when that answers.
    pub(crate) fn kill(&mut self) {
        self.send_kill();
        wait_until(GIVE_UP, || !matches!(self.ended(), Ok(None)));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Passes the words of this process to the program, with options of the rank behind the name of the
/// command: behind a `--` of the user's they would be names.
pub(crate) fn same_words(command: &mut Command, name: &str, options: impl FnOnce(&mut Command)) {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    let named = words.iter().position(|word| word == name);
    let (before, after) = words.split_at(named.map_or(words.len(), |at| at + 1));
    command.args(before);
    options(command);
    command.args(after);
}

/// Passes the ranks' shared memory to the program.
pub(crate) fn share_memory(command: &mut Command, memory: &OwnedFd) {
    hand_down(command, "--memory-fd", memory.as_fd());
}

/// Passes a file descriptor to the program under the same number, as the argument of `option`.
fn hand_down(command: &mut Command, option: &str, file: BorrowedFd<'_>) {
    let fd: RawFd = file.as_raw_fd();
    command.args([option, &fd.to_string()]);
    let keep = move || {
        #[expect(unsafe_code, reason = "a descriptor is borrowed after the fork")]
        // SAFETY: the caller keeps the file open until the command has started.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(fcntl_setfd(fd, FdFlags::empty())?)
    };
    #[expect(unsafe_code, reason = "the only way to run code between fork and exec")]
    // SAFETY: `keep` makes one system call and neither allocates, locks nor panics.
    unsafe {
        command.pre_exec(keep);
    }
}

/// Has the kernel kill the process when the launcher dies in any way.
#[cfg(target_os = "linux")]
pub(crate) fn die_with_launcher(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let launcher = getpid();
    let tie = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A launcher that died before the line above sends no signal.
        if getppid() == Some(launcher) {
            Ok(())
        } else {
            Err(rustix::io::Errno::SRCH.into())
        }
    };
    #[expect(unsafe_code, reason = "the only way to run code between fork and exec")]
    // SAFETY: `tie` makes two system calls and neither allocates, locks nor panics, so it may run
    // in the child of a process with other threads.
    unsafe {
        command.pre_exec(tie);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn die_with_launcher(_command: &mut Command) {}
