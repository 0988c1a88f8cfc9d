//! `kind = "resid_mlp"`: residual MLPs between a fixed embedding and its transpose.

use serde::Serialize;

use super::{Found, Input, Reads, Traits};
use spd_configs::{
    reader::Table,
    values::{Flag, OneOf, Size},
};

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
    /// Nonlinearity of the MLPs, and of the labels `x + activation(x)` that the target is trained on.
    pub activation: Activation,
    /// Whether `mlp_in` has a bias.
    pub in_bias: bool,
    /// Whether `mlp_out` has a bias.
    pub out_bias: bool,
}

/// Nonlinearity of a [`ResidMlp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x` times the normal distribution function of `x`.
    Gelu,
}

impl ResidMlp {
    pub(super) fn input(&self) -> Input {
        Input::Features(self.n_features)
    }
}

pub(super) const TRAITS: Traits = Traits {
    low: -1.0,
    ..Traits::PLAIN
};

const ACTIVATIONS: OneOf<Activation> =
    OneOf(&[("relu", Activation::Relu), ("gelu", Activation::Gelu)]);

pub(super) fn read(table: &mut Table<'_>) -> Found<ResidMlp> {
    let n_features = table.need("n_features", Size::at_least(1));
    let d_embed = table.need("d_embed", Size::at_least(1));
    let d_mlp = table.need("d_mlp", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let activation = table.or("activation", ACTIVATIONS, Activation::Relu);
    let in_bias = table.or("in_bias", Flag, false);
    let out_bias = table.or("out_bias", Flag, false);
    let network = || {
        Some(ResidMlp {
            n_features: n_features?,
            d_embed: d_embed?,
            d_mlp: d_mlp?,
            n_layer: n_layer?,
            activation: activation?,
            in_bias: in_bias?,
            out_bias: out_bias?,
        })
    };
    Found {
        reads: Reads::Features(n_features),
        network: network(),
    }
}
