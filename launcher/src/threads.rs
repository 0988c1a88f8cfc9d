//! Starts threads, with an error that names possible limits.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread.
///
/// # Errors
///
/// When the system refuses; the line names the limits that may be reached.
pub(crate) fn spawn<R: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> R + Send + 'static,
) -> io::Result<JoinHandle<R>> {
    let thread = Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "cannot start the thread `{name}` ({error}); is a limit of threads or memory reached (ulimit -u, \
                 ulimit -v, pids.max of the control group)?"
            ),
        )
    })
}
