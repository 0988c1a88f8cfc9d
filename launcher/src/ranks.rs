//! A rank is this program again, in a process of its own that cannot outlive its launcher; so is a run of a sweep.

use std::env;
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

/// Where this program is to be started from: the file that it runs from, though it be replaced or removed meanwhile, so that
/// launcher and ranks are never of two versions.
///
/// # Errors
///
/// When the operating system does not tell.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") {
        // Of whoever follows it: between fork and exec, a child is of the file of its parent.
        return Ok("/proc/self/exe".into());
    }
    env::current_exe()
}

/// Gives this process its name in lists of processes; one that was started by [`own_program`] has another at first.
pub(crate) fn name_process() {
    #[cfg(target_os = "linux")]
    // What it is called is of no use but to people.
    let _ = rustix::thread::set_name(c"spd-launch");
}

/// A command that starts a program, by its usual name.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    if program.starts_with("/proc") {
        command.arg0("spd-launch");
    }
    command
}

/// How long a process that was killed is waited for.
const GIVE_UP: Duration = Duration::from_secs(5);

/// How many heaps glibc makes for threads: each keeps some memory that no plan counts, and a step allocates nothing.
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// What is started.
#[derive(Debug)]
pub(crate) struct Program {
    /// This program, unless a test of the launcher says otherwise.
    pub(crate) path: PathBuf,
    /// Prepared run directory.
    pub(crate) run_dir: PathBuf,
    /// CPU threads of each rank.
    pub(crate) threads: usize,
    /// CPU threads of the rank that trains the target while others wait for it.
    pub(crate) target_threads: usize,
    /// Whether each rank has a GPU.
    pub(crate) on_gpu: bool,
    /// Number of ranks, on all nodes.
    pub(crate) ranks: usize,
    /// Those of this node.
    pub(crate) here: Range<usize>,
}

/// Where the ranks of an attempt meet.
#[derive(Debug)]
pub(crate) enum Meeting {
    /// There is one.
    Alone,
    /// They share this memory.
    Memory(OwnedFd),
    /// They have connections with each other, and each of this node has a listener for those.
    Connections {
        listeners: Vec<TcpListener>,
        peers: Peers,
    },
}

/// A started process of ours. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    status: Option<ExitStatus>,
}

impl Meeting {
    /// Of the ranks of a program, which are on one node.
    ///
    /// # Errors
    ///
    /// When there is no memory for them to share.
    pub(crate) fn of(program: &Program) -> io::Result<Self> {
        if program.ranks == 1 {
            return Ok(Self::Alone);
        }
        SharedMemory::file().map(Self::Memory)
    }
}

impl Program {
    /// The command that starts a rank of this node.
    pub(crate) fn command(&self, rank: usize, meeting: &Meeting) -> Command {
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
            Meeting::Alone => {}
            Meeting::Memory(memory) => share_memory(&mut command, memory),
            Meeting::Connections { listeners, .. } => {
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
        if env::var_os(ARENAS).is_none() {
            command.env(ARENAS, "2");
        }
        command
    }
}

impl Process {
    /// Starts a process that reads `input`; what it says on both streams goes to `output`.
    ///
    /// It leads a process group of its own, so a Ctrl-C on the terminal reaches the launcher only. Call
    /// this on the main thread: the kernel ties the process's life to the *thread* that started it.
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

    /// How it ended, or `None` while it runs.
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

    /// Asks it to save and leave.
    pub(crate) fn ask(&self) {
        if self.status.is_none() {
            // It fails only when the process is gone, which `ended` will tell.
            let _ = kill_process(self.pid, Signal::TERM);
        }
    }

    /// Ends it, with everything it started, and does not wait until it is gone.
    pub(crate) fn send_kill(&self) {
        if self.status.is_none() {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Ends it, with everything it started, and waits until it is gone; not for ever, as a process that waits for a disk or a driver
    /// dies when that answers.
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

/// Lets the program have the memory of ours that ranks share.
pub(crate) fn share_memory(command: &mut Command, memory: &OwnedFd) {
    hand_down(command, "--memory-fd", memory.as_fd());
}

/// Lets the program have a file of ours, under the same number, which it is told.
fn hand_down(command: &mut Command, option: &str, file: BorrowedFd<'_>) {
    let fd: RawFd = file.as_raw_fd();
    command.args([option, &fd.to_string()]);
    let keep = move || {
        #[expect(unsafe_code, reason = "a number stands for a file after the fork")]
        // SAFETY: whoever starts the command has the file open until it has started.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(fcntl_setfd(fd, FdFlags::empty())?)
    };
    #[expect(
        unsafe_code,
        reason = "code between fork and exec can be given in no other way"
    )]
    // SAFETY: `keep` makes one system call and neither allocates, locks nor panics.
    unsafe {
        command.pre_exec(keep);
    }
}

/// Has the kernel kill the process when the launcher dies, however it dies.
#[cfg(target_os = "linux")]
pub(crate) fn die_with_launcher(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let launcher = getpid();
    let tie = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A launcher that died before the line above will send no signal any more.
        if getppid() == Some(launcher) {
            Ok(())
        } else {
            Err(rustix::io::Errno::SRCH.into())
        }
    };
    #[expect(
        unsafe_code,
        reason = "code between fork and exec can be given in no other way"
    )]
    // SAFETY: `tie` makes two system calls and neither allocates, locks nor panics, so it may run in
    // the child of a process that has other threads.
    unsafe {
        command.pre_exec(tie);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn die_with_launcher(_command: &mut Command) {}
