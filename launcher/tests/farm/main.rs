//! The farm: broken and hostile files, odd command lines, kills, signals, strangers, damage, full disks, failing system calls, trackers
//! that are slow, wrong or dead, and long runs under all kinds of faults, at random from a seed.
//!
//! ```sh
//! cargo test --release -p spd-launch --test farm -- --ignored --nocapture
//! ```
//!
//! Each file is a suite and ends with a table of what came of its cases. Nothing may be lost, panic, hang, change in silence,
//! or leave with a code that `spd-launch --help` does not list.
//!
//! | variable | |
//! |---|---|
//! | `SPD_FARM_SEED` | another seed, other cases |
//! | `SPD_FARM_SCALE` | factor on the number of cases; 1 takes some minutes on two cores |
//! | `SPD_FARM_MINUTES` | as many cases of each suite as begin in that time |
//! | `SPD_FARM_CASE` | one case alone, by its number; what depends on the moment of a signal may then end otherwise |
#![cfg(test)]
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
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
