//! Fault injection for tests of any crate: stops the disk before a chosen operation of a thread.
//!
//! A thread without a plan only checks that it has none.

use std::cell::RefCell;
use std::io;

/// Effect of the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The operation fails with a full disk; later ones work.
    Fail,
    /// The process crashes: neither this operation nor any later one happens.
    Crash,
}

struct Plan {
    stop: Option<(usize, Then)>,
    done: Vec<&'static str>,
}

thread_local! {
    static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
}

/// Called before each operation. `half` does a part of the operation, as if it were interrupted.
pub(crate) fn before(operation: &'static str, half: impl FnOnce()) -> io::Result<()> {
    let (stopped, is_first) = PLAN.with_borrow_mut(|plan| {
        let Some(plan) = plan else {
            return (false, false);
        };
        let now = plan.done.len();
        plan.done.push(operation);
        match plan.stop {
            Some((at, Then::Fail)) => (now == at, true),
            Some((at, Then::Crash)) => (now >= at, now == at),
            None => (false, false),
        }
    });
    if !stopped {
        return Ok(());
    }
    if is_first {
        half();
    }
    Err(io::ErrorKind::StorageFull.into())
}

/// Runs `body` with a fault before operation number `operation`, counted from 0; also returns
/// whether `body` got that far.
pub fn at<T>(operation: usize, then: Then, body: impl FnOnce() -> T) -> (T, bool) {
    let (outcome, done) = run(Some((operation, then)), body);
    (outcome, done.len() > operation)
}

/// Runs `body` without faults and returns its operations.
pub fn record<T>(body: impl FnOnce() -> T) -> (T, Vec<&'static str>) {
    run(None, body)
}

fn run<T>(stop: Option<(usize, Then)>, body: impl FnOnce() -> T) -> (T, Vec<&'static str>) {
    let done = Vec::new();
    PLAN.set(Some(Plan { stop, done }));
    let outcome = body();
    (outcome, PLAN.take().map_or_else(Vec::new, |plan| plan.done))
}
