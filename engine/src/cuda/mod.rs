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
//!
//! # What crosses memory
//!
//! A kernel reads as many elements of each of its large operands as the largest has, and writes each of its results once (and
//! reads it first where it adds to it): the minimum of what it is. Draws and masks are never written, nor the hidden layers of
//! the component networks, nor scores. The exceptions, counted by the emulated device; the second reading of a row finds it in a cache:
//!
//! | kernel | readings of an element | why |
//! |---|---|---|
//! | `layer_norm` | 3 | mean, variance around it, result |
//! | `layer_norm_grad` | 3 | two means of the gradient, result |
//! | `layer_norm_parameter_parts` | 2 | weight and bias one after the other |
//! | `rms_norm` | 2 | mean square, result |
//! | `rms_norm_grad` | 2 | a mean of the gradient, result |
//! | `kl_divergence` | 2 | log-sum-exp of the logits, divergence |
//! | `component_mlp_grad` | hidden / 8 | eight hidden units are in registers at a time |
//!
//! Attention reads keys and values once for each tile of 32 queries. Still to be saved: an update is a launch a tensor, and a norm
//! reads what the addition before it wrote.

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
