//! Waiting for what comes soon or not at all.

use std::thread;
use std::time::{Duration, Instant};

/// Looks every millisecond until `has_come`, and not longer than `limit`.
pub(crate) fn wait_until(limit: Duration, mut has_come: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !has_come() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}
