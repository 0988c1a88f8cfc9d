//! The residual MLP toy: `r = x W_E; r += mlp_out(act(mlp_in(r)))` a layer; `y = r W_U`, trained to give `x + act(x)`.
//!
//! `W_E` `[f, d]` has fixed random rows of length 1 and `W_U` `[d, f]` is its transpose, so that features share the residual
//! stream; the MLPs have fewer neurons in all than there are features. `layers.i.mlp_in` `[m, d]`, `layers.i.mlp_out`
//! `[d, m]`. Bushnaq, Braun and Sharkey, "Stochastic Parameter Decomposition", 2025; names are the reference's.

use std::collections::BTreeMap;

use spd_configs::{Activation, Model};
use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::{Linear, Orientation, Start, TargetTensor};
use crate::pass::Pass;

struct Sizes {
    f: usize,
    d: usize,
    m: usize,
    n_layer: usize,
    activation: Activation,
    /// Of `mlp_in` and of `mlp_out`.
    biases: [bool; 2],
}

fn sizes(model: &Model) -> Sizes {
    match *model {
        Model::ResidMlp {
            n_features,
            d_embed,
            d_mlp,
            n_layer,
            activation,
            in_bias,
            out_bias,
        } => Sizes {
            f: n_features,
            d: d_embed,
            m: d_mlp,
            n_layer,
            activation,
            biases: [in_bias, out_bias],
        },
        _ => unreachable!("called for a residual MLP"),
    }
}

pub(super) fn linears(model: &Model) -> Vec<Linear> {
    let s = sizes(model);
    let linear = |path: String, d_in, d_out, bias| Linear {
        path,
        d_in,
        d_out,
        orientation: Orientation::OutIn,
        bias,
    };
    let of_layer = |i: usize| {
        [
            linear(format!("layers.{i}.mlp_in"), s.d, s.m, s.biases[0]),
            linear(format!("layers.{i}.mlp_out"), s.m, s.d, s.biases[1]),
        ]
    };
    (0..s.n_layer).flat_map(of_layer).collect()
}

pub(super) fn tensors(model: &Model) -> Vec<TargetTensor> {
    let s = sizes(model);
    let fixed = |name: &str, dims: [usize; 2], start| TargetTensor {
        name: name.into(),
        dims: dims.to_vec(),
        start,
        trained: false,
        transpose_of: None,
    };
    let mut all = vec![
        fixed("W_E", [s.f, s.d], Start::UnitRows),
        TargetTensor {
            transpose_of: Some("W_E".into()),
            ..fixed("W_U", [s.d, s.f], Start::Zeros)
        },
    ];
    for linear in linears(model) {
        // PyTorch's defaults for a linear layer: uniform within 1 / sqrt(d_in), matrix and bias.
        let trained = |name: &str, dims: &[usize]| TargetTensor {
            name: format!("{}.{name}", linear.path),
            dims: dims.to_vec(),
            start: Start::Uniform(1.0 / (linear.d_in as f64).sqrt()),
            trained: true,
            transpose_of: None,
        };
        all.push(trained("weight", &linear.weight_dims()));
        if linear.bias {
            all.push(trained("bias", &[linear.d_out]));
        }
    }
    all
}

pub(super) fn forward(
    model: &Model,
    b: &mut Builder,
    weights: &BTreeMap<String, Value>,
    pass: &mut Pass<'_>,
    x_bf: Value,
) -> Result<Value> {
    let s = sizes(model);
    let mut r_bd = b.linear_io(x_bf, weights["W_E"], None)?;
    for i in 0..s.n_layer {
        let h_bm = pass.linear(b, &format!("layers.{i}.mlp_in"), r_bd)?;
        let h_bm = activate(b, s.activation, h_bm)?;
        let mlp_bd = pass.linear(b, &format!("layers.{i}.mlp_out"), h_bm)?;
        r_bd = b.add(r_bd, mlp_bd)?;
    }
    b.linear_io(r_bd, weights["W_U"], None)
}

/// What the target is trained to give: `x + act(x)`.
pub(super) fn labels(model: &Model, b: &mut Builder, x_bf: Value) -> Result<Value> {
    let active_bf = activate(b, sizes(model).activation, x_bf)?;
    b.add(x_bf, active_bf)
}

fn activate(b: &mut Builder, activation: Activation, x: Value) -> Result<Value> {
    match activation {
        Activation::Relu => b.relu(x),
        Activation::Gelu => b.gelu(x, GeluKind::Exact),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Executor, Pool, Store, Type};

    use super::*;

    // The normal distribution function of 1 is 0.841345, of 2 0.977250.
    #[test]
    fn labels_are_features_plus_their_activation() {
        for (activation, expected) in [
            (Activation::Relu, [-1.0, 0.0, 4.0]),
            (Activation::Gelu, [-1.158_655, 0.0, 3.954_5]),
        ] {
            let model = Model::ResidMlp {
                n_features: 3,
                d_embed: 4,
                d_mlp: 2,
                n_layer: 1,
                activation,
                in_bias: false,
                out_bias: false,
            };
            let mut b = Builder::new();
            let x = b.input("x", &Type::f32(&[1, 3])).unwrap();
            let labels = labels(&model, &mut b, x).unwrap();
            b.output("labels", labels);
            let (mut executor, mut store) = (
                Executor::new(&b, &Arc::new(Pool::single()).into()).unwrap(),
                Store::new(),
            );
            executor.input("x").copy_from_slice(&[-1.0, 0.0, 2.0]);
            executor.run(&mut store).unwrap();
            for (found, expected) in executor.output("labels", &store).iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5, "{activation:?}: {found}");
            }
        }
    }

    #[test]
    fn biases_are_tensors_where_the_run_file_asks_for_them() {
        let named = |in_bias, out_bias| {
            let model = Model::ResidMlp {
                n_features: 3,
                d_embed: 4,
                d_mlp: 2,
                n_layer: 1,
                activation: Activation::Relu,
                in_bias,
                out_bias,
            };
            let shapes = tensors(&model).into_iter();
            let shapes = shapes.map(|tensor| format!("{} {:?}", tensor.name, tensor.dims));
            shapes.collect::<Vec<_>>().join(", ")
        };
        assert_eq!(
            named(false, false),
            "W_E [3, 4], W_U [4, 3], layers.0.mlp_in.weight [2, 4], layers.0.mlp_out.weight [4, 2]"
        );
        assert_eq!(
            named(true, true),
            "W_E [3, 4], W_U [4, 3], layers.0.mlp_in.weight [2, 4], layers.0.mlp_in.bias [2], \
             layers.0.mlp_out.weight [4, 2], layers.0.mlp_out.bias [4]"
        );
    }
}
