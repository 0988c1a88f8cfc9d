//! What is measured beside the losses.

mod bigram;
pub mod known_importance;
pub(crate) mod summary;
pub(crate) mod toy;

pub use bigram::bigram_cross_entropy;
pub use summary::number;
