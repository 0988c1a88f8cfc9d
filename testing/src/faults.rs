//! Stops the disk before a chosen operation of a thread.

use std::cell::RefCell;

use spd_files::fault::{HOOK, Stopped};

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
    static PLAN: RefCell<Plan> = const { RefCell::new(Plan { stop: None, done: Vec::new() }) };
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
    PLAN.set(Plan { stop, done });
    HOOK.set(next);
    let outcome = body();
    HOOK.set(|_| None);
    (outcome, PLAN.with_borrow(|plan| plan.done.clone()))
}

fn next(operation: &'static str) -> Option<Stopped> {
    PLAN.with_borrow_mut(|plan| {
        let now = plan.done.len();
        plan.done.push(operation);
        match plan.stop {
            Some((at, _)) if now == at => Some(Stopped::Halfway),
            Some((at, Then::Crash)) if now > at => Some(Stopped::Before),
            _ => None,
        }
    })
}
