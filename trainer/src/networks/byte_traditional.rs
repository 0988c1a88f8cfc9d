//! A transformer on bytes, which the byte-spectral models are measured against: LayerNorm after
//! each sublayer, ReLU, biases, and no positions. A causal attention without positions still
//! tells orders apart, since a position sees what came before it and no more.
//!
//! ```text
//! y = norm1(x + out_proj(attention(q x, k x, v x)))
//! z = norm2(y + linear2(relu(linear1 y)))
//! ```
//!
//! It is PyTorch's `TransformerEncoderLayer` under a causal mask, but for `q`, `k` and `v`, which
//! are layers of their own here: as one parameter they could be no sites. Vaswani et al.,
//! "Attention is all you need", 2017.
//!
//! # Keys of `[target]`
//!
//! - byte_traditional: `n_head` | | | attention heads
//! - byte_traditional: `d_mlp` | 4 `d_model` | | width of the MLP

use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_engine::ops::{Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::bytes::{self, LAST_NORM};
use super::layer_norm::{NORM_EPS, layer_norm, layer_norm_tensors};
use super::{
    Found, Input, Layer, Listed, Most, Network, Start, Target, TargetTensor, read_d_mlp, read_heads,
};
use crate::pass::Pass;

/// Sizes of a transformer on bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ByteTraditional {
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Attention heads; divides `d_model`.
    pub n_head: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
}

fn read(table: &mut Table<'_>) -> Found<ByteTraditional> {
    let [n_ctx, d_model, n_layer] = bytes::read_sizes(table);
    let n_head = read_heads(table, d_model);
    let d_mlp = read_d_mlp(table, d_model, [4, 1]);
    let network = all_read! { ByteTraditional: n_ctx, d_model, n_layer, n_head, d_mlp };
    Found::of_tokens(n_ctx, network)
}

pub(super) const BYTE_TRADITIONAL: Listed<ByteTraditional> =
    Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

const EMBEDDING: &str = "embedding";

impl ByteTraditional {
    /// The attention of a block.
    pub(crate) fn attend(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        path: &str,
        x_btd: Value,
    ) -> Result<Value> {
        let mut project = |b: &mut Builder, name| pass.linear(b, &format!("{path}.{name}"), x_btd);
        let qkv = Qkv::Apart([project(b, "q")?, project(b, "k")?, project(b, "v")?]);
        let mixed_btd = pass.attention(b, qkv, Heads::causal(self.n_head, self.n_head), None)?;
        pass.linear(b, &format!("{path}.out_proj"), mixed_btd)
    }
}

impl Target for ByteTraditional {
    fn describe(&self) -> String {
        format!(
            "byte_traditional, {} layers of width {}, {} heads, mlp {}, {} positions",
            self.n_layer, self.d_model, self.n_head, self.d_mlp, self.n_ctx
        )
    }

    fn input(&self) -> Input {
        bytes::input(self.n_ctx)
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        let [n_head, _] = most.heads(self.d_model, self.n_head, self.n_head);
        let d_model = self.d_model.min(most.width);
        Some(Arc::new(Self {
            n_ctx: self.n_ctx.min(most.positions),
            d_model,
            n_layer: self.n_layer.min(most.layers),
            n_head,
            d_mlp: self.d_mlp.min(4 * d_model),
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let (d, d_mlp) = (self.d_model, self.d_mlp);
        let of_block = [
            ("self_attn.q", d, d, true),
            ("self_attn.k", d, d, true),
            ("self_attn.v", d, d, true),
            ("self_attn.out_proj", d, d, true),
            ("linear1", d, d_mlp, true),
            ("linear2", d_mlp, d, true),
        ];
        let blocks = 0..self.n_layer;
        let blocks = blocks.flat_map(|layer| Layer::below(&format!("layers.{layer}."), of_block));
        let embedding = Layer::embedding(EMBEDDING, bytes::BYTES, d);
        let output = bytes::output_layer(d);
        [embedding]
            .into_iter()
            .chain(blocks)
            .chain([output])
            .collect()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        // PyTorch's defaults: a normal embedding, and linear layers within 1 / sqrt(d_in).
        let layers = self.layers();
        let dims = layers[0].weight_dims();
        let embedding =
            TargetTensor::trained(format!("{EMBEDDING}.weight"), &dims, Start::Normal(1.0));
        let linear = layers[1..].iter().flat_map(TargetTensor::of_layer);
        let norms =
            (0..self.n_layer).flat_map(|layer| [1, 2].map(|n| format!("layers.{layer}.norm{n}")));
        let norms = norms.chain([LAST_NORM.to_owned()]);
        let norms = norms.flat_map(|norm| layer_norm_tensors(&norm, self.d_model));
        [embedding].into_iter().chain(linear).chain(norms).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let mut x_btd = pass.embedding(b, EMBEDDING, tokens_bt, None)?;
        for layer in 0..self.n_layer {
            let block = format!("layers.{layer}");
            let attn_btd = self.attend(b, pass, &format!("{block}.self_attn"), x_btd)?;
            let sum_btd = b.add(x_btd, attn_btd)?;
            x_btd = layer_norm(b, pass, &format!("{block}.norm1"), sum_btd, NORM_EPS)?;
            let hidden_btm = pass.linear(b, &format!("{block}.linear1"), x_btd)?;
            let hidden_btm = b.relu(hidden_btm)?;
            let mlp_btd = pass.linear(b, &format!("{block}.linear2"), hidden_btm)?;
            let sum_btd = b.add(x_btd, mlp_btd)?;
            x_btd = layer_norm(b, pass, &format!("{block}.norm2"), sum_btd, NORM_EPS)?;
        }
        let x_btd = layer_norm(b, pass, LAST_NORM, x_btd, NORM_EPS)?;
        bytes::output(b, pass, x_btd)
    }
}
