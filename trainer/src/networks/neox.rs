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
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size};

use super::decoder::{Decoder, Inputs, Names, Nonlinearity, Rotary};
use super::layer_norm::NORM_EPS;
use super::{Export, Found, LayerKind, Listed, OfTransformers, read_d_mlp, read_heads, read_sizes};
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
    fn decoder(&self) -> Decoder {
        Decoder {
            names: &NAMES,
            vocab: self.vocab,
            n_ctx: self.n_ctx,
            d_model: self.d_model,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_kv_head: self.n_head,
            d_head: None,
            d_mlp: self.d_mlp,
            biases: [self.attention_bias, self.attention_bias, true],
            qk_norm: false,
            rotary: Some(Rotary {
                columns: self.d_rotary,
                base: self.rope_base,
                scaling: None,
            }),
            local: (Vec::new(), 0),
            parallel: self.parallel,
            activation: self.activation,
            norm_eps: self.norm_eps,
            tied_head: self.tied_head,
        }
    }

    /// The `config.json` that [`of_json`] reads.
    fn of_transformers(&self) -> OfTransformers {
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
    let d_mlp = read_d_mlp(table, d_model, [4, 1]);
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
    let network = all_read! {
        GptNeoX: vocab, n_ctx, d_model, n_layer, n_head, d_mlp, d_rotary, rope_base, parallel,
            attention_bias, tied_head, activation, norm_eps
    };
    Found::of_tokens(n_ctx, network)
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
    ..Listed::new(read, |sizes| Ok(Arc::new(sizes.decoder())))
};

const NAMES: Names = Names {
    kind: "gpt_neox",
    embedding: "gpt_neox.embed_in",
    positions: None,
    blocks: "gpt_neox.layers",
    layer_norm: true,
    norms: ["input_layernorm", "post_attention_layernorm"],
    last_norm: "gpt_neox.final_layer_norm",
    head_norms: [""; 2],
    inputs: Inputs::ByHead("attention.query_key_value"),
    attn_out: "attention.dense",
    into_mlp: &["mlp.dense_h_to_4h"],
    mlp_out: "mlp.dense_4h_to_h",
    head: "embed_out",
    layout: LayerKind::OutIn,
    scale: None,
    shares_keys: false,
    norms_start_last: true,
};
