//! Stops the disk before a chosen operation, so that a test can stop it before each.

use std::cell::RefCell;
use std::io;

/// What becomes of the process at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// The operation fails for want of space; later ones work.
    Fail,
    /// The process is gone: neither this operation nor any later one happens.
    Crash,
}

#[derive(Default)]
struct Plan {
    stop: Option<(usize, Then)>,
    done: Vec<&'static str>,
}

thread_local! {
    static PLAN: RefCell<Plan> = RefCell::default();
}

/// Called before each operation. `half` does what an operation leaves that was cut short.
pub(crate) fn before(operation: &'static str, half: impl FnOnce()) -> io::Result<()> {
    let stopped = PLAN.with_borrow_mut(|plan| {
        let now = plan.done.len();
        plan.done.push(operation);
        match plan.stop {
            Some((at, Then::Fail)) => now == at,
            Some((at, Then::Crash)) => now >= at,
            None => false,
        }
    });
    if !stopped {
        return Ok(());
    }
    if PLAN.with_borrow(|plan| plan.stop.is_some_and(|(at, _)| plan.done.len() == at + 1)) {
        half();
    }
    Err(io::ErrorKind::StorageFull.into())
}

/// Runs `body` with the disk stopped before its `operation`-th operation, counted from 0; says whether
/// there were as many.
pub(crate) fn at<T>(operation: usize, then: Then, body: impl FnOnce() -> T) -> (T, bool) {
    PLAN.set(Plan {
        stop: Some((operation, then)),
        done: Vec::new(),
    });
    let outcome = body();
    let plan = PLAN.take();
    (outcome, plan.done.len() > operation)
}

/// Runs `body` on a sound disk and returns the operations it did.
pub(crate) fn record<T>(body: impl FnOnce() -> T) -> (T, Vec<&'static str>) {
    PLAN.take();
    let outcome = body();
    (outcome, PLAN.take().done)
}
