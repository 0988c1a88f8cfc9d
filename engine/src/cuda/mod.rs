//! The CUDA side: the same program, as launches of kernels and matrix products.
//!
//! ```text
//! Builder  ->  Precision (casts)  ->  sites (chosen)  ->  Op::cuda (launches, products)  ->  Program (places, one source)  ->  Executor  ->  Device
//! ```
//!
//! - Nothing of CUDA is linked: [`libraries`] are found when the program runs, and where there are none it says so.
//! - An op says once what computes it ([`Lowering`]); shapes and settings are constants of its kernels' source.
//! - Where a masked site and its gradients can be one op each, what lies between is never written; on a GPU that is chosen by
//!   measurement, once for each shape, and a run keeps to it. So is the algorithm of each matrix product: cublasLt offers eight, and a
//!   kernel of our own is tried where the product is thin and taken where cublasLt refuses.
//! - All-reduces have a stream of their own inside the graph, in buckets (`all_reduce`). GPUs send each other their parts by NCCL
//!   (`nccl`) and add them along the tree of [`blocks`](crate::blocks), so any number of GPUs has the same bits. Tests run ranks as threads,
//!   each on an emulated device, and as processes, beside a library that stands in for NCCL; no GPU has run it.
//! - What may be is stored in bf16, if the program is to be ([`Precision`](crate::Precision)): a kernel takes the types of its
//!   operands as they come, and computes in f32.
//! - Kernels need no header, no atomics, and sum in one order. Their tests run them on this machine's processor, thread by
//!   thread, every access checked, beside the CPU kernels; what a device makes of them is unmeasured.
//! - Programs, their inputs and what is to be saved have a stream each: a step waits for no data, and only its updates for a state that
//!   leaves ([`Store::stage`](crate::Store::stage)).
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
//! | `layer_norm_of_sum` | 2 | of the sum that it has written: variance around its mean, result |
//! | `rms_norm` | 2 | mean square, result |
//! | `rms_norm_grad` | 2 | a mean of the gradient, result |
//! | `softmax` | 3 | largest element, sum, result |
//! | `softmax_grad` | 2 | a sum over the gradient, result |
//! | `kl_divergence` | 2 | log-sum-exp of the logits, divergence |
//! | `head_divergence` | 2 | log-sum-exp of a chunk's logits, divergence and its gradient in their place |
//! | `component_mlp_grad` | hidden / 8 | eight hidden units are in registers at a time |
//! | `site_rows` | positions / 64 | of `V` and `U`: all of them pass each tile of 64 positions |
//! | `site_sums` | components / 64 | of `x` and the gradient of `y`: all of them pass each tile of 64 components |
//!
//! A product of our own (`multiply_tiles`) reads a factor once for each tile of the result along the other one: tiles are 64 by 64, or
//! 256 and 16 where a side is at most 16.
//!
//! Attention reads keys and values once for each tile of 32 queries, and the launch that takes the norm of a residual stream has
//! added to it. An update is one launch for 127 tensors of a group that decay alike, and the norms of a group are two.
//!
//! # On a GPU
//!
//! What a replay asks of a GPU, and in which order, is decided over a `Driver` and tested on an emulated device that does everything as
//! early or as late as CUDA allows. The first question to a real one is whether it works at all: [`probes`], which
//! `spd-launch doctor --deep` runs. Op tests, the program of all ops and, in the trainer, the numbers of the
//! reference run on a real one where `SPD_TEST_GPU` is its number, one process a test: what a kernel does wrong fails every later call of
//! its process. `.ci/gpu-folder` makes a folder of what such a machine is carried, machine code of all kernels with it:
//!
//! ```sh
//! .ci/gpu-folder --arch sm_90     # here
//! bash .gpu/a                     # there: correctness
//! bash .gpu/b                     # under compute-sanitizer
//! bash .gpu/c                     # timed beside the peers
//! ```

mod all_reduce;
mod autotune;
mod autotune_record;
#[cfg(test)]
mod autotune_tests;
#[cfg(feature = "compare-emulated")]
mod bf16_roundings;
mod block_sums;
pub(crate) mod casts;
#[cfg(feature = "compare-emulated")]
pub(crate) mod compare_emulated;
pub(crate) mod compiler;
mod compiling;
mod cublaslt;
mod device;
pub(crate) mod device_op;
mod driver;
#[cfg(any(test, feature = "emulated"))]
pub(crate) mod emulated;
mod enqueue;
#[cfg(test)]
pub(crate) mod every_op;
mod executor;
mod fusion;
mod gpu;
mod inputs;
pub(crate) mod kernel;
pub mod libraries;
pub(crate) mod lowering;
pub(crate) mod mirror;
pub(crate) mod nccl;
#[cfg(test)]
pub(crate) mod nccl_tests;
pub(crate) mod operand;
mod placed;
pub mod probes;
pub(crate) mod product;
mod product_kernel;
pub(crate) mod program;
#[cfg(test)]
mod replay_tests;
pub(crate) mod site;
mod sites;
pub(crate) mod staging;
#[cfg(test)]
mod staging_tests;
#[cfg(test)]
pub(crate) mod tests;
mod trial;

pub use crate::fault::{Fault, Result};
pub(crate) use block_sums::BlockSums;
pub use compiling::Compiling;
pub use cublaslt::WORKSPACE as MATRIX_PRODUCTS;
pub use device::{Device, PINNED};
pub use executor::{Arena, Executor};
pub use lowering::Lowering;
pub use staging::Staged;

/// Set to have the emulated device stand in for a GPU, in a build of the feature `emulated`; for tests.
pub const EMULATED_GPU: &str = "SPD_EMULATED_GPU";

/// Memory of the emulated device.
const EMULATED_BYTES: usize = 4 << 30;

/// Whether the emulated device stands in for GPUs.
fn is_emulated() -> bool {
    cfg!(feature = "emulated") && std::env::var_os(EMULATED_GPU).is_some()
}

/// Where tests keep machine code: with that of runs, where `$SPD_CACHE` says where that is.
#[cfg(any(test, feature = "emulated"))]
pub(crate) fn test_cache() -> Option<std::path::PathBuf> {
    let cache = std::env::var_os("SPD_CACHE")?;
    Some(std::path::Path::new(&cache).join("kernels"))
}
