//! The CPU executor: replays a program over one arena; the number of threads never changes a bit of
//! the result.

#[cfg(test)]
mod allocations;
mod arena;
pub(crate) mod bf16;
mod cut;
mod executor;
mod frame;
pub(crate) mod gelu;
pub(crate) mod gemm;
pub(crate) mod listed;
pub(crate) mod math;
mod output;
pub(crate) mod pool;
pub(crate) mod reduce;
pub(crate) mod routed_rows;
pub(crate) mod shape;
pub(crate) mod sparse;
mod thin;
pub(crate) mod tile;
pub(crate) mod uniform;

pub use arena::Arena;
pub use bf16::{bf16_is_slower, has_bf16_products, instructions};
#[cfg(test)]
pub(crate) use executor::Alone;
pub use executor::Executor;
pub use frame::Frame;
pub use output::Output;
pub(crate) use pool::{PerChunk, Rows};
pub use pool::{Pool, TooManyThreads};
