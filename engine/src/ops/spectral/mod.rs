//! Ops of spectral networks.

mod causal_mixing;
mod linear_attention;
#[cfg(test)]
mod prefix;

pub use causal_mixing::CausalMixing;
pub use linear_attention::LinearAttention;
