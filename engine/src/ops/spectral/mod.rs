//! Ops of spectral networks.

mod additive_attention;
mod causal_mixing;
mod gram_penalty;
mod linear_attention;
#[cfg(test)]
mod prefix;

pub use additive_attention::{AdditiveAttention, AdditiveScores};
pub use causal_mixing::CausalMixing;
pub use gram_penalty::GramPenalty;
pub use linear_attention::LinearAttention;
