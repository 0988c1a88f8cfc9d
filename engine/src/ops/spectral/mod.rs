//! Ops of spectral networks: scores of a small network, long convolutions, linear attention, and
//! the penalty of a basis that is not orthogonal.

mod additive_attention;
mod causal_mixing;
mod gram_penalty;
mod linear_attention;
#[cfg(test)]
mod prefix;
mod reaction;

pub use additive_attention::{AdditiveAttention, AdditiveScores};
pub use causal_mixing::CausalMixing;
pub use gram_penalty::GramPenalty;
pub use linear_attention::LinearAttention;
pub use reaction::ReactionParameters;
