//! Signals to the launcher: the first asks the rank to save and leave, a second one does not wait.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Signals that ask for an orderly stop. SIGHUP keeps its meaning, so that `nohup` works.
const ASKING: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

/// A second signal sooner than this is the first one again: `timeout` sends its signal to the process
/// and then to the whole group.
const ECHO: Duration = Duration::from_millis(250);

/// What the user wants now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
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
}

impl Stop {
    /// Installs the handlers: from here on a signal no longer ends this process.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub(crate) fn listen() -> io::Result<Self> {
        let seen = ASKING.map(|_| Arc::new(AtomicBool::new(false)));
        for (signal, seen) in ASKING.into_iter().zip(&seen) {
            signal_hook::flag::register(signal, Arc::clone(seen))?;
        }
        Ok(Self { seen, asked: None })
    }

    /// What was asked for since the last call.
    pub(crate) fn wish(&mut self) -> Option<Wish> {
        let mut wish = None;
        for (signal, seen) in ASKING.into_iter().zip(&self.seen) {
            if seen.swap(false, Ordering::Relaxed) {
                wish = wish.or(after(self.asked, Instant::now(), signal));
            }
        }
        if wish.is_some() && self.asked.is_none() {
            self.asked = Some(Instant::now());
        }
        wish
    }

    /// Whether a stop was asked for.
    pub(crate) fn asked(&self) -> bool {
        self.asked.is_some()
    }
}

/// The flag that is raised when this process, a rank, is asked to save and leave.
///
/// # Errors
///
/// When the operating system refuses the handlers.
pub(crate) fn flag() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in ASKING {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

/// A signal's name, like `SIGTERM`, or its number.
pub(crate) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| signal.to_string(), str::to_owned)
}

fn after(asked: Option<Instant>, now: Instant, signal: i32) -> Option<Wish> {
    match asked {
        None => Some(Wish::Leave(signal)),
        Some(first) if now.duration_since(first) < ECHO || signal == SIGUSR1 => None,
        Some(_) => Some(Wish::LeaveNow(signal)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_signal_does_not_wait() {
        let first = Instant::now();
        assert_eq!(after(None, first, SIGINT), Some(Wish::Leave(SIGINT)));
        assert_eq!(
            after(Some(first), first + ECHO, SIGTERM),
            Some(Wish::LeaveNow(SIGTERM))
        );
    }

    #[test]
    fn an_echo_of_the_first_signal_is_not_a_second_one() {
        let first = Instant::now();
        assert_eq!(after(Some(first), first + ECHO / 2, SIGTERM), None);
    }

    #[test]
    fn a_scheduler_may_warn_twice() {
        let first = Instant::now();
        assert_eq!(after(Some(first), first + 4 * ECHO, SIGUSR1), None);
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((name(9), name(99)), ("SIGKILL".to_owned(), "99".to_owned()));
    }
}
