//! The total loss in a program: its terms, and those of its gradients that are still to be made.

use spd_engine::ops::Weight;
use spd_engine::{Builder, Result, Value};

use super::adversary::Attack;

/// A term of the total loss in a program.
#[derive(Debug, Clone)]
pub struct Scalar {
    /// Name in metrics: `loss/stochastic_recon_layerwise`.
    pub name: String,
    /// Weight in the total.
    pub coeff: Weight,
    /// Its value.
    pub value: Value,
    /// Its parts, by their names in metrics, where it is more than the distance of outputs.
    pub parts: Vec<(String, Value)>,
    /// Results of its adversary beside it: the gradients of the term are made already.
    pub attack: Option<Attack>,
}

/// The sum of all terms, each times its weight.
pub(crate) fn total(b: &mut Builder, losses: &[Scalar]) -> Result<Value> {
    let terms = losses.iter().map(|loss| (loss.coeff, loss.value));
    b.weighted_sum(&terms.collect::<Vec<_>>())
}

/// The part of the total whose gradients are still to be made; and the gradients of the rest, by
/// the values that they have reached.
pub(crate) fn gradients_to_make(
    b: &mut Builder,
    losses: &[Scalar],
) -> Result<(Value, Vec<(Value, Value)>)> {
    let (mut rest, mut seeds) = (Vec::new(), Vec::new());
    for loss in losses {
        match &loss.attack {
            Some(attack) => seeds.extend(attack.seeds(b, loss.coeff)?),
            None => rest.push((loss.coeff, loss.value)),
        }
    }
    let rest = match rest[..] {
        [] => b.constant(0.0, &[])?,
        _ => b.weighted_sum(&rest)?,
    };
    Ok((rest, seeds))
}
