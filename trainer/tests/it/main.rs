//! Stories of the trainer: what it computes, and what it does with a run.

mod golden;
mod harness;

use std::process::ExitCode;

fn main() -> ExitCode {
    harness::run(&golden::tests())
}
