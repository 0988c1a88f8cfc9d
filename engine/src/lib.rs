//! Static programs for training steps, which know two things of SPD: component sites with their
//! masks, deltas, routes and adversaries (`ops/site`; reordered in `association`), and causal
//! importances with their frequency penalty (`ops/importance`).
//!
//! A step is built once as a list of coarse ops over planned buffers, and replayed:
//!
//! ```text
//! Builder  ->  ops in order  ->  gradients appended  ->  Plan (one arena)  ->  Executor
//! ```
//!
//! - A [`Builder`] collects [ops]. The same op on the same values is one value, so passes with a
//!   common prefix compute it once.
//! - A wide value that is a sum of narrow products, and only read through matrices, is not made
//!   ([`Builder::associate`]).
//! - [`Builder::gradients`] appends reverse mode, once, for the wanted values and nothing else.
//! - [`Builder::recompute`] has the gradients make again what they read of a region of the forward
//!   pass, in the place of keeping it.
//! - A [`Plan`] orders the ops and places every intermediate in one arena by its lifetime. Peak
//!   memory is known before the first step, and a replay allocates nothing.
//! - A program may compute one of several equal [blocks] of a batch, on one rank or on several: its
//!   sums over samples have the same bits.
//! - [`StepParameters`] hold the numbers that change from step to step; random numbers are
//!   functions of their position (`spd_draws`), so a program has no state. A [`Store`] holds the
//!   tensors that stay.
//! - On a GPU the same program is a list of launches and products ([`cuda`]), which every op
//!   provides. An [`Executor`] runs on the [`Processor`] that it was planned for, in an [`Arena`]
//!   that other programs run in too. Kernels and replays are tested on an emulated device, and on a GPU
//!   where there is one.
//! - With [`Precision::Bf16`], a GPU stores values in bf16 where that is exact enough; a CPU with
//!   bf16 instructions ([`has_bf16_products`]) rounds the factors of products to bf16.
//!
//! It knows nothing of run files and training loops, nor which terms make up an SPD loss.

#[cfg(any(test, feature = "compare-emulated"))]
extern crate self as spd_engine;

mod alike;
mod alone;
mod association;
pub mod blocks;
mod builder;
pub mod cpu;
pub mod cuda;
mod derivation;
mod executor;
mod fault;
mod given;
mod gradients;
mod large_pages;
mod op;
pub mod ops;
mod own_memory;
mod plan;
mod precision;
mod profile;
#[cfg(test)]
mod random_programs;
mod recompute;
mod reduction;
mod replay;
mod rounding;
mod schedule;
mod step_parameters;
mod store;
mod value;

pub use alike::Alike;
pub use blocks::{Ranks, SharedMemory, Sockets, Stages, Sum};
pub use builder::BACKWARD;
pub use cpu::{Frame, Pool, TooManyThreads, bf16_is_slower, has_bf16_products, instructions};
pub use cuda::{Fault, MATRIX_PRODUCTS, PINNED, Staged};
pub use derivation::{Derivation, Right};
pub use executor::{Alone, Arena, Executor, Processor};
pub use given::Given;
pub use op::{BuildError, Builder, ExpensiveOps, Gradients, NodeView, Op, Result};
pub use own_memory::OwnMemory;
pub use plan::Plan;
pub use precision::Precision;
pub use profile::OpProfile;
pub use reduction::Reduction;
pub use step_parameters::StepParameters;
pub use store::{Named, Shards, Slot, Store, Values};
pub use value::{DType, StepScalar, Type, Value};
