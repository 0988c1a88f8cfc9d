//! What a step ends with: norms of gradients, the update, and the check that all is finite.

mod adamw;
mod gradient_norm;
mod halt;

pub use adamw::{AdamW, AdamWOperands};
pub use gradient_norm::GradientNorm;
pub use halt::Halt;
