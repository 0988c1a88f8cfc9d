//! Starts threads, with an error that names possible limits, and reads the states of threads.

use std::fs;
use std::io;
use std::path::Path;
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

/// Whether a thread of this process waits for a disk or a driver, as far as the system says.
pub(crate) fn wait_for_disk() -> bool {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
    let mut stats = threads.flatten().map(|thread| thread.path().join("stat"));
    stats.any(|stat| state(&stat) == Some('D'))
}

/// The state of a process or thread by its file `stat` in `/proc`, like `R` or `D`.
pub(crate) fn state(stat: &Path) -> Option<char> {
    let stat = fs::read_to_string(stat).ok()?;
    // The name in parentheses may contain anything.
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_thread_is_read() {
        assert_eq!(state("/proc/thread-self/stat".as_ref()), Some('R'));
        assert_eq!(state("/proc/self/no".as_ref()), None);
    }
}
