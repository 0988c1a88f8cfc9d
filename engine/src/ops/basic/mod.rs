//! Ops for any model.

mod all_reduce;
mod columns;
mod elementwise;
mod halves;
mod identity;
mod log_sum_exp;
mod matmul;
mod max_rows;
mod softmax;
mod sum_rows;
mod transpose;
mod weighted_sum;

pub use all_reduce::{AllReduce, PerBlock};
pub use columns::Columns;
pub use elementwise::{Elementwise, ElementwiseSum, Expr, GeluKind};
pub use halves::{Half, Pack, Unpack};
pub use identity::Identity;
pub use log_sum_exp::LogSumExp;
pub(in crate::ops) use log_sum_exp::{log_sum_exp_rows, log_sum_exp_threads};
pub use matmul::MatMul;
pub use softmax::Softmax;
pub use sum_rows::SumRows;
pub use transpose::Transpose;
pub use weighted_sum::{Weight, WeightedSum};
