//! The operations, one folder each: shape rule, gradient rule and derivation in `mod.rs`, CPU kernel in `cpu.rs`,
//! CUDA kernels in `kernel.cu` and their launches in `cuda.rs`.
//!
//! # Adding an op
//!
//! What is computed element by element, and a sum of that over all elements, is an expression ([`Expr`]): a method of
//! [`Builder`](crate::Builder) in `elementwise/functions.rs`, or wherever it is needed, and one use in `cuda/every_op.rs`. Its gradient
//! and kernels come from the expression.
//!
//! Of the others, [`softmax`](crate::Builder::softmax) is the smallest example of each of these files:
//!
//! - `ops/NAME/mod.rs`: a struct of the op's settings that implements [`Op`](crate::Op), one for its gradient, and the method of
//!   [`Builder`](crate::Builder) that checks shapes and adds it. The head of the file derives the gradient. `Op` has defaults for all
//!   but the name and the two kernels; by default the result is of the type of the first input, and there is no gradient.
//! - `ops/NAME/cpu.rs`: reads and writes the views of a [`Frame`](crate::cpu::Frame). What several threads write is cut by shape alone,
//!   so that the bits are the same for any number of threads.
//! - `ops/NAME/kernel.cu`, `cuda.rs`: kernels without atomics, and their launches ([`Lowering`](crate::cuda::Lowering)).
//! - `ops/mod.rs`: one line for the module, one for its name.
//! - `cuda/every_op.rs`: one use of it, from which the tests of all kernels take it.
//!
//! Its tests compare value and gradient with candle's by `oracle.rs`, which runs the CUDA kernels on the emulated device as well.

mod adamw;
mod ascend;
mod attention;
mod columns;
mod component_mlp;
mod cross_entropy;
mod draws;
mod elementwise;
mod embedding;
mod gradient_norm;
mod halt;
mod head_divergence;
mod identity;
mod importance;
mod importance_minimality;
mod kl_divergence;
mod layer_norm;
mod log_sum_exp;
pub(crate) mod masked;
mod matmul;
#[cfg(test)]
pub(crate) mod oracle;
mod parallel_linear;
mod rms_norm;
mod rotary_table;
pub(crate) mod routed_matmul;
mod site_output;
mod softmax;
mod sum_rows;
mod transpose;
mod weighted_sum;

pub use crate::derivation::SiteInputs;
pub use adamw::{AdamW, AdamWOperands};
pub use ascend::Ascend;
pub use attention::Attention;
pub use columns::Columns;
pub use component_mlp::{ComponentMlp, ComponentMlpWeights};
pub use cross_entropy::CrossEntropy;
pub use draws::{Bernoulli, Uniform, UniformSubsets};
pub use elementwise::{Elementwise, ElementwiseSum, Expr, GeluKind};
pub use embedding::{AddPositions, Embed};
pub use gradient_norm::GradientNorm;
pub use halt::Halt;
pub use head_divergence::HeadDivergence;
pub use identity::Identity;
pub use importance::{Gates, ImportanceGates, Importances, LogitNoise};
pub use importance_minimality::ImportanceMinimality;
pub use kl_divergence::KlDivergence;
pub use layer_norm::LayerNorm;
pub use log_sum_exp::LogSumExp;
pub use masked::{Draw, Mask, MaskValues, Masked};
pub use matmul::MatMul;
pub use parallel_linear::ParallelLinear;
pub use rms_norm::RmsNorm;
pub use rotary_table::RotaryTable;
pub use routed_matmul::{PackRows, RoutedMatMul};
pub use site_output::SiteOutput;
pub use softmax::Softmax;
pub use sum_rows::SumRows;
pub use transpose::Transpose;
pub use weighted_sum::WeightedSum;

/// Elements that are worth a chunk of their own in element-wise kernels: some 10 microseconds.
pub(crate) const GRAIN: usize = 1 << 14;

/// Rows of `columns` elements that make a chunk of [`GRAIN`] elements.
pub(crate) fn grain_rows(columns: usize) -> usize {
    (GRAIN / columns.max(1)).max(1)
}
