//! How far an output is from the target's.

use spd_engine::{Builder, Result, Value};

use crate::run_file::OutputLoss;

/// Divergence between the target's output and another, a scalar: the mean over positions of
/// `KL(target || other)`, or the mean over elements of the squared error. The gradient flows to the
/// other.
///
/// # Errors
///
/// When the shapes differ.
pub fn divergence(b: &mut Builder, kind: OutputLoss, target: Value, other: Value) -> Result<Value> {
    match kind {
        OutputLoss::Mse => b.mse(other, target),
        OutputLoss::Kl => {
            let target_lse = b.log_sum_exp(target)?;
            b.kl_divergence(target, target_lse, other)
        }
    }
}

/// The divergence of tokens' logits as in [`divergence`], and their cross-entropy with labels u32
/// `[rows, positions]`, two scalars: logits that both are asked of are made once at most.
///
/// # Errors
///
/// When the shapes differ.
pub fn divergence_and_cross_entropy(
    b: &mut Builder,
    target: Value,
    other: Value,
    labels: Value,
) -> Result<[Value; 2]> {
    let target_lse = b.log_sum_exp(target)?;
    b.kl_divergence_and_cross_entropy([target, target_lse, other], labels)
}
