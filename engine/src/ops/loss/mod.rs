//! Losses of logits.

mod cross_entropy;
mod head_divergence;
mod kl_divergence;

pub use cross_entropy::CrossEntropy;
pub use head_divergence::HeadDivergence;
pub use kl_divergence::KlDivergence;
