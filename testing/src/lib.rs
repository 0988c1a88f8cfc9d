//! Tools of tests. Only dev-dependencies link them, so the program has none.

pub mod faults;
pub mod mutation;
pub mod ports;
mod skips;

pub use skips::{LIST, skip, skip_test};
