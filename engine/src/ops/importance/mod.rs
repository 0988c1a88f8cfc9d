//! Importance functions: networks from component activations to logits, gates from logits to
//! importances, and the penalty on importances.

mod component_mlp;
pub(crate) mod gates;
mod minimality;
mod parallel_linear;

pub use component_mlp::{ComponentMlp, ComponentMlpWeights};
pub use gates::{Gates, ImportanceGates, Importances, LogitNoise, Penalty};
pub use minimality::ImportanceMinimality;
pub use parallel_linear::ParallelLinear;
