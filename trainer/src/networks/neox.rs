//! GPT-NeoX, of which the Pythias are: LayerNorm, rotary positions on the first columns of each
//! head, `q`, `k` and `v` of a head side by side in one matrix, biases, a GELU, and a head of its
//! own. In most, attention and MLP read the same residual stream, each through a norm of its own:
//!
//! ```text
//! x + attention(norm_1(x)) + mlp(norm_2(x))    or else
//! y + mlp(norm_2(y)) with y = x + attention(norm_1(x))
//! ```
//!
//! Black et al., "GPT-NeoX-20B", 2022; names and layouts are those of
//! `transformers.GPTNeoXForCausalLM`.
//!
//! # Keys of `[target]`
//!
//! - gpt_neox: `d_rotary`, `parallel`, `attention_bias` | a quarter of a head, true, true | |
//!   columns of a head that positions turn; whether attention and MLP read the same; whether
//!   attention has biases

use std::sync::Arc;

use serde::Serialize;
use serde_json::json;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size};
use spd_engine::ops::{Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::gpt2::{
    NORM_EPS, Nonlinearity, layer_norm, layer_norm_tensors, layer_tensors, nonlinear, starts,
};
use super::{
    Block, Export, Found, Input, Layer, Listed, Most, Network, OfTransformers, TapKind, Target,
    TargetTensor, Units, read_heads, read_sizes,
};
use crate::pass::Pass;
use crate::run_file::config_json::ConfigJson;

/// Sizes of a GPT-NeoX.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GptNeoX {
    /// Vocabulary size.
    pub vocab: usize,
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
    /// Columns of each head that positions turn, an even number.
    pub d_rotary: usize,
    /// Base of their angles.
    pub rope_base: f64,
    /// Whether the MLP reads what attention reads; or else what it leaves.
    pub parallel: bool,
    /// Whether the matrices of the attention have biases.
    pub attention_bias: bool,
    /// Whether the head is the token embedding.
    pub tied_head: bool,
    /// Nonlinearity of the MLP.
    pub activation: Nonlinearity,
    /// Added to variances.
    pub norm_eps: f64,
}

impl GptNeoX {
    /// The `config.json` that [`of_json`] reads.
    fn of_transformers(&self) -> OfTransformers {
        #[expect(clippy::cast_precision_loss, reason = "widths of a head are small")]
        let part = self.d_rotary as f64 / (self.d_model / self.n_head) as f64;
        OfTransformers {
            class: "transformers.GPTNeoXForCausalLM",
            config: json!({
                "model_type": "gpt_neox",
                "architectures": ["GPTNeoXForCausalLM"],
                "vocab_size": self.vocab,
                "max_position_embeddings": self.n_ctx,
                "hidden_size": self.d_model,
                "num_hidden_layers": self.n_layer,
                "num_attention_heads": self.n_head,
                "intermediate_size": self.d_mlp,
                "rotary_pct": part,
                "rotary_emb_base": self.rope_base,
                "use_parallel_residual": self.parallel,
                "attention_bias": self.attention_bias,
                "tie_word_embeddings": self.tied_head,
                "hidden_act": self.activation.of_transformers(),
                "layer_norm_eps": self.norm_eps,
            }),
        }
    }
}

