//! The toy model of superposition: `y = relu(W2 H .. H W1 x + b)`, trained with `W2 = W1^T`.
//!
//! `linear1` `[h, f]`, `hidden_layers.i` `[h, h]` without nonlinearity between, `linear2` `[f, h]` with bias. Elhage et al.,
//! "Toy models of superposition", 2022; sizes and names are the reference's.

use spd_configs::Model;
use spd_engine::{Builder, Result, Value};

use super::{Linear, Orientation, Start, TargetTensor};
use crate::pass::Pass;

fn sizes(model: &Model) -> (usize, usize, usize, bool) {
    match *model {
        Model::Tms {
            n_features,
            n_hidden,
            n_hidden_layers,
            zero_bias,
        } => (n_features, n_hidden, n_hidden_layers, zero_bias),
        _ => unreachable!("called for a TMS"),
    }
}

pub(super) fn linears(model: &Model) -> Vec<Linear> {
    let (f, h, hidden, _) = sizes(model);
    let linear = |path: String, d_in, d_out, bias| Linear {
        path,
        d_in,
        d_out,
        orientation: Orientation::OutIn,
        bias,
    };
    let mut all = vec![
        linear("linear1".into(), f, h, false),
        linear("linear2".into(), h, f, true),
    ];
    all.extend((0..hidden).map(|i| linear(format!("hidden_layers.{i}"), h, h, false)));
    all
}

pub(super) fn tensors(model: &Model) -> Vec<TargetTensor> {
    let (f, h, hidden, zero_bias) = sizes(model);
    let tensor = |name: &str, dims: &[usize], start, trained| TargetTensor {
        name: name.into(),
        dims: dims.to_vec(),
        start,
        trained,
        transpose_of: None,
    };
    // PyTorch's defaults for a linear layer: uniform within 1 / sqrt(d_in), matrix and bias.
    let bias = if zero_bias {
        Start::Zeros
    } else {
        Start::Uniform(1.0 / (h as f64).sqrt())
    };
    let mut all = vec![
        tensor(
            "linear1.weight",
            &[h, f],
            Start::Uniform(1.0 / (f as f64).sqrt()),
            true,
        ),
        TargetTensor {
            transpose_of: Some("linear1.weight".into()),
            ..tensor("linear2.weight", &[f, h], Start::Zeros, false)
        },
        tensor("linear2.bias", &[f], bias, true),
    ];
    for i in 0..hidden {
        all.push(tensor(
            &format!("hidden_layers.{i}.weight"),
            &[h, h],
            Start::Identity,
            false,
        ));
    }
    all
}

pub(super) fn forward(
    model: &Model,
    b: &mut Builder,
    pass: &mut Pass<'_>,
    x_bf: Value,
) -> Result<Value> {
    let (_, _, hidden, _) = sizes(model);
    let mut h_bh = pass.linear(b, "linear1", x_bf)?;
    for i in 0..hidden {
        h_bh = pass.linear(b, &format!("hidden_layers.{i}"), h_bh)?;
    }
    let y_bf = pass.linear(b, "linear2", h_bh)?;
    b.relu(y_bf)
}
