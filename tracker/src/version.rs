//! The version of the program that writes.

use std::sync::OnceLock;

static VERSION: OnceLock<&str> = OnceLock::new();

/// States the version of this process's program, once, before it writes.
pub fn set_version(version: &'static str) {
    // The first one holds.
    let _ = VERSION.set(version);
}

/// The version of this process's program, as in `0.1.0 (7a7de303)`. If it is not stated, as in a
/// program that uses these crates, that of this crate.
pub fn version() -> &'static str {
    VERSION.get().unwrap_or(&env!("CARGO_PKG_VERSION"))
}
