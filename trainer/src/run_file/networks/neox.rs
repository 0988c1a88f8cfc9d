//! `kind = "gpt_neox"`, Hugging Face's GPT-NeoX, of which the Pythias are: LayerNorm, rotary positions on a part of each head, `q`, `k`
//! and `v` of a head side by side, attention and MLP beside each other, a head of its own.

use serde::Serialize;
use serde_json::json;

use super::{Found, Input, Nonlinearity, OfTransformers, Reads, gpt2::NORM_EPS, read_heads};
use spd_configs::{
    reader::Table,
    values::{Flag, Number, Size},
};

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
    pub(super) fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    /// The `config.json` that [`of_json`] reads.
    pub(crate) fn of_transformers(&self) -> OfTransformers {
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

pub(super) fn read(table: &mut Table<'_>) -> Found<GptNeoX> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
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
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}

/// The keys of a GPT-NeoX of Hugging Face.
pub(super) fn of_json(json: &mut ConfigJson) {
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
