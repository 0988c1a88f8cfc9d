//! The residual MLP toy: `r = x W_E; r += mlp_out(act(mlp_in(r)))` a layer; `y = r W_U`, trained to
//! give `x + act(x)`.
//!
//! `W_E` `[f, d]` has fixed random rows of length 1 and `W_U` `[d, f]` is its transpose, so that
//! features share the residual stream; the MLPs have fewer neurons in all than there are features.
//! `layers.i.mlp_in` `[m, d]`, `layers.i.mlp_out` `[d, m]`. Bushnaq, Braun and Sharkey, "Stochastic
//! Parameter Decomposition", 2025; names are the reference's.
//!
//! # Keys of `[target]`
//!
//! - resid_mlp: `n_features`, `d_embed`, `d_mlp`, `n_layer` | | `n_features`, `d_embed`, `d_mlp`,
//!   `n_layers` of `resid_mlp_model_config` | features, width of the residual stream, neurons a
//!   layer, layers
//! - resid_mlp: `activation`, `in_bias`, `out_bias` | `"relu"`, false, false | `act_fn_name`,
//!   `in_bias`, `out_bias` | or `"gelu"`; whether the layers' two matrices have biases

use std::sync::Arc;

use serde::Serialize;
use serde_json::json;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, OneOf, Size};
use spd_engine::{Builder, Result, Value};

use super::decoder::Nonlinearity;
use super::{
    Export, FeatureDirections, Found, Input, Layer, Listed, OfReference, OfToy, SolvedWhen, Start,
    Target, TargetTensor, Traits, Units,
};
use crate::pass::Pass;
use crate::run_file::config_json::ConfigJson;

/// Residual MLPs between a fixed random embedding and its transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResidMlp {
    /// Input and output features.
    pub n_features: usize,
    /// Width of the residual stream.
    pub d_embed: usize,
    /// Width of each MLP.
    pub d_mlp: usize,
    /// MLPs.
    pub n_layer: usize,
    /// Nonlinearity of the MLPs, and of the labels `x + activation(x)` that the target is trained
    /// on.
    pub activation: Nonlinearity,
    /// Whether `mlp_in` has a bias.
    pub in_bias: bool,
    /// Whether `mlp_out` has a bias.
    pub out_bias: bool,
}

/// Its nonlinearities.
const ACTIVATIONS: OneOf<Nonlinearity> =
    OneOf(&[("relu", Nonlinearity::Relu), ("gelu", Nonlinearity::Gelu)]);

