//! `kind = "tms"`: the toy model of superposition.

use serde::Serialize;

use super::{Found, Input, Reads, Traits};
use spd_configs::{
    reader::Table,
    values::{Flag, Size},
};

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

impl Tms {
    pub(super) fn input(&self) -> Input {
        Input::Features(self.n_features)
    }
}

pub(super) const TRAITS: Traits = Traits {
    learns: Some("|x|"),
    tied: Some(["linear1", "linear2"]),
    ..Traits::PLAIN
};

pub(super) fn read(table: &mut Table<'_>) -> Found<Tms> {
    let n_features = table.need("n_features", Size::at_least(1));
    let n_hidden = table.need("n_hidden", Size::at_least(1));
    let n_hidden_layers = table.or("n_hidden_layers", Size::at_least(0), 0);
    let zero_bias = table.or("zero_bias", Flag, false);
    let network = || {
        Some(Tms {
            n_features: n_features?,
            n_hidden: n_hidden?,
            n_hidden_layers: n_hidden_layers?,
            zero_bias: zero_bias?,
        })
    };
    Found {
        reads: Reads::Features(n_features),
        network: network(),
    }
}
