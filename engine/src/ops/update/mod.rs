//! End of a step: gradient norms, the update, and the check that all gradients are finite.

mod adamw;
mod average;
mod decay;
mod gradient_norm;
mod halt;
mod keep;

pub use adamw::{AdamW, AdamWOperands};
pub use decay::{Decay, Lines};
pub use gradient_norm::GradientNorm;
pub use halt::Halt;