fn read(table: &mut Table<'_>) -> Found<ResidMlp> {
    let n_features = table.need("n_features", Size::at_least(1));
    let d_embed = table.need("d_embed", Size::at_least(1));
    let d_mlp = table.need("d_mlp", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let activation = table.or("activation", ACTIVATIONS, Nonlinearity::Relu);
    let in_bias = table.or("in_bias", Flag, false);
    let out_bias = table.or("out_bias", Flag, false);
    let network = all_read! {
        ResidMlp: n_features, d_embed, d_mlp, n_layer, activation, in_bias, out_bias
    };
    Found::of_features(n_features, network)
}

pub(super) const RESID_MLP: Listed<ResidMlp> = Listed {
    traits: Traits {
        low: -1.0,
        ..Traits::PLAIN
    },
    reference: Some(OfReference {
        class: "spd.experiments.resid_mlp.models.ResidMLP",
        file: "resid_mlp_model_config",
        read: of_reference,
    }),
    export: Some(|mlp| {
        Ok(Export::Toy(OfToy {
            kind: "resid_mlp",
            sizes: json!({
                "n_features": mlp.n_features,
                "d_embed": mlp.d_embed,
                "d_mlp": mlp.d_mlp,
                "n_layers": mlp.n_layer,
                "act_fn_name": mlp.activation,
                "in_bias": mlp.in_bias,
                "out_bias": mlp.out_bias,
            }),
            has_identities: false,
            has_labels: Some(mlp.n_features),
        }))
    }),
    ..Listed::new(read, |mlp| Ok(Arc::new(*mlp)))
};

/// The sizes in a file of the SPD reference.
fn of_reference(json: &mut ConfigJson) {
    json.size("n_features", &["resid_mlp_model_config.n_features"]);
    json.size("d_embed", &["resid_mlp_model_config.d_embed"]);
    json.size("d_mlp", &["resid_mlp_model_config.d_mlp"]);
    json.size("n_layer", &["resid_mlp_model_config.n_layers"]);
    let activations = [("relu", "relu"), ("gelu", "gelu")];
    json.word(
        "activation",
        "resid_mlp_model_config.act_fn_name",
        &activations,
    );
    json.maybe("in_bias", &["resid_mlp_model_config.in_bias"]);
    json.maybe("out_bias", &["resid_mlp_model_config.out_bias"]);
}

impl Target for ResidMlp {
    fn describe(&self) -> String {
        let layers = if self.n_layer == 1 { "layer" } else { "layers" };
        format!(
            "resid_mlp, {} {layers} of {} neurons, {} features in {} dimensions",
            self.n_layer, self.d_mlp, self.n_features, self.d_embed
        )
    }

    fn input(&self) -> Input {
        Input::Features(self.n_features)
    }

    fn layers(&self) -> Vec<Layer> {
        let (d, m) = (self.d_embed, self.d_mlp);
        let neurons = Units::neurons(m);
        let of_layer = |i: usize| {
            [
                Layer::linear(format!("layers.{i}.mlp_in"), d, m, self.in_bias).feeds(neurons),
                Layer::linear(format!("layers.{i}.mlp_out"), m, d, self.out_bias).reads(neurons),
            ]
        };
        (0..self.n_layer).flat_map(of_layer).collect()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (f, d) = (self.n_features, self.d_embed);
        let embeddings = [
            TargetTensor::fixed("W_E", &[f, d], Start::UnitRows),
            TargetTensor::transpose("W_U", &[d, f], "W_E"),
        ];
        let layers = self.layers();
        let of_layers = layers.iter().flat_map(TargetTensor::of_layer);
        embeddings.into_iter().chain(of_layers).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, x_bf: Value) -> Result<Value> {
        let mut r_bd = b.linear_io(x_bf, pass.weight("W_E"), None)?;
        for i in 0..self.n_layer {
            let h_bm = pass.linear(b, &format!("layers.{i}.mlp_in"), r_bd)?;
            let h_bm = self.activation.apply(b, h_bm)?;
            let mlp_bd = pass.linear(b, &format!("layers.{i}.mlp_out"), h_bm)?;
            r_bd = b.add(r_bd, mlp_bd)?;
        }
        b.linear_io(r_bd, pass.weight("W_U"), None)
    }

    fn loss(&self, b: &mut Builder, x_bf: Value, y_bf: Value) -> Result<Value> {
        let labels_bf = labels(b, self.activation, x_bf)?;
        b.mse(y_bf, labels_bf)
    }

    fn reads_features(&self, path: &str) -> Option<FeatureDirections> {
        path.ends_with(".mlp_in")
            .then_some(FeatureDirections::RowsOf("W_E"))
    }

    /// Two features in a hundred may go without a component of their own.
    fn solved_when(&self) -> SolvedWhen {
        SolvedWhen::MostFeatures
    }
}

/// The labels of its training: `x + act(x)`.
fn labels(b: &mut Builder, activation: Nonlinearity, x_bf: Value) -> Result<Value> {
    let active_bf = activation.apply(b, x_bf)?;
    b.add(x_bf, active_bf)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Alone, Pool, Store, Type};

    use super::*;

    // The normal distribution function of 1 is 0.841345, of 2 0.977250.
    #[test]
    fn labels_are_features_plus_their_activation() {
        for (activation, expected) in [
            (Nonlinearity::Relu, [-1.0, 0.0, 4.0]),
            (Nonlinearity::Gelu, [-1.158_655, 0.0, 3.954_5]),
        ] {
            let mut b = Builder::new();
            let x = b.input("x", &Type::f32(&[1, 3])).unwrap();
            let labels = labels(&mut b, activation, x).unwrap();
            b.output("labels", labels);
            let (mut executor, mut store) = (
                Alone::new(&b, &Arc::new(Pool::single()).into()).unwrap(),
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
            let model = ResidMlp {
                n_features: 3,
                d_embed: 4,
                d_mlp: 2,
                n_layer: 1,
                activation: Nonlinearity::Relu,
                in_bias,
                out_bias,
            };
            let shapes = model.tensors().into_iter();
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
