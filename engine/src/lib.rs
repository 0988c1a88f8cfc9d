//! Static programs: a training step is built once as a list of coarse operations over planned buffers, and replayed.
//!
//! ```text
//! Builder  ->  ops in order  ->  gradients appended  ->  Plan (one arena, by liveness)  ->  Executor
//! ```
//!
//! - A [`Builder`] collects [ops]; the same op on the same values is one value, so passes that share a
//!   prefix share its work without any code that says so.
//! - A wide value that is made of narrow ones and only read through matrices is not made.
//! - [`Builder::gradients`] appends reverse mode, once, for the values asked for and nothing else.
//! - A [`Plan`] orders the ops and places every intermediate in one arena by its lifetime. Peak memory is known
//!   before the first step, and a replay allocates nothing.
//! - A program may be one of several equal [blocks] of a batch, on one rank or on several: its sums over samples have the same bits.
//! - What changes from step to step sits in [`StepParameters`]; random numbers are functions of their
//!   place (`spd_draws`), so a program holds no state. What stays from step to step sits in a [`Store`].
//!
//! - On a GPU the same program is a list of launches and products ([`cuda`]): every op says what computes it there. An [`Executor`] is
//!   the one or the other, by the [`Processor`] it was planned for. Kernels and replays are proven on an emulated device; no GPU has
//!   run them yet. A program may be stored in bf16 there, as far as that is exact enough ([`Precision`]); on a processor with
//!   instructions for it ([`has_bf16_products`]) the factors of its products are rounded to bf16.
//!
//! The engine knows nothing of SPD: it has masks and sites because they are worth fusing, not what they are for.

mod association;
pub mod blocks;
mod builder;
pub mod cpu;
pub mod cuda;
mod derivation;
mod executor;
mod fault;
mod gradients;
mod graph;
mod op;
pub mod ops;
mod plan;
mod precision;
mod profile;
#[cfg(test)]
mod random_programs;
mod reduction;
mod rounding;
mod schedule;
mod step_parameters;
mod store;
mod value;

pub use blocks::{Ranks, SharedMemory, Sockets, Stages, Sum};
pub use builder::BACKWARD;
pub use cpu::{Frame, Pool, TooManyThreads, bf16_is_slower, has_bf16_products, instructions};
pub use cuda::{Fault, MATRIX_PRODUCTS, PINNED, Staged};
pub use derivation::{Derivation, Right};
pub use executor::{Arena, Executor, Processor};
pub use graph::Graph;
pub use op::{BuildError, Builder, ExpensiveOps, Gradients, NodeView, Op, Result};
pub use plan::Plan;
pub use precision::Precision;
pub use profile::OpProfile;
pub use reduction::Reduction;
pub use step_parameters::StepParameters;
pub use store::{Named, Slot, Store, Values};
pub use value::{DType, StepScalar, Type, Value};
