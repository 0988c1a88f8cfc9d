//! Waiting for a condition, with a limit.

use std::thread;
use std::time::{Duration, Instant};

/// Checks `has_come` every millisecond until it is true, for at most `limit`.
pub(crate) fn wait_until(limit: Duration, mut has_come: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !has_come() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}
