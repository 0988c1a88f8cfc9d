//! The toy model of superposition: `y = relu(W2 H .. H W1 x + b)`, trained with `W2 = W1^T`.
//!
//! `linear1` `[h, f]`, `hidden_layers.i` `[h, h]` without nonlinearity between, `linear2` `[f, h]`
//! with bias. It is trained to give its input, so a run file whose features are negative is
//! refused. Elhage et al., "Toy models of superposition", 2022; sizes and names are the
//! reference's.
//!
//! # Keys of `[target]`
//!
//! - tms: `n_features`, `n_hidden` | | `n_features`, `n_hidden` of `tms_model_config` | widths
//! - tms: `n_hidden_layers`, `zero_bias` | 0, false | `n_hidden_layers`, `init_bias_to_zero` |
//!   square layers inside; whether the bias starts at 0

use std::sync::Arc;

use serde::Serialize;
use serde_json::json;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Size};
use spd_engine::{Builder, Result, Value};

use super::{
    Export, FeatureDirections, Found, Input, Layer, Listed, OfReference, OfToy, Start, Target,
    TargetTensor, Traits,
};
use crate::pass::Pass;
use crate::run_file::config_json::ConfigJson;

/// Toy model of superposition: `relu(W2 (hidden ...) W1 x + b)` with `W2 = W1^T`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Tms {
    /// Input and output features.
    pub n_features: usize,
    /// Width of the bottleneck.
    pub n_hidden: usize,
    /// Square hidden layers between the two, fixed to the identity when the target is trained.
    pub n_hidden_layers: usize,
    /// Whether the bias starts at zero; otherwise uniform in +-1/sqrt(n_hidden), PyTorch's default.
    pub zero_bias: bool,
}

fn read(table: &mut Table<'_>) -> Found<Tms> {
    let n_features = table.need("n_features", Size::at_least(1));
    let n_hidden = table.need("n_hidden", Size::at_least(1));
    let n_hidden_layers = table.or("n_hidden_layers", Size::at_least(0), 0);
    let zero_bias = table.or("zero_bias", Flag, false);
    let network = all_read! { Tms: n_features, n_hidden, n_hidden_layers, zero_bias };
    Found::of_features(n_features, network)
}

pub(super) const TMS: Listed<Tms> = Listed {
    traits: Traits {
        learns: Some("|x|"),
        tied: Some(["linear1", "linear2"]),
        ..Traits::PLAIN
    },
    reference: Some(OfReference {
        class: "spd.experiments.tms.models.TMSModel",
        file: "tms_model_config",
        read: of_reference,
    }),
    export: Some(|tms| {
        Ok(Export::Toy(OfToy {
            kind: "tms",
            sizes: json!({
                "n_features": tms.n_features,
                "n_hidden": tms.n_hidden,
                "n_hidden_layers": tms.n_hidden_layers,
                "tied_weights": true,
                "init_bias_to_zero": tms.zero_bias,
                "device": "cpu",
            }),
            has_identities: tms.n_hidden_layers > 0,
            has_labels: None,
        }))
    }),
    ..Listed::new(read, |tms| Ok(Arc::new(*tms)))
};

/// The sizes in a file of the SPD reference.
fn of_reference(json: &mut ConfigJson) {
    json.size("n_features", &["tms_model_config.n_features"]);
    json.size("n_hidden", &["tms_model_config.n_hidden"]);
    json.maybe("n_hidden_layers", &["tms_model_config.n_hidden_layers"]);
    json.maybe("zero_bias", &["tms_model_config.init_bias_to_zero"]);
    json.only("tms_model_config.tied_weights", &[true.into()]);
}

impl Target for Tms {
    fn describe(&self) -> String {
        let hidden = match self.n_hidden_layers {
            0 => String::new(),
            layers => format!(", {layers} hidden identity"),
        };
        let (features, dimensions) = (self.n_features, self.n_hidden);
        format!("tms, {features} features in {dimensions} dimensions{hidden}")
    }

    fn input(&self) -> Input {
        Input::Features(self.n_features)
    }

    fn layers(&self) -> Vec<Layer> {
        let (f, h) = (self.n_features, self.n_hidden);
        let ends = [
            Layer::linear("linear1", f, h, false),
            Layer::linear("linear2", h, f, true),
        ];
        let hidden = (0..self.n_hidden_layers)
            .map(|i| Layer::linear(format!("hidden_layers.{i}"), h, h, false));
        ends.into_iter().chain(hidden).collect()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (f, h) = (self.n_features, self.n_hidden);
        // PyTorch's defaults for a linear layer: uniform within 1 / sqrt(d_in), matrix and bias.
        let uniform = |d_in: usize| Start::Uniform(1.0 / (d_in as f64).sqrt());
        let bias = if self.zero_bias {
            Start::Zeros
        } else {
            uniform(h)
        };
        let ends = [
            TargetTensor::trained("linear1.weight", &[h, f], uniform(f)),
            TargetTensor::transpose("linear2.weight", &[f, h], "linear1.weight"),
            TargetTensor::trained("linear2.bias", &[f], bias),
        ];
        let hidden = (0..self.n_hidden_layers).map(|i| {
            TargetTensor::fixed(
                format!("hidden_layers.{i}.weight"),
                &[h, h],
                Start::Identity,
            )
        });
        ends.into_iter().chain(hidden).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, x_bf: Value) -> Result<Value> {
        let mut h_bh = pass.linear(b, "linear1", x_bf)?;
        for i in 0..self.n_hidden_layers {
            h_bh = pass.linear(b, &format!("hidden_layers.{i}"), h_bh)?;
        }
        let y_bf = pass.linear(b, "linear2", h_bh)?;
        b.relu(y_bf)
    }

    fn tied(&self) -> Option<[&'static str; 2]> {
        Some(["linear1", "linear2"])
    }

    fn reads_features(&self, path: &str) -> Option<FeatureDirections> {
        (path == "linear1").then_some(FeatureDirections::Elements)
    }
}
