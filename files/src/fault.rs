//! Stops the disk before a chosen operation of a thread, so that a test of any crate can stop it before each.
//!
//! A thread that no test has asked to stop has no plan, and does nothing here but see that.

use std::cell::RefCell;
use std::io;

/// What becomes of the process at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The operation fails for want of space; later ones work.
    Fail,
    /// The process is gone: neither this operation nor any later one happens.
    Crash,
}

struct Plan {
    stop: Option<(usize, Then)>,
    done: Vec<&'static str>,
}

thread_local! {
    static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
}

/// Called before each operation. `half` does what an operation leaves that was cut short.
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

/// Runs `body` with the disk stopped before its `operation`-th operation, counted from 0; says whether
/// there were as many.
pub fn at<T>(operation: usize, then: Then, body: impl FnOnce() -> T) -> (T, bool) {
    let (outcome, done) = run(Some((operation, then)), body);
    (outcome, done.len() > operation)
}

/// Runs `body` on a sound disk and returns the operations it did.
pub fn record<T>(body: impl FnOnce() -> T) -> (T, Vec<&'static str>) {
    run(None, body)
}

fn run<T>(stop: Option<(usize, Then)>, body: impl FnOnce() -> T) -> (T, Vec<&'static str>) {
    let done = Vec::new();
    PLAN.set(Some(Plan { stop, done }));
    let outcome = body();
    (outcome, PLAN.take().map_or_else(Vec::new, |plan| plan.done))
}
