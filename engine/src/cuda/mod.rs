//! The CUDA side: the same program, as launches of kernels and matrix products.
//!
//! ```text
//! Builder  ->  Op::cuda (launches, products)  ->  Program (places, one source)  ->  Device
//! ```
//!
//! - Nothing of CUDA is linked: [`libraries`] are found when the program runs, and where there are none it says so.
//! - An op says once what computes it ([`Lowering`]); shapes and settings are constants of its kernels' source.
//! - Kernels need no header, no atomics, and sum in one order. Their tests run them on this machine's processor, thread by
//!   thread, every access checked, beside the CPU kernels; what a device makes of them is unmeasured.

mod compiler;
mod cublaslt;
mod device;
#[cfg(any(test, feature = "shadow"))]
mod emulator;
#[cfg(test)]
mod exhibition;
pub mod libraries;
pub(crate) mod lowering;
pub(crate) mod product;
mod program;
#[cfg(feature = "shadow")]
pub(crate) mod shadow;
#[cfg(test)]
pub(crate) mod tests;

pub use device::{Device, DeviceStore, Executor};
pub use lowering::Lowering;

/// What went wrong with a GPU or its libraries, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(String);

impl Fault {
    fn new(line: impl Into<String>) -> Self {
        Self(line.into())
    }
}
