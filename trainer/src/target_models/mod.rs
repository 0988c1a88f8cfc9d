//! The frozen network under study. A model is written once, and asks a [`Pass`] for its linear layers by name: that is
//! where sites are hooked in, when the program is built.

mod gpt2;
pub(crate) mod linear;
mod llama;
mod resid_mlp;
mod tms;
mod weights;

use std::collections::BTreeMap;

use spd_configs::Model;
use spd_engine::{Builder, Result, Value};

pub use linear::{Linear, Orientation};
pub use weights::{Weights, load, read_tensors};

use crate::pass::Pass;

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Start {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// The identity matrix.
    Identity,
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform between minus and plus this.
    Uniform(f64),
    /// Rows of length 1 in random directions.
    UnitRows,
}

/// A tensor of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetTensor {
    /// Its name in a safetensors file.
    pub name: String,
    /// Its shape.
    pub dims: Vec<usize>,
    /// How it starts when the target is trained.
    pub start: Start,
    /// Whether training moves it.
    pub trained: bool,
    /// Another tensor of which it is the transpose; it is then no parameter of its own.
    pub transpose_of: Option<String>,
}

/// What a batch is to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// Vectors of features, f32 `[b, f]`.
    Features(usize),
    /// Token ids, u32 `[b, t]`.
    Tokens,
}

impl Linear {
    /// Shape of the weight.
    pub fn weight_dims(&self) -> [usize; 2] {
        match self.orientation {
            Orientation::OutIn => [self.d_out, self.d_in],
            Orientation::InOut | Orientation::Identity => [self.d_in, self.d_out],
        }
    }
}

/// The linear layers of a model, in the order of its modules.
pub fn linears(model: &Model) -> Vec<Linear> {
    match model {
        Model::Tms { .. } => tms::linears(model),
        Model::ResidMlp { .. } => resid_mlp::linears(model),
        Model::Gpt2 { .. } | Model::Gpt2Simple { .. } => gpt2::linears(model),
        Model::LlamaSimple(_) | Model::LlamaSimpleMlp(_) => llama::linears(model),
    }
}

/// All tensors of a model.
pub fn tensors(model: &Model) -> Vec<TargetTensor> {
    match model {
        Model::Tms { .. } => tms::tensors(model),
        Model::ResidMlp { .. } => resid_mlp::tensors(model),
        Model::Gpt2 { .. } | Model::Gpt2Simple { .. } => gpt2::tensors(model),
        Model::LlamaSimple(_) | Model::LlamaSimpleMlp(_) => llama::tensors(model),
    }
}

/// What a batch is to a model.
pub fn input_kind(model: &Model) -> InputKind {
    match *model {
        Model::Tms { n_features, .. } | Model::ResidMlp { n_features, .. } => {
            InputKind::Features(n_features)
        }
        _ => InputKind::Tokens,
    }
}

/// The output of the model on a batch: features f32 `[b, f]`, or logits f32 `[b, t, v]`.
///
/// # Errors
///
/// When shapes do not fit, which [`load`] has ruled out.
pub fn forward(
    model: &Model,
    b: &mut Builder,
    weights: &BTreeMap<String, Value>,
    pass: &mut Pass<'_>,
    input: Value,
) -> Result<Value> {
    match model {
        Model::Tms { .. } => tms::forward(model, b, pass, input),
        Model::ResidMlp { .. } => resid_mlp::forward(model, b, weights, pass, input),
        Model::Gpt2 { .. } | Model::Gpt2Simple { .. } => {
            gpt2::forward(model, b, weights, pass, input)
        }
        Model::LlamaSimple(_) | Model::LlamaSimpleMlp(_) => {
            llama::forward(model, b, weights, pass, input)
        }
    }
}

/// What a model of features is trained to give, f32 `[b, f]`: its loss is the mean squared distance from this.
///
/// # Errors
///
/// Never: every shape fits.
pub fn feature_labels(model: &Model, b: &mut Builder, x_bf: Value) -> Result<Value> {
    match model {
        Model::ResidMlp { .. } => resid_mlp::labels(model, b, x_bf),
        // A TMS is asked for |x|, and a run file whose features are negative is refused.
        _ => Ok(x_bf),
    }
}

/// One line for people: `gpt2, 3 layers of width 128, ...`.
pub fn describe(model: &Model) -> String {
    match *model {
        Model::Tms {
            n_features,
            n_hidden,
            n_hidden_layers,
            ..
        } => {
            let hidden = if n_hidden_layers > 0 {
                format!(", {n_hidden_layers} hidden identity")
            } else {
                String::new()
            };
            format!("tms, {n_features} features in {n_hidden} dimensions{hidden}")
        }
        Model::ResidMlp {
            n_features,
            d_embed,
            d_mlp,
            n_layer,
            ..
        } => {
            let layers = if n_layer == 1 { "layer" } else { "layers" };
            format!(
                "resid_mlp, {n_layer} {layers} of {d_mlp} neurons, {n_features} features in {d_embed} dimensions"
            )
        }
        Model::Gpt2 { .. } | Model::Gpt2Simple { .. } => gpt2::describe(model),
        Model::LlamaSimple(_) | Model::LlamaSimpleMlp(_) => llama::describe(model),
    }
}
