//! Threads of the launcher and of a rank's channel, and what is said where there is none to be had.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread.
///
/// # Errors
///
/// When the system gives none; the line says which limits that may be.
pub(crate) fn spawn<R: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> R + Send + 'static,
) -> io::Result<JoinHandle<R>> {
    let thread = Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "the thread `{name}` cannot be started ({error}); is a limit of threads or memory reached (ulimit -u, \
                 ulimit -v, pids.max of the control group)?"
            ),
        )
    })
}
