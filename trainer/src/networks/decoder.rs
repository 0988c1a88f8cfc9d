//! The network that most language models are: blocks of a causal attention and an MLP on a
//! residual stream, each behind a norm.
//!
//! ```text
//! x = embedding, and vectors of positions if they are learned
//! y = x + attention(norm_1(x))     x = y + mlp(norm_2(y))       each block
//! logits = head(norm(x))
//! ```
//!
//! In a parallel block `norm_2` reads `x`. An MLP has a gate (SwiGLU), or a nonlinearity. A network
//! says its sizes as those of a [`Decoder`], and has [`Names`] for each of its layouts.

use std::sync::Arc;

use spd_configs::words;
use spd_engine::ops::{GeluKind, Heads, Qkv, RotaryScaling};
use spd_engine::{Builder, Result, Value};

use super::layer_norm::{layer_norm, layer_norm_tensors};
use super::{
    Block, Input, Layer, LayerKind, Most, Network, Start, TapKind, Target, TargetTensor, Units,
};
use crate::pass::Pass;
use crate::rounded::rounded;

/// A decoder with its sizes.
#[derive(Debug, Clone)]
pub(super) struct Decoder {
    pub(super) names: &'static Names,
    pub(super) vocab: usize,
    pub(super) n_ctx: usize,
    pub(super) d_model: usize,
    pub(super) n_layer: usize,
    pub(super) n_head: usize,
    pub(super) n_kv_head: usize,
    /// Width of a head; `None` for its share of `d_model`.
    pub(super) d_head: Option<usize>,
    pub(super) d_mlp: usize,
    /// Whether there are biases: of what attention reads from, of what is behind it, of the MLP.
    pub(super) biases: [bool; 3],
    /// Whether each head of `q` and `k` goes through a norm before it is turned.
    pub(super) qk_norm: bool,
    pub(super) rotary: Option<Rotary>,
    /// Blocks whose queries see so many keys, their own the last, from 0.
    pub(super) local: (Vec<usize>, usize),
    /// Whether the MLP reads what attention reads; or else what it leaves.
    pub(super) parallel: bool,
    /// Nonlinearity of an MLP without a gate.
    pub(super) activation: Nonlinearity,
    /// Added to variances, or to mean squares.
    pub(super) norm_eps: f64,
    pub(super) tied_head: bool,
}

/// Positions that turn the first columns of each head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rotary {
    pub(super) columns: usize,
    pub(super) base: f64,
    pub(super) scaling: Option<RotaryScaling>,
}

