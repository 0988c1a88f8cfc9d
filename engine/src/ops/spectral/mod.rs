//! Ops of spectral networks.

mod causal_mixing;
#[cfg(test)]
mod prefix;

pub use causal_mixing::CausalMixing;