fn read(table: &mut Table<'_>) -> Found<GptNeoX> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 1);
    let n_head = read_heads(table, d_model);
    let four_wide = d_model.map_or(1, |d_model| d_model.saturating_mul(4).min(Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), four_wide);
    let d_head = d_model
        .zip(n_head)
        .map(|(d_model, n_head)| d_model / n_head);
    let quarter = d_head.map_or(2, |d_head| (d_head / 4).max(2));
    let d_rotary = table.or("d_rotary", Size::at_least(2), quarter);
    if let (Some(d_rotary), Some(d_head)) = (d_rotary, d_head)
        && (d_rotary % 2 != 0 || d_rotary > d_head)
    {
        let message = format!(
            "expected an even number of the d_model / n_head = {d_head} columns of a head, found {d_rotary}"
        );
        table.refuse::<()>("d_rotary", message);
    }
    let rope_base = table.or("rope_base", Number::POSITIVE, 1e4);
    let parallel = table.or("parallel", Flag, true);
    let attention_bias = table.or("attention_bias", Flag, true);
    let tied_head = table.or("tied_head", Flag, false);
    let activation = table.or("activation", Nonlinearity::WORDS, Nonlinearity::Gelu);
    let norm_eps = table.or("norm_eps", Number::POSITIVE, NORM_EPS);
    let network = || {
        Some(GptNeoX {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            d_mlp: d_mlp?,
            d_rotary: d_rotary?,
            rope_base: rope_base?,
            parallel: parallel?,
            attention_bias: attention_bias?,
            tied_head: tied_head?,
            activation: activation?,
            norm_eps: norm_eps?,
        })
    };
    Found::of_tokens(n_ctx, network())
}

/// The keys of a GPT-NeoX of Hugging Face.
fn of_json(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["max_position_embeddings"]);
    json.size("d_model", &["hidden_size"]);
    json.size("n_layer", &["num_hidden_layers"]);
    json.size("n_head", &["num_attention_heads"]);
    json.size("d_mlp", &["intermediate_size"]);
    json.rotary_part("d_rotary", "d_model", "n_head");
    json.maybe(
        "rope_base",
        &[
            "rotary_emb_base",
            "rope_theta",
            "rope_parameters.rope_theta",
        ],
    );
    json.only("rope_scaling", &[]);
    json.only("rope_parameters.rope_type", &["default".into()]);
    json.maybe("parallel", &["use_parallel_residual"]);
    json.maybe("attention_bias", &["attention_bias"]);
    json.maybe("tied_head", &["tie_word_embeddings"]);
    json.word("activation", "hidden_act", Nonlinearity::NAMES);
    json.maybe("norm_eps", &["layer_norm_eps"]);
}

pub(super) const GPT_NEOX: Listed<GptNeoX> = Listed {
    architectures: &[("gpt_neox", of_json)],
    export: Some(|neox| Ok(Export::Transformers(neox.of_transformers()))),
    ..Listed::new(read, |sizes| Ok(Arc::new(*sizes)))
};

const EMBEDDING: &str = "gpt_neox.embed_in";
const HEAD: &str = "embed_out";
const LAST_NORM: &str = "gpt_neox.final_layer_norm";
/// The layers that write to the residual stream.
const WRITERS: [&str; 2] = ["attention.dense", "mlp.dense_4h_to_h"];

fn block(layer: usize) -> String {
    format!("gpt_neox.layers.{layer}")
}

impl Target for GptNeoX {
    fn describe(&self) -> String {
        format!(
            "gpt_neox, {} layers of width {}, {} heads, mlp {}, {} tokens, {} positions",
            self.n_layer, self.d_model, self.n_head, self.d_mlp, self.vocab, self.n_ctx
        )
    }

    fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        let [n_head, _] = most.heads(self.d_model, self.n_head, self.n_head);
        let d_model = self.d_model.min(most.width);
        let [own, cut] = [self.d_model / self.n_head, d_model / n_head];
        // As large a part of a head.
        let d_rotary = (self.d_rotary * cut / own / 2 * 2).max(2);
        Some(Arc::new(Self {
            vocab: self.vocab.min(most.vocab),
            n_ctx: self.n_ctx.min(most.positions),
            d_model,
            n_layer: self.n_layer.min(most.layers),
            n_head,
            d_mlp: self.d_mlp.min(4 * d_model),
            d_rotary,
            ..*self
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let (d, d_mlp) = (self.d_model, self.d_mlp);
        let (heads, neurons) = (Units::heads(self.n_head), Units::neurons(d_mlp));
        let bias = self.attention_bias;
        let mut all = vec![Layer::embedding(EMBEDDING, self.vocab, d)];
        for layer in 0..self.n_layer {
            let block = block(layer);
            let path = |name| format!("{block}.{name}");
            // A head has its `q`, `k` and `v` side by side.
            let qkv = path("attention.query_key_value");
            let place = Block {
                number: layer,
                of: self.n_layer,
                d_model: d,
                d_heads: d,
                d_mlp,
            };
            let layers = [
                Layer::linear(qkv, d, 3 * d, bias).feeds(heads),
                Layer::linear(path(WRITERS[0]), d, d, bias).reads(heads),
                Layer::linear(path("mlp.dense_h_to_4h"), d, d_mlp, true).feeds(neurons),
                Layer::linear(path(WRITERS[1]), d_mlp, d, true).reads(neurons),
            ];
            all.extend(layers.map(|layer| layer.inside(place)));
        }
        let tied_to = self.tied_head.then(|| EMBEDDING.to_owned());
        all.push(Layer::head(HEAD, d, self.vocab, tied_to));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let [normal, residual] = starts(self.n_layer);
        let of_block = |layer| {
            ["input_layernorm", "post_attention_layernorm"]
                .map(|name| format!("{}.{name}", block(layer)))
        };
        let norms = (0..self.n_layer)
            .flat_map(of_block)
            .chain([LAST_NORM.to_owned()]);
        let norms = norms.flat_map(|norm| layer_norm_tensors(&norm, self.d_model));
        let layers = self
            .layers()
            .into_iter()
            .filter(|layer| layer.tied_to.is_none());
        let weights = layers.flat_map(|layer| {
            let writes = WRITERS.iter().any(|name| layer.path.ends_with(name));
            layer_tensors(&layer, if writes { residual } else { normal })
        });
        weights.chain(norms).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let eps = self.norm_eps;
        let positions = b.ty(tokens_bt).columns();
        let rotary = b.rotary_table(positions, self.d_rotary, self.rope_base, None)?;
        let mut x_btd = pass.embedding(b, EMBEDDING, tokens_bt, None)?;
        for layer in 0..self.n_layer {
            let block = block(layer);
            pass.tap(TapKind::ResidPre, layer, x_btd);
            let normed_btd = layer_norm(b, pass, &format!("{block}.input_layernorm"), x_btd, eps)?;
            pass.tap(TapKind::AttnIn, layer, normed_btd);
            let qkv = pass.linear(b, &format!("{block}.attention.query_key_value"), normed_btd)?;
            let heads = Heads::causal(self.n_head, self.n_head);
            let mixed_btd = pass.attention(b, Qkv::ByHead(qkv), heads, Some(rotary))?;
            pass.tap(TapKind::AttnOut, layer, mixed_btd);
            let attn_btd = pass.linear(b, &format!("{block}.{}", WRITERS[0]), mixed_btd)?;
            let attended_btd = b.add(x_btd, attn_btd)?;
            pass.tap(TapKind::ResidMid, layer, attended_btd);
            let read_btd = if self.parallel { x_btd } else { attended_btd };
            let norm = format!("{block}.post_attention_layernorm");
            let normed_btd = layer_norm(b, pass, &norm, read_btd, eps)?;
            pass.tap(TapKind::MlpIn, layer, normed_btd);
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.dense_h_to_4h"), normed_btd)?;
            let hidden_btm = nonlinear(b, self.activation, hidden_btm)?;
            pass.tap(TapKind::MlpHidden, layer, hidden_btm);
            let mlp_btd = pass.linear(b, &format!("{block}.{}", WRITERS[1]), hidden_btm)?;
            x_btd = b.add(attended_btd, mlp_btd)?;
            pass.tap(TapKind::ResidPost, layer, x_btd);
        }
        let x_btd = layer_norm(b, pass, LAST_NORM, x_btd, eps)?;
        pass.linear(b, HEAD, x_btd)
    }
}