/// Names of the layers of a decoder, and how their tensors lie.
#[derive(Debug)]
pub(super) struct Names {
    /// The word of a run file.
    pub(super) kind: &'static str,
    pub(super) embedding: &'static str,
    /// Vectors of positions, if they are learned.
    pub(super) positions: Option<&'static str>,
    /// Blocks, before their number.
    pub(super) blocks: &'static str,
    /// Whether norms are LayerNorms, and not RMSNorms.
    pub(super) layer_norm: bool,
    pub(super) norms: [&'static str; 2],
    pub(super) last_norm: &'static str,
    /// The norms of heads of `q` and `k`, where there are any.
    pub(super) head_norms: [&'static str; 2],
    pub(super) inputs: Inputs,
    pub(super) attn_out: &'static str,
    /// The matrix before the neurons; with a gate, that of the gate before it.
    pub(super) into_mlp: &'static [&'static str],
    pub(super) mlp_out: &'static str,
    pub(super) head: &'static str,
    /// Layout of the matrices of blocks.
    pub(super) layout: LayerKind,
    /// Factor of attention scores, if not `1 / sqrt(d_head)`.
    pub(super) scale: Option<f32>,
    /// Whether heads of queries may share heads of keys.
    pub(super) shares_keys: bool,
    /// Whether norms start behind all matrices, in the order of starting draws.
    pub(super) norms_start_last: bool,
}

/// The matrices that attention reads from.
#[derive(Debug)]
pub(super) enum Inputs {
    /// One for each of `q`, `k` and `v`.
    Apart([&'static str; 3]),
    /// One: all of `q`, all of `k`, all of `v`.
    Joined(&'static str),
    /// One: `q`, `k` and `v` of the first head, then those of the next.
    ByHead(&'static str),
}

words! {
    /// Nonlinearity of an MLP without gates.
    pub enum Nonlinearity {
        /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
        GeluTanh = "gelu_tanh",
        /// `x` times the normal distribution function of `x`.
        Gelu = "gelu",
        /// `max(x, 0)`.
        Relu = "relu",
    }
}

impl Nonlinearity {
    /// The names of Hugging Face, and ours.
    pub(super) const NAMES: &[(&str, &str)] = &[
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
    ];

    /// The first name that Hugging Face has for it.
    pub(super) fn of_transformers(self) -> &'static str {
        match self {
            Self::GeluTanh => "gelu_new",
            Self::Gelu => "gelu",
            Self::Relu => "relu",
        }
    }

    pub(super) fn apply(self, b: &mut Builder, x: Value) -> Result<Value> {
        match self {
            Self::GeluTanh => b.gelu(x, GeluKind::Tanh),
            Self::Gelu => b.gelu(x, GeluKind::Exact),
            Self::Relu => b.relu(x),
        }
    }
}

/// Standard deviation of matrices when a language model starts: 0.02 everywhere, and less where a
/// block writes to the residual stream, so that its variance does not grow with depth.
fn starts(n_layer: usize) -> [Start; 2] {
    [0.02, 0.02 / (2.0 * n_layer as f64).sqrt()].map(Start::Normal)
}

impl Decoder {
    fn d_head(&self) -> usize {
        self.d_head.unwrap_or(self.d_model / self.n_head)
    }

    /// The path of something in a block.
    fn path(&self, layer: usize, name: &str) -> String {
        format!("{}.{layer}.{name}", self.names.blocks)
    }

    fn heads(&self, layer: usize) -> Heads {
        let (local, window) = &self.local;
        Heads {
            window: local.contains(&layer).then_some(*window),
            scale: self.names.scale,
            ..Heads::causal(self.n_head, self.n_kv_head)
        }
    }

    /// Tensors of all norms.
    fn norms(&self) -> Vec<TargetTensor> {
        let names = self.names;
        let of_heads = names.head_norms.iter().filter(|_| self.qk_norm);
        let of_heads = of_heads.map(|name| (*name, self.d_head()));
        let of_block = names.norms.iter().map(|name| (*name, self.d_model));
        let of_block: Vec<(&str, usize)> = of_block.chain(of_heads).collect();
        let of_blocks = (0..self.n_layer).flat_map(|layer| {
            let norms = of_block.iter();
            norms.map(move |(name, width)| (self.path(layer, name), *width))
        });
        let all = of_blocks.chain([(names.last_norm.to_owned(), self.d_model)]);
        // An RMSNorm has no bias.
        let parts = if names.layer_norm { 2 } else { 1 };
        all.flat_map(|(name, width)| layer_norm_tensors(&name, width).into_iter().take(parts))
            .collect()
    }

    fn norm(&self, b: &mut Builder, pass: &Pass<'_>, name: &str, x: Value) -> Result<Value> {
        if self.names.layer_norm {
            return layer_norm(b, pass, name, x, self.norm_eps);
        }
        let weight = pass.weight(&format!("{name}.weight"));
        b.rms_norm(x, weight, rounded(self.norm_eps))
    }

    /// Each head of `x`, f32 `[b, t, heads d_head]`, through a norm.
    fn head_norm(&self, b: &mut Builder, pass: &Pass<'_>, name: &str, x: Value) -> Result<Value> {
        let dims = b.ty(x).dims.clone();
        let d_head = self.d_head();
        let heads = b.reshape(x, &[dims[0], dims[1], dims[2] / d_head, d_head])?;
        let normed = self.norm(b, pass, name, heads)?;
        b.reshape(normed, &dims)
    }

    /// Queries, keys and values of a block from its normed input.
    fn qkv(&self, b: &mut Builder, pass: &mut Pass<'_>, layer: usize, x: Value) -> Result<Qkv> {
        let names = self.names;
        let mut project = |b: &mut Builder, name| pass.linear(b, &self.path(layer, name), x);
        let [mut q, mut k, v] = match names.inputs {
            Inputs::Joined(name) => return project(b, name).map(Qkv::Joined),
            Inputs::ByHead(name) => return project(b, name).map(Qkv::ByHead),
            Inputs::Apart([q, k, v]) => [project(b, q)?, project(b, k)?, project(b, v)?],
        };
        if self.qk_norm {
            let [of_q, of_k] = names.head_norms.map(|name| self.path(layer, name));
            q = self.head_norm(b, pass, &of_q, q)?;
            k = self.head_norm(b, pass, &of_k, k)?;
        }
        Ok(Qkv::Apart([q, k, v]))
    }

    /// The neurons of a block from its normed input.
    fn neurons(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        layer: usize,
        x: Value,
    ) -> Result<Value> {
        let mut project = |b: &mut Builder, name| pass.linear(b, &self.path(layer, name), x);
        if let [gate, up] = self.names.into_mlp {
            let (gate_btm, up_btm) = (project(b, gate)?, project(b, up)?);
            return b.swiglu(gate_btm, up_btm);
        }
        let hidden_btm = project(b, self.names.into_mlp[0])?;
        self.activation.apply(b, hidden_btm)
    }
}

impl Target for Decoder {
    fn describe(&self) -> String {
        let keys = match self.names.shares_keys {
            true => format!(" on {} of keys", self.n_kv_head),
            false => String::new(),
        };
        format!(
            "{}, {} layers of width {}, {} heads{keys}, mlp {}, {} tokens, {} positions",
            self.names.kind,
            self.n_layer,
            self.d_model,
            self.n_head,
            self.d_mlp,
            self.vocab,
            self.n_ctx
        )
    }

    fn input(&self) -> Input {
        Input::tokens(self.vocab, self.n_ctx)
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        let [n_head, n_kv_head] = most.heads(self.d_model, self.n_head, self.n_kv_head);
        let (d_model, n_ctx) = (self.d_model.min(most.width), self.n_ctx.min(most.positions));
        let n_layer = self.n_layer.min(most.layers);
        let d_head = self.d_head.map(|d_head| match d_model < self.d_model {
            true => d_head.min(d_model / n_head),
            false => d_head,
        });
        let (local, window) = &self.local;
        // Alternating windows go on to alternate.
        let local = local.iter().map(|layer| layer % most.layers);
        let local = local.filter(|layer| *layer < n_layer).collect();
        let mut cut = Self {
            vocab: self.vocab.min(most.vocab),
            n_ctx,
            d_model,
            n_layer,
            n_head,
            n_kv_head,
            d_head,
            d_mlp: self.d_mlp.min(4 * d_model),
            local: (local, (*window).min(n_ctx / 2).max(1)),
            ..self.clone()
        };
        let widths = [self.d_head(), cut.d_head()];
        if let Some(Rotary { columns, .. }) = &mut cut.rotary {
            // As large a part of a head.
            *columns = (*columns * widths[1] / widths[0] / 2 * 2).max(2);
        }
        Some(Arc::new(cut))
    }

    fn layers(&self) -> Vec<Layer> {
        let (names, d, d_mlp) = (self.names, self.d_model, self.d_mlp);
        let [d_q, d_kv] = [self.n_head, self.n_kv_head].map(|heads| heads * self.d_head());
        let [of_inputs, of_output, of_mlp] = self.biases;
        let (heads, neurons) = (Units::heads(self.n_head), Units::neurons(d_mlp));
        let kv_heads = Units::shared_heads(self.n_kv_head, self.n_head / self.n_kv_head);
        let inputs = match names.inputs {
            Inputs::Apart([q, k, v]) => {
                vec![(q, d_q, heads), (k, d_kv, kv_heads), (v, d_kv, kv_heads)]
            }
            Inputs::Joined(name) => vec![(name, 3 * d_q, Units::heads(3 * self.n_head))],
            // A head has its `q`, `k` and `v` side by side.
            Inputs::ByHead(name) => vec![(name, 3 * d_q, heads)],
        };
        let mut all = vec![Layer::embedding(names.embedding, self.vocab, d)];
        for layer in 0..self.n_layer {
            let linear = |name: &str, d_in, d_out, bias| Layer {
                kind: names.layout,
                ..Layer::linear(self.path(layer, name), d_in, d_out, bias)
            };
            let block = Block {
                number: layer,
                of: self.n_layer,
                d_model: d,
                d_heads: d_q,
                d_mlp,
            };
            let inputs = inputs.iter();
            let inputs =
                inputs.map(|(name, d_out, units)| linear(name, d, *d_out, of_inputs).feeds(*units));
            let attn_out = linear(names.attn_out, d_q, d, of_output).reads(heads);
            let into_mlp = names.into_mlp.iter();
            let into_mlp = into_mlp.map(|name| linear(name, d, d_mlp, of_mlp).feeds(neurons));
            let mlp_out = linear(names.mlp_out, d_mlp, d, of_mlp).reads(neurons);
            let layers = inputs.chain([attn_out]).chain(into_mlp).chain([mlp_out]);
            all.extend(layers.map(|layer| layer.inside(block)));
        }
        let tied_to = self.tied_head.then(|| names.embedding.to_owned());
        all.push(Layer::head(names.head, d, self.vocab, tied_to));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let names = self.names;
        let [normal, residual] = starts(self.n_layer);
        let layers = self.layers();
        let (embedding, others) = layers.split_at(1);
        let of_layers = |layers: &[Layer]| -> Vec<TargetTensor> {
            let own = layers.iter().filter(|layer| layer.tied_to.is_none());
            own.flat_map(|layer| {
                let mut writers = [names.attn_out, names.mlp_out].into_iter();
                let writes = writers.any(|name| layer.path.ends_with(name));
                TargetTensor::starting(
                    layer,
                    [if writes { residual } else { normal }, Start::Zeros],
                )
            })
            .collect()
        };
        let positions = names.positions.map(|name| {
            let dims = [self.n_ctx, self.d_model];
            TargetTensor::trained(format!("{name}.weight"), &dims, normal)
        });
        let (mut first, mut last) = (self.norms(), of_layers(others));
        if names.norms_start_last {
            std::mem::swap(&mut first, &mut last);
        }
        let embedding = of_layers(embedding).into_iter().chain(positions);
        embedding.chain(first).chain(last).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let names = self.names;
        let rotary = match self.rotary {
            Some(Rotary {
                columns,
                base,
                scaling,
            }) => {
                let positions = b.ty(tokens_bt).columns();
                Some(b.rotary_table(positions, columns, base, scaling)?)
            }
            None => None,
        };
        let learned_td = names
            .positions
            .map(|name| pass.weight(&format!("{name}.weight")));
        let mut x_btd = pass.embedding(b, names.embedding, tokens_bt, learned_td)?;
        for layer in 0..self.n_layer {
            let path = |name| self.path(layer, name);
            pass.tap(TapKind::ResidPre, layer, x_btd);
            let normed_btd = self.norm(b, pass, &path(names.norms[0]), x_btd)?;
            pass.tap(TapKind::AttnIn, layer, normed_btd);
            let qkv = self.qkv(b, pass, layer, normed_btd)?;
            let mixed_btd = pass.attention(b, qkv, self.heads(layer), rotary)?;
            pass.tap(TapKind::AttnOut, layer, mixed_btd);
            let attn_btd = pass.linear(b, &path(names.attn_out), mixed_btd)?;
            let attended_btd = b.add(x_btd, attn_btd)?;
            pass.tap(TapKind::ResidMid, layer, attended_btd);
            let read_btd = if self.parallel { x_btd } else { attended_btd };
            let normed_btd = self.norm(b, pass, &path(names.norms[1]), read_btd)?;
            pass.tap(TapKind::MlpIn, layer, normed_btd);
            let hidden_btm = self.neurons(b, pass, layer, normed_btd)?;
            pass.tap(TapKind::MlpHidden, layer, hidden_btm);
            let mlp_btd = pass.linear(b, &path(names.mlp_out), hidden_btm)?;
            x_btd = b.add(attended_btd, mlp_btd)?;
            pass.tap(TapKind::ResidPost, layer, x_btd);
        }
        let x_btd = self.norm(b, pass, names.last_norm, x_btd)?;
        pass.linear(b, names.head, x_btd)
    }
}
