//! Signals to the launcher: the first asks ranks to save and exit, a second one kills them.
//! [`Stop`] waits for signals, exits of child processes and their messages at once.
//!
//! A thread handles signals from the first line of `main` on. While a run is being prepared there
//! is nothing to save, so the thread ends the process at once, but never during an atomic write. In
//! commands that cannot be continued, a signal has its default effect.

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

/// Set by each of them.
static ASKED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Set by one of them each, in that order.
static SEEN: LazyLock<[Arc<AtomicBool>; ASKING.len()]> = LazyLock::new(Default::default);

/// The effect of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalEffect {
    /// The process exits at once: a run is being prepared.
    Exit,
    /// The default action of the signal.
    Default,
    /// A flag is set, which the running code checks.
    SetFlag,
}

/// Locked while a signal is handled, and during writes that belong together.
static EFFECT: Mutex<SignalEffect> = Mutex::new(SignalEffect::Exit);

/// A second signal within this time counts as the first one: `timeout` sends its signal to the
/// process and then to the whole group.
const ECHO: Duration = Duration::from_millis(250);

/// A request of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// Save and exit. Holds the signal.
    Leave(i32),
    /// Save and exit, requested through a tracker.
    Pressed,
    /// Exit now. Holds the signal.
    LeaveNow(i32),
}

/// Receives requests to stop.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: Option<Instant>,
    /// Set by a tracker.
    pressed: Option<Arc<AtomicBool>>,
    /// Readable after a signal or the exit of a child process.
    woken: UnixStream,
}

impl Stop {
    /// From now on a signal no longer ends this process.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub(crate) fn listen() -> io::Result<Self> {
        let (woken, wake) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for signal in ASKING.into_iter().filter(|&signal| is_handled(signal)) {
            pipe::register(signal, wake.try_clone()?)?;
        }
        pipe::register(SIGCHLD, wake)?;
        *effect() = SignalEffect::SetFlag;
        Ok(Self {
            asked: None,
            pressed: None,
            woken,
        })
    }

    /// From now on a tracker may also request a stop, by setting this flag.
    pub(crate) fn add_flag(&mut self, pressed: Option<Arc<AtomicBool>>) {
        self.pressed = pressed;
    }

    /// Waits until one of these is readable, or a signal or the exit of a child process arrives,
    /// for at most `limit`.
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
        let limit = Timespec::try_from(limit).ok();
        // Interruption by a signal is fine.
        let _ = poll(&mut fds, limit.as_ref());
        while matches!((&self.woken).read(&mut [0; 64]), Ok(1..)) {}
    }

    /// The request since the last call.
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

    /// Whether a stop was requested.
    pub(crate) fn asked(&self) -> bool {
        self.asked.is_some()
    }
}

/// Starts handling signals. The first ends this process with the exit code of a stop, until
/// [`Stop`] or [`flag`] take over; signals to a rank wait for that.
///
/// # Errors
///
/// When the operating system refuses the handlers or the thread.
pub(crate) fn handle_signals(is_rank: bool) -> io::Result<()> {
    if is_rank {
        *effect() = SignalEffect::SetFlag;
    }
    // SIGXFSZ would end the process; ignored, a write beyond `ulimit -f` fails like on a full disk.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let (woken, wake) = UnixStream::pair()?;
    for (signal, seen) in ASKING.into_iter().zip(&*SEEN) {
        if is_handled(signal) {
            signal_hook::flag::register(signal, Arc::clone(&ASKED))?;
            signal_hook::flag::register(signal, Arc::clone(seen))?;
            // Registered after the flags, so that they are set when the thread wakes.
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

/// Handles a signal.
fn act() {
    let effect = effect();
    match *effect {
        SignalEffect::Exit => {
            spd_files::settle();
            screen::end(
                "stopped during preparation; nothing new is saved, and the same command goes on",
            );
            screen::finish(asked);
            exit(Exit::Stopped.code().into());
        }
        SignalEffect::Default => {
            let came = |seen: &Arc<AtomicBool>| seen.load(Ordering::Relaxed);
            let signal = ASKING.into_iter().zip(&*SEEN).find(|(_, seen)| came(seen));
            // It ends the process; if the system refuses, the next signal tries again.
            let _ = signal.map(|(signal, _)| emulate_default_handler(signal));
        }
        SignalEffect::SetFlag => {}
    }
}

fn effect() -> MutexGuard<'static, SignalEffect> {
    EFFECT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the default effect of signals: there is nothing left to continue.
pub(crate) fn restore_defaults() {
    *effect() = SignalEffect::Default;
}

/// A flag that a request to save and exit sets. From now on signals only do that.
pub(crate) fn flag() -> Arc<AtomicBool> {
    *effect() = SignalEffect::SetFlag;
    Arc::clone(&ASKED)
}

/// While the guard lives, no signal ends this process.
pub(crate) fn hold() -> impl Drop {
    effect()
}

/// Whether this process was asked to save and exit.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Whether a signal is handled: under `nohup`, SIGHUP stays ignored.
fn is_handled(signal: i32) -> bool {
    signal != SIGHUP || !is_ignored(signal)
}

fn is_ignored(signal: i32) -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    #[expect(unsafe_code, reason = "the only way to read a signal's action")]
    // SAFETY: without a new action the call only fills in `found`, a plain struct for which all
    // zeros is a valid value, the default action; on failure it stays that.
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
        // A scheduler may warn twice, and a closing terminal may send SIGHUP to a run that is
        // already exiting.
        Some(_) if matches!(signal, SIGUSR1 | SIGHUP) => None,
        Some(_) => Some(StopRequest::LeaveNow(signal)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_signal_exits_now_unless_it_is_an_echo_or_a_repeated_warning() {
        use StopRequest::{Leave, LeaveNow};
        let first = Instant::now();
        for (signal, later, expected) in [
            (SIGINT, None, Some(Leave(SIGINT))),
            (SIGUSR1, None, Some(Leave(SIGUSR1))),
            (SIGHUP, None, Some(Leave(SIGHUP))),
            (SIGTERM, Some(ECHO), Some(LeaveNow(SIGTERM))),
            (SIGTERM, Some(ECHO / 2), None),
            (SIGUSR1, Some(4 * ECHO), None),
            (SIGHUP, Some(4 * ECHO), None),
        ] {
            let asked = later.map(|_| first);
            let now = first + later.unwrap_or_default();
            assert_eq!(after(asked, now, signal), expected, "{signal} {later:?}");
        }
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((name(9), name(99)), ("SIGKILL".to_owned(), "99".to_owned()));
    }
}
