//! The farm: random tests from a seed. Broken and hostile files, odd command lines, kills, signals,
//! strangers, damage, full disks, failing system calls, slow, wrong or dead trackers, and long runs
//! under all kinds of faults.
//!
//! ```sh
//! cargo test --release -p spd-launch --test farm -- --ignored --nocapture
//! ```
//!
//! Each file is a suite that prints a table of its results. Nothing may be lost, panic, hang,
//! change silently, or exit with a code that `spd-launch --help` does not list.
//!
//! | variable | |
//! |---|---|
//! | `SPD_FARM_SEED` | the seed |
//! | `SPD_FARM_SCALE` | factor on the number of cases; 1 takes some minutes on two cores |
//! | `SPD_FARM_MINUTES` | instead: start cases of each suite for this time |
//! | `SPD_FARM_CASE` | a single case, by its number; its outcome may depend on the moment of a signal |
#![cfg(test)]
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

#[path = "../both/mod.rs"]
mod both;
mod command_lines;
mod corrupt;
mod damages;
mod data_files;
mod disks;
#[path = "../both/gate.rs"]
mod gate;
mod hostile;
mod kills;
mod launch;
mod network;
mod quoting;
mod random;
mod run_files;
mod runs;
mod servers;
mod signals;
mod soak;
mod strangers;
mod suite;
mod system_calls;
mod trackers;
