//! LayerNorms of networks.

use spd_engine::{Builder, Result, Value};

use super::{Start, TargetTensor};
use crate::pass::Pass;
use crate::rounded::rounded;

/// Default epsilon of norms.
pub(super) const NORM_EPS: f64 = 1e-5;

/// Weight and bias of a LayerNorm.
pub(super) fn layer_norm_tensors(name: &str, d: usize) -> [TargetTensor; 2] {
    [("weight", Start::Ones), ("bias", Start::Zeros)]
        .map(|(part, start)| TargetTensor::trained(format!("{name}.{part}"), &[d], start))
}

/// The LayerNorm at a path.
pub(super) fn layer_norm(
    b: &mut Builder,
    pass: &Pass<'_>,
    name: &str,
    x_btd: Value,
    eps: f64,
) -> Result<Value> {
    let [weight, bias] = ["weight", "bias"].map(|part| pass.weight(&format!("{name}.{part}")));
    b.layer_norm(x_btd, weight, bias, rounded(eps))
}
