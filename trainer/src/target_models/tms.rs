//! The toy model of superposition: `y = relu(W2 H .. H W1 x + b)`, trained with `W2 = W1^T`.
//!
//! `linear1` `[h, f]`, `hidden_layers.i` `[h, h]` without nonlinearity between, `linear2` `[f, h]` with bias. It is trained to give
//! its input, so a run file whose features are negative is refused. Elhage et al., "Toy models of superposition", 2022; sizes and
//! names are the reference's.

use spd_engine::{Builder, Result, Value};

use super::{FeatureDirections, Layer, Start, Target, TargetTensor};
use crate::pass::Pass;
use crate::run_file::{Input, Tms};

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
