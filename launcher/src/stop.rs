//! Signals to the launcher: the first asks the rank to save and leave, a second one does not wait. And waiting for them, for the end
//! of a process of ours, and for what these say, whichever comes first.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// Signals that ask for an orderly stop.
const ASKING: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGHUP];

/// Raised by each of them.
static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// A second signal sooner than this is the first one again: `timeout` sends its signal to the process
/// and then to the whole group.
const ECHO: Duration = Duration::from_millis(250);

/// What the user asks for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// Save and leave. Holds the signal.
    Leave(i32),
    /// Be gone. Holds the signal.
    LeaveNow(i32),
}

/// Listens for signals from its making on.
#[derive(Debug)]
pub(crate) struct Stop {
    seen: [Arc<AtomicBool>; ASKING.len()],
    asked: Option<Instant>,
    /// Has something to read when one of them, or the end of a process, has come.
    woken: UnixStream,
}

impl Stop {
    /// Installs the handlers: from here on a signal no longer ends this process.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub(crate) fn listen() -> io::Result<Self> {
        let seen = ASKING.map(|_| Arc::new(AtomicBool::new(false)));
        flag()?;
        let (woken, wake) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for (signal, seen) in ASKING.into_iter().zip(&seen).filter(|(s, _)| is_heard(*s)) {
            signal_hook::flag::register(signal, Arc::clone(seen))?;
            // After the flag: whoever is woken finds it raised.
            signal_hook::low_level::pipe::register(signal, wake.try_clone()?)?;
        }
        signal_hook::low_level::pipe::register(SIGCHLD, wake)?;
        Ok(Self {
            seen,
            asked: None,
            woken,
        })
    }

    /// Waits until there is something to read from one of these, a signal or the end of a process has come, or for this long.
    pub(crate) fn wait<'a>(
        &self,
        others: impl IntoIterator<Item = BorrowedFd<'a>>,
        limit: Duration,
    ) {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        fds.extend(
            others
                .into_iter()
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // A signal ends it early, which does as well.
        let _ = poll(&mut fds, Some(&limit));
        while matches!((&self.woken).read(&mut [0; 64]), Ok(1..)) {}
    }

    /// What was asked for since the last call.
    pub(crate) fn request(&mut self) -> Option<StopRequest> {
        let mut request = None;
        for (signal, seen) in ASKING.into_iter().zip(&self.seen) {
            if seen.swap(false, Ordering::Relaxed) {
                request = request.or(after(self.asked, Instant::now(), signal));
            }
        }
        if request.is_some() && self.asked.is_none() {
            self.asked = Some(Instant::now());
        }
        request
    }

    /// Whether a stop was asked for.
    pub(crate) fn asked(&self) -> bool {
        self.asked.is_some()
    }
}

/// The flag that is raised when this process is asked to save and leave, from the first call on.
///
/// # Errors
///
/// When the operating system refuses the handlers.
pub(crate) fn flag() -> io::Result<Arc<AtomicBool>> {
    let flag = ASKED.get_or_init(Arc::default);
    for signal in ASKING.into_iter().filter(|&signal| is_heard(signal)) {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(Arc::clone(flag))
}

/// Whether this process was asked to save and leave since it listens.
pub(crate) fn asked() -> bool {
    ASKED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Whether a signal is listened to: under `nohup` a hang-up is ignored, and stays so.
fn is_heard(signal: i32) -> bool {
    signal != SIGHUP || !is_ignored(signal)
}

fn is_ignored(signal: i32) -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    #[expect(
        unsafe_code,
        reason = "there is no other way to ask what a signal does"
    )]
    // SAFETY: without a new action the call changes nothing and only fills in `found`, which is as it wants it; should it
    // fail, `found` stays all zeros, which is a value of this plain struct: the default action.
    let found = unsafe {
        libc::sigaction(signal, ptr::null(), found.as_mut_ptr());
        found.assume_init()
    };
    found.sa_sigaction == libc::SIG_IGN
}

/// A signal's name, like `SIGTERM`, or its number.
pub(crate) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| signal.to_string(), str::to_owned)
}

fn after(asked: Option<Instant>, now: Instant, signal: i32) -> Option<StopRequest> {
    match asked {
        None => Some(StopRequest::Leave(signal)),
        Some(first) if now.duration_since(first) < ECHO => None,
        // A scheduler may warn twice, and a terminal that closes may say so to a run that is leaving.
        Some(_) if matches!(signal, SIGUSR1 | SIGHUP) => None,
        Some(_) => Some(StopRequest::LeaveNow(signal)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_signal_does_not_wait() {
        let first = Instant::now();
        assert_eq!(after(None, first, SIGINT), Some(StopRequest::Leave(SIGINT)));
        assert_eq!(
            after(Some(first), first + ECHO, SIGTERM),
            Some(StopRequest::LeaveNow(SIGTERM))
        );
    }

    #[test]
    fn an_echo_of_the_first_signal_is_not_a_second_one() {
        let first = Instant::now();
        assert_eq!(after(Some(first), first + ECHO / 2, SIGTERM), None);
    }

    #[test]
    fn a_scheduler_may_warn_twice_and_a_terminal_close_later() {
        let first = Instant::now();
        for signal in [SIGUSR1, SIGHUP] {
            assert_eq!(after(None, first, signal), Some(StopRequest::Leave(signal)));
            assert_eq!(after(Some(first), first + 4 * ECHO, signal), None);
        }
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((name(9), name(99)), ("SIGKILL".to_owned(), "99".to_owned()));
    }
}
