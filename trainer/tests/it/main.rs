//! Stories of the trainer: what it computes, and what it does with a run.

mod golden;
mod harness;
mod huggingface;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut tests = golden::tests();
    tests.extend(huggingface::tests());
    harness::run(tests)
}
