//! Signals to the launcher: the first asks the rank to save and leave, a second one does not wait. And waiting for them, for the end
//! of a process of ours, and for what these say, whichever comes first.
//!
//! They are heard from the first line of `main` on, by a thread of its own: what prepares a run has nothing to save, so the thread ends
//! the process at once, where no file is half made. Commands that nobody goes on with are ended by the signal itself.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::low_level::{emulate_default_handler, exit, pipe};

use crate::exit::Exit;
use crate::screen;
use crate::threads;

/// Signals that ask for an orderly stop.
const ASKING: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGHUP];

/// Raised by each of them.
static ASKED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Raised by one of them each, in that order.
static SEEN: LazyLock<[Arc<AtomicBool>; ASKING.len()]> = LazyLock::new(Default::default);

/// What comes of a request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The process leaves at once: a run is being prepared.
    Leave,
    /// The signal does what it does to a process that does not listen.
    Die,
    /// Whoever works looks for it.
    Heeded,
}

/// Locked while it is acted on, and while files are made that belong together.
static ANSWER: Mutex<Answer> = Mutex::new(Answer::Leave);

/// A second signal sooner than this is the first one again: `timeout` sends its signal to the process
/// and then to the whole group.
const ECHO: Duration = Duration::from_millis(250);

/// What the user asks for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// Save and leave. Holds the signal.
    Leave(i32),
    /// The same, by way of a tracker.
    Pressed,
    /// Be gone. Holds the signal.
    LeaveNow(i32),
}

/// Heeds the signals that have come, and those to come.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: Option<Instant>,
    /// Raised by a tracker.
    pressed: Option<Arc<AtomicBool>>,
    /// Has something to read when one of them, or the end of a process, has come.
    woken: UnixStream,
}

impl Stop {
    /// From here on a signal no longer ends this process.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub(crate) fn listen() -> io::Result<Self> {
        let (woken, wake) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for signal in ASKING.into_iter().filter(|&signal| is_heard(signal)) {
            pipe::register(signal, wake.try_clone()?)?;
        }
        pipe::register(SIGCHLD, wake)?;
        *answer() = Answer::Heeded;
        Ok(Self {
            asked: None,
            pressed: None,
            woken,
        })
    }

    /// From here on a tracker may ask too, by raising this flag.
    pub(crate) fn heed(&mut self, pressed: Option<Arc<AtomicBool>>) {
        self.pressed = pressed;
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
        for (signal, seen) in ASKING.into_iter().zip(&*SEEN) {
            if seen.swap(false, Ordering::Relaxed) {
                request = request.or(after(self.asked, Instant::now(), signal));
            }
        }
        let pressed = self.pressed.as_ref();
        if pressed.is_some_and(|pressed| pressed.load(Ordering::Relaxed)) && self.asked.is_none() {
            request = request.or(Some(StopRequest::Pressed));
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

/// Hears signals from here on. The first ends this process with the code of a stop, until [`Stop`] or [`flag`] heeds them; those to a
/// rank wait for that.
///
/// # Errors
///
/// When the operating system refuses the handlers, or a thread.
pub(crate) fn hear(is_rank: bool) -> io::Result<()> {
    if is_rank {
        *answer() = Answer::Heeded;
    }
    // It would end the process; so the write that is too large for `ulimit -f` fails, as on a full disk.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let (woken, wake) = UnixStream::pair()?;
    for (signal, seen) in ASKING.into_iter().zip(&*SEEN) {
        if is_heard(signal) {
            signal_hook::flag::register(signal, Arc::clone(&ASKED))?;
            signal_hook::flag::register(signal, Arc::clone(seen))?;
            // After the flags: whoever is woken finds them raised.
            pipe::register(signal, wake.try_clone()?)?;
        }
    }
    threads::spawn("signals", move || {
        while let Ok(1..) = (&woken).read(&mut [0; 64]) {
            act()
        }
    })?;
    Ok(())
}

/// Does what a signal that has come is answered by.
fn act() {
    let answer = answer();
    match *answer {
        Answer::Leave => {
            let _whole = spd_files::settled();
            screen::end(
                "stopped while it prepared; nothing new is saved, and the same command goes on",
            );
            screen::finish(asked);
            exit(Exit::Stopped.code().into());
        }
        Answer::Die => {
            let came = |seen: &Arc<AtomicBool>| seen.load(Ordering::Relaxed);
            let signal = ASKING.into_iter().zip(&*SEEN).find(|(_, seen)| came(seen));
            // It ends the process; should the system refuse, there is another signal.
            let _ = signal.map(|(signal, _)| emulate_default_handler(signal));
        }
        Answer::Heeded => {}
    }
}

fn answer() -> MutexGuard<'static, Answer> {
    ANSWER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From here on a signal ends this process as if nobody listened: nothing is left to go on with.
pub(crate) fn die() {
    *answer() = Answer::Die;
}

/// The flag that is raised when this process is asked to save and leave. From here on that is all that a signal does.
pub(crate) fn flag() -> Arc<AtomicBool> {
    *answer() = Answer::Heeded;
    Arc::clone(&ASKED)
}

/// A time in which no signal ends this process: it comes to an end first, or what it makes is whole.
pub(crate) fn hold() -> impl Drop {
    answer()
}

/// Whether this process was asked to save and leave.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
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
