//! `spd-launch stop RUN...`: asks the launchers of runs on this machine to save and leave, as a first Ctrl-C does.
//!
//! A number of a process proves nothing: it may be another process's by now, or one of another machine. So a signal is sent only to a
//! process that is held by a file descriptor, that the lock of the run names, and that has the lock file open, while somebody has the lock.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use spd_checkpoint::{Holder, Lock};
use spd_report::{Listed, Listing, State};
use spd_trainer::Fault;

use crate::cli::StopArgs;
use crate::exit::Exit;
use crate::run_dir::RunDir;
use crate::screen;

/// Time between the two signals that mean `--now`: sooner than a quarter of a second the second is an echo of the first.
const BETWEEN: Duration = Duration::from_millis(400);

/// Asks every launcher, then waits for all of them, and says what came of it. One that cannot be asked keeps the others from nothing.
///
/// # Errors
///
/// Bad input, one line for each that is no run, does not run, or is not to be stopped from here. No other process gets a signal.
pub(crate) fn stop(asked: &StopArgs) -> Result<Exit, Fault> {
    let mut refused = Vec::new();
    let mut going = Vec::new();
    for path in &asked.runs {
        let run_dir = RunDir::at(path.clone());
        match ask(&run_dir, asked.now) {
            Ok(launcher) => going.push((run_dir, launcher)),
            Err(line) => refused.push(line),
        }
    }
    if !asked.no_wait {
        for (run_dir, launcher) in &going {
            let (place, pid) = (run_dir.path().display(), launcher.pid);
            screen::note(&format!(
                "{place}: asked process {pid}, and waiting until it has left"
            ));
        }
    }
    let mut has_failed = false;
    for (run_dir, launcher) in going {
        let place = run_dir.path().display();
        if asked.no_wait {
            screen::result(&format!("{place}: asked process {}\n", launcher.pid));
            continue;
        }
        wait_for(&launcher.fd).map_err(|error| {
            Fault::Failed(anyhow::anyhow!(
                "{place}: its end cannot be waited for: {error}"
            ))
        })?;
        let (state, note) = state(run_dir.path());
        has_failed |= match state {
            State::Killed => !asked.now,
            state => matches!(state, State::Failed | State::Running),
        };
        let note = note.unwrap_or_else(|| format!("it is {}", state.name()));
        screen::result(&format!("{place}: {note}\n"));
    }
    if !refused.is_empty() {
        return Err(Fault::BadInput(refused.join("\n")));
    }
    Ok(if has_failed { Exit::Failed } else { Exit::Done })
}

/// A launcher that was asked to leave.
struct Launcher {
    pid: u32,
    fd: OwnedFd,
}

/// Asks the launcher of a run or of a sweep.
fn ask(run_dir: &RunDir, now: bool) -> Result<Launcher, String> {
    let place = run_dir.path().display();
    if !run_dir.config().is_file() && !run_dir.sweep().is_file() {
        return Err(format!(
            "{place}: is no run directory (with config.toml) nor that of a sweep (with sweep.json); `spd-launch runs` lists those there are"
        ));
    }
    let holder = Lock::holder(&run_dir.logs()).map_err(|error| error.to_string())?;
    let holder = holder.unwrap_or_default();
    let host = Lock::host();
    let elsewhere = holder.host.as_ref().filter(|of| **of != host);
    if !holder.is_held {
        let (state, note) = state(run_dir.path());
        let note = note.map_or(String::new(), |note| format!(": {note}"));
        return Err(match (state, elsewhere) {
            (State::Running, Some(elsewhere)) => {
                format!("{place}: runs on {elsewhere}, and this is {host}: stop it there")
            }
            (state, _) => format!("{place}: does not run; it is {}{note}", state.name()),
        });
    }
    if let Some(elsewhere) = elsewhere {
        return Err(format!(
            "{place}: runs on {elsewhere}, and this is {host}: stop it there"
        ));
    }
    let lock = run_dir.logs().join("lock");
    let Some(pid) = holder.pid else {
        return Err(format!(
            "{}: somebody has it, and it does not say which process; try again",
            lock.display()
        ));
    };
    let fd = proven(pid, &lock, &holder, run_dir).map_err(|why| format!("{place}: {why}"))?;
    let send = || pidfd_send_signal(&fd, Signal::TERM);
    let mut sent = send();
    if now && sent.is_ok() {
        thread::sleep(BETWEEN);
        // One that has left by then did as it was asked.
        sent = send().or_else(|error| match error {
            Errno::SRCH => Ok(()),
            error => Err(error),
        });
    }
    match sent {
        Ok(()) => Ok(Launcher { pid, fd }),
        Err(Errno::PERM) => Err(format!("{place}: {}", of_another(pid))),
        Err(Errno::SRCH) => Err(format!(
            "{place}: its launcher (process {pid}) has just left"
        )),
        Err(error) => Err(format!("{place}: process {pid} cannot be asked: {error}")),
    }
}

/// The process of this number, if it is the one that has the lock of the run.
fn proven(pid: u32, lock: &Path, holder: &Holder, run_dir: &RunDir) -> Result<OwnedFd, String> {
    let not_here = || {
        format!(
            "process {pid}, which {} names, is not its launcher as seen from here: it may run in a container, or the lock is another \
             machine's; stop it where it was started",
            lock.display()
        )
    };
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(not_here)?;
    let fd = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(Errno::SRCH) => return Err(not_here()),
        Err(error) => return Err(format!("process {pid} cannot be looked at: {error}")),
    };
    match has_open(pid, lock) {
        Ok(true) => {}
        Ok(false) => return Err(not_here()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(of_another(pid));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_here()),
        Err(error) => return Err(format!("process {pid} cannot be looked at: {error}")),
    }
    // Whoever has it now has had it all the while, or is another.
    let again = Lock::holder(&run_dir.logs()).map_err(|error| error.to_string())?;
    match again {
        Some(again) if again.is_held && again.pid == holder.pid => Ok(fd),
        _ => Err(format!("its launcher (process {pid}) has just left")),
    }
}

/// Whether a process has a file open.
fn has_open(pid: u32, path: &Path) -> io::Result<bool> {
    let sought = fs::metadata(path)?;
    let sought = (sought.dev(), sought.ino());
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // One that is closed meanwhile is not it.
        let found = entry.and_then(|entry| fs::metadata(entry.path()));
        if found.is_ok_and(|found| (found.dev(), found.ino()) == sought) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn of_another(pid: u32) -> String {
    let uid = fs::metadata(format!("/proc/{pid}")).map(|found| found.uid());
    let whose = uid.map_or("another user's".to_owned(), |uid| format!("of user {uid}"));
    format!("its launcher (process {pid}) is {whose}: that user can stop it, or root")
}

/// Waits until a process is gone.
fn wait_for(process: &OwnedFd) -> io::Result<()> {
    loop {
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(1..) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How a run or a sweep is now.
fn state(path: &Path) -> (State, Option<String>) {
    let listing = Listing::of(path).map(|listing| listing.found);
    match listing.unwrap_or_default().pop() {
        Some(Listed::Run(run)) => (run.state, run.note),
        Some(Listed::Sweep(sweep)) => (sweep.state, sweep.note),
        None => (State::Waiting, None),
    }
}
