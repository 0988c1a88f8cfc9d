//! The CUDA side: a program as launches of kernels and matrix products.
//!
//! ```text
//! Builder  ->  Precision (casts)  ->  routed rows  ->  padding  ->  gated masks, sums of rows
//!          ->  Op::cuda (launches, products)  ->  Program (places, one source)  ->  Executor  ->  Device
//! ```
//!
//! - A program on a device is a graph of ops too, of which some replace others on a device alone.
//!   They do so after gradients are added.
//! - CUDA is not linked: [`libraries`] are opened at run time, and errors name those that are
//!   missing.
//! - Each op is lowered once ([`Lowering`]); shapes and settings are constants of its kernels'
//!   source.
//! - On a GPU, autotuning measures once per shape which of eight algorithms of cublasLt is the
//!   fastest for a matrix product, and a run keeps the decision. A kernel of our own competes for
//!   thin products, and replaces cublasLt where that refuses.
//! - A masked site is products and a launch for its mask. The matrices of a routed site have its
//!   routed rows and little more (`routed_rows`). Kernels that kept a site's components on chip took
//!   longer than the products at every site that was measured on an H200, forward and backward, so
//!   there are none.
//! - All-reduces run in buckets on a separate stream of the graph (`all_reduce`). GPUs exchange
//!   parts by NCCL (`nccl`) and add them along the tree of [`blocks`](crate::blocks), so results
//!   have the same bits on any number of GPUs. Tests run ranks as threads, each on an emulated
//!   device, and as processes with an emulated NCCL; no machine with several GPUs has run it.
//! - A program may be stored in bf16 where possible ([`Precision`](crate::Precision)): a kernel
//!   takes operands of either type, and computes in f32. Dimensions of its products that are no
//!   multiple of 8 are then padded with zeros (`padding`), because cublasLt is several times slower
//!   otherwise.
//! - Kernels need no headers and no atomics, and sum in one order. Tests run them on this machine's
//!   processor, thread by thread, check every access, and compare with CPU kernels, and on a GPU
//!   where there is one.
//! - Programs, copies of inputs, and copies of staged tensors have a stream each: a step does not
//!   wait for data, and only its updates wait for a staged state
//!   ([`Store::stage`](crate::Store::stage)).
//!
//! # Memory traffic
//!
//! A kernel reads as many elements of each large operand as the largest one has, and writes each
//! result once (and reads it first if it adds to it), which is the minimum. Draws, masks, scores, the
//! hidden layers of component networks, and importances that masks alone read (`gated`) are never
//! written. The launch that makes a gradient also sums its rows for a bias (`row_sums`). The emulated
//! device counts the exceptions; a second reading of a row finds it in a cache:
//!
//! | kernel | readings of an element | why |
//! |---|---|---|
//! | `norm_parameter_parts` | 2 | weight and bias one after the other |
//! | `softmax` | 3 | largest element, sum, result |
//! | `softmax_grad` | 2 | a sum over the gradient, result |
//! | `kl_divergence` | 2 | log-sum-exp of the logits, divergence and gradient in place |
//! | `component_mlp_grad` | hidden / 8 | eight hidden units are in registers at a time |
//!
//! A product of our own (`multiply_tiles`) reads a factor once for each tile of the result along
//! the other factor. Tiles are 64 by 64, or 256 by 16 for a side of at most 16.
//!
//! Attention reads keys and values once for each tile of 32 queries, or of 128 in bf16. The launch
//! of a residual stream's norm includes the addition before it. One launch updates up to 127 tensors
//! of a group with equal weight decay, and two compute the norms of a group.
//!
//! # On a GPU
//!
//! Calls to a GPU go through a `Driver`, so an emulated device, which runs work as early or as late
//! as CUDA allows, tests their order. The first check of a real GPU is [`probes`], by
//! `spd-launch doctor --deep`. With a GPU's number in `SPD_TEST_GPU`, op tests, the program of all
//! ops and the trainer's comparison with the reference run on that GPU, one process per test,
//! because a fault of a kernel fails every later call of its process. `.ci/gpu-folder` makes a
//! folder to carry to a GPU machine, which includes the machine code of all kernels:
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
pub(crate) mod casts;
#[cfg(feature = "compare-emulated")]
pub(crate) mod compare_emulated;
pub(crate) mod compiler;
mod compiling;
mod cublaslt;
mod device;
pub(crate) mod device_tensors;
#[doc(hidden)]
mod driver;
#[cfg(any(test, feature = "compare-emulated"))]
#[expect(dead_code, unreachable_pub, reason = "a crate of its own")]
#[path = "../../../emulated/src/lib.rs"]
pub(crate) mod emulated;
mod enqueue;
#[cfg(test)]
pub(crate) mod every_op;
mod executor;
mod fusion;
mod gated;
mod gpu;
mod inputs;
pub(crate) mod kernel;
pub mod libraries;
pub(crate) mod lowering;
#[cfg(test)]
pub(crate) mod machine_code;
pub(crate) mod nccl;
#[cfg(test)]
pub(crate) mod nccl_tests;
pub(crate) mod operand;
mod padding;
#[cfg(test)]
mod padding_tests;
mod placed;
pub mod probes;
#[doc(hidden)]
pub(crate) mod product;
mod product_kernel;
pub(crate) mod program;
mod readers;
#[doc(hidden)]
pub mod replacement;
#[cfg(test)]
mod replay_tests;
pub(crate) mod routed_rows;
mod row_sums;
pub(crate) mod staging;
#[cfg(test)]
mod staging_tests;
#[cfg(test)]
pub(crate) mod tests;
mod trial;

pub use crate::fault::{Fault, Result};
pub use compiling::Compiling;
pub use cublaslt::WORKSPACE as MATRIX_PRODUCTS;
pub use device::{Device, PINNED};
pub use executor::{Arena, Executor};
pub use lowering::Lowering;
pub use staging::Staged;
