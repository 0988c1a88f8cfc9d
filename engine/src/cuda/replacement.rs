//! A device in the place of GPUs, and what its driver needs. The program installs none; tests
//! install one that this machine's processor emulates.

use std::sync::{Arc, OnceLock};

pub use super::compiler::compile_all;
pub use super::driver::{Argument, Driver, Factors, Handle, LibraryCall, Module, Stream};
pub use super::kernel::{Kernel, source};
pub use super::placed::PlacedProduct;
pub use super::product::{Algorithm, Key, Layout, Matrix, Product};

/// Stands in the place of every GPU of a process.
#[derive(Debug, Clone, Copy)]
pub struct Replacement {
    /// Opens the device.
    pub open: fn() -> Arc<dyn Driver>,
    /// Bytes of its memory.
    pub bytes: usize,
}

static INSTALLED: OnceLock<Replacement> = OnceLock::new();

/// Replaces the GPUs of this process.
///
/// # Panics
///
/// If they were replaced before.
pub fn install(replacement: Replacement) {
    INSTALLED.set(replacement).expect("installed once");
}

/// The replacement of this process's GPUs, if they are replaced.
pub fn installed() -> Option<&'static Replacement> {
    INSTALLED.get()
}

/// Whether GPUs are replaced.
pub fn is_installed() -> bool {
    installed().is_some()
}
