//! The run files that we ship, and what reads any run file: tables with positions, the values of
//! keys, faults with their places.
//!
//! Which keys there are is no matter of this crate, but for those of `[tracker]`. A thing that a
//! run file sets reads its own keys: it is given its [`reader::Table`], asks for keys by name, each
//! with a [`values::Kind`], and notes what is wrong. Keys that nobody asks for are unknown.
//!
//! A key is named in one way everywhere, in faults, overrides and differences: dotted, rows of a
//! list numbered from 0, as in `loss.0.coeff`.

pub mod faults;
mod locate;
pub mod overrides;
pub mod reader;
mod shipped;
pub mod tracker;
pub mod values;
pub mod yaml;

pub use faults::{Fault, Faults, Place};
pub use locate::locate;
pub use shipped::Shipped;
pub use tracker::{Destination, OnRollback, Tracker};
pub use values::brief;
