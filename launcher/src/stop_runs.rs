//! `spd-launch stop RUN...`: asks the launchers of runs on this machine to save and exit, as a
//! first Ctrl-C does.
//!
//! A process id alone proves nothing: it may have been reused, or be of another machine. A signal
//! is sent only through a pidfd to a process that the run's held lock names and that has the lock
//! file open.

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

/// Time between the two signals of `--now`: a second one within a quarter of a second would count
/// as the first.
const BETWEEN: Duration = Duration::from_millis(400);

/// Number and interval of the attempts to read the name in a held lock.
const LOOKS: usize = 50;
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Asks every launcher, then waits for all of them, and prints the results. A launcher that cannot
/// be asked does not affect the others.
///
/// # Errors
///
/// Bad input, one line for each that is not a run, is not running, or cannot be stopped from here.
/// No other process gets a signal.
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
                "{place}: asked process {pid}; waiting until it has exited"
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
                "{place}: cannot wait for its exit: {error}"
            ))
        })?;
        let (state, note, _) = look(run_dir.path());
        has_failed |= match state {
            State::Killed => !asked.now,
            state => matches!(state, State::Failed | State::Running),
        };
        let note = match (state, note) {
            (State::Running, _) => format!(
                "process {} has exited, and another launcher runs it now",
                launcher.pid
            ),
            (_, Some(note)) => note,
            (state, None) => format!("it is {}", state.name()),
        };
        screen::result(&format!("{place}: {note}\n"));
    }
    if !refused.is_empty() {
        return Err(Fault::BadInputs(refused));
    }
    Ok(if has_failed { Exit::Failed } else { Exit::Done })
}

/// A launcher that was asked to exit.
struct Launcher {
    pid: u32,
    fd: OwnedFd,
}

/// Why a launcher is not asked.
enum Refusal {
    /// A final reason.
    Plain(String),
    /// A reason that may be temporary, while a launcher takes or releases the lock.
    ForNow(String),
}

/// Asks the launcher of a run or of a sweep.
fn ask(run_dir: &RunDir, now: bool) -> Result<Launcher, String> {
    let mut looks = 0..LOOKS;
    loop {
        match ask_once(run_dir, now) {
            Ok(launcher) => return Ok(launcher),
            Err(Refusal::ForNow(_)) if looks.next().is_some() => thread::sleep(LOOK_EVERY),
            Err(Refusal::ForNow(line) | Refusal::Plain(line)) => return Err(line),
        }
    }
}

fn ask_once(run_dir: &RunDir, now: bool) -> Result<Launcher, Refusal> {
    let place = run_dir.path().display();
    if !run_dir.config().is_file() && !run_dir.sweep().is_file() {
        return Err(Refusal::Plain(format!(
            "{place}: neither a run directory (with config.toml) nor a sweep's (with sweep.json); `spd-launch runs` lists those there are"
        )));
    }
    // The same look at the lock gives the holder and the state.
    let (state, note, holder) = look(run_dir.path());
    let holder = match holder {
        Some(holder) => holder,
        None => Lock::holder(&run_dir.logs())
            .map_err(|error| Refusal::Plain(error.to_string()))?
            .unwrap_or_default(),
    };
    let host = Lock::host();
    let elsewhere = holder.host.as_ref().filter(|of| **of != host);
    if let Some(elsewhere) = elsewhere.filter(|_| holder.is_held || state == State::Running) {
        return Err(Refusal::Plain(format!(
            "{place}: runs on {elsewhere}, and this is {host}: stop it there"
        )));
    }
    if !holder.is_held {
        let note = note.map_or(String::new(), |note| format!(": {note}"));
        let line = format!("{place}: does not run; it is {}{note}", state.name());
        return Err(Refusal::Plain(line));
    }
    let lock = run_dir.logs().join("lock");
    let Some(pid) = holder.pid else {
        return Err(Refusal::ForNow(format!(
            "{}: held by an unknown process; try again",
            lock.display()
        )));
    };
    let fd = proven(pid, &lock, &holder, run_dir)
        .map_err(|why| Refusal::ForNow(format!("{place}: {why}")))?;
    let send = || pidfd_send_signal(&fd, Signal::TERM);
    let mut sent = send();
    if now && sent.is_ok() {
        thread::sleep(BETWEEN);
        // A launcher that has exited by then did as asked.
        sent = send().or_else(|error| match error {
            Errno::SRCH => Ok(()),
            error => Err(error),
        });
    }
    match sent {
        Ok(()) => Ok(Launcher { pid, fd }),
        Err(Errno::PERM) => Err(Refusal::Plain(format!("{place}: {}", of_another(pid)))),
        Err(Errno::SRCH) => Err(Refusal::ForNow(format!(
            "{place}: its launcher (process {pid}) has just exited"
        ))),
        Err(error) => Err(Refusal::Plain(format!(
            "{place}: cannot signal process {pid}: {error}"
        ))),
    }
}

/// A pidfd of this process, if it holds the lock of the run.
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
        Err(error) => return Err(format!("cannot examine process {pid}: {error}")),
    };
    match has_open(pid, lock) {
        Ok(true) => {}
        Ok(false) => return Err(not_here()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(of_another(pid));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_here()),
        Err(error) => return Err(format!("cannot examine process {pid}: {error}")),
    }
    // The current holder has held it all the while, or is another process.
    let again = Lock::holder(&run_dir.logs()).map_err(|error| error.to_string())?;
    match again {
        Some(again) if again.is_held && again.pid == holder.pid => Ok(fd),
        _ => Err(format!("its launcher (process {pid}) has just exited")),
    }
}

/// Whether a process has a file open.
fn has_open(pid: u32, path: &Path) -> io::Result<bool> {
    let sought = fs::metadata(path)?;
    let sought = (sought.dev(), sought.ino());
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor that is closed meanwhile is skipped.
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

/// Waits for the exit of a process.
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

/// The state of a run or a sweep, and the current or last holder of its lock.
fn look(path: &Path) -> (State, Option<String>, Option<Holder>) {
    let listing = Listing::of(path).map(|listing| listing.found);
    match listing.unwrap_or_default().pop() {
        Some(Listed::Run(run)) => (run.state, run.note, run.holder),
        Some(Listed::Sweep(sweep)) => (sweep.state, sweep.note, sweep.holder),
        None => (State::Waiting, None, None),
    }
}
