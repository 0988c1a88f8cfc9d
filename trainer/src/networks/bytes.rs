//! Parts that the networks on bytes share.
//!
//! # Keys of `[target]`
//!
//! - byte models: `n_ctx`, `d_model`, `n_layer` | | | sizes; their vocabulary is the 256 bytes

use spd_configs::reader::Table;
use spd_configs::values::Size;
use spd_engine::{Builder, Result, Value};

use super::layer::bias_of_positions;
use super::{Input, Layer, Start, TargetTensor};
use crate::pass::Pass;

/// Size of the vocabulary of bytes.
pub(super) const BYTES: usize = 256;

const EMBEDDING: &str = "byte_proj";
const OUTPUT: &str = "output";
pub(super) const LAST_NORM: &str = "norm";

/// Reads `n_ctx`, `d_model` and `n_layer`.
pub(super) fn read_sizes(table: &mut Table<'_>) -> [Option<usize>; 3] {
    [("n_ctx", 1), ("d_model", 2), ("n_layer", 1)]
        .map(|(key, least)| table.need(key, Size::at_least(least)))
}

/// Bytes as token ids.
pub(super) fn input(n_ctx: usize) -> Input {
    Input::tokens(BYTES, n_ctx)
}

/// The embedding of bytes of the spectral models: a linear layer on a byte as 256 zeros and a one,
/// with a bias.
pub(super) fn projection_layer(d_model: usize) -> Layer {
    Layer::embedding(EMBEDDING, BYTES, d_model)
}

/// Tensors of that layer, as PyTorch starts them.
pub(super) fn projection_tensors(d_model: usize) -> [TargetTensor; 2] {
    let start = Start::Uniform(1.0 / (BYTES as f64).sqrt());
    [("weight", vec![BYTES, d_model]), ("bias", vec![d_model])]
        .map(|(part, dims)| TargetTensor::trained(format!("{EMBEDDING}.{part}"), &dims, start))
}

/// Vectors of bytes u32 `[b, t]`, f32 `[b, t, d]`.
pub(super) fn project(b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
    let bias = pass.weight(&format!("{EMBEDDING}.bias"));
    let bias_td = bias_of_positions(b, b.ty(tokens_bt).columns(), bias)?;
    pass.embedding(b, EMBEDDING, tokens_bt, Some(bias_td))
}

/// The layer of logits.
pub(super) fn output_layer(d_model: usize) -> Layer {
    Layer::linear(OUTPUT, d_model, BYTES, true)
}

/// Logits of bytes f32 `[b, t, 256]`.
pub(super) fn output(b: &mut Builder, pass: &mut Pass<'_>, x_btd: Value) -> Result<Value> {
    pass.linear(b, OUTPUT, x_btd)
}
