//! `kind = "gpt2"`, in Hugging Face's layout: a fused `c_attn`, Conv1D weights, a tied head; `kind = "gpt2_simple"`, the
//! reference's: separate `q_proj`, `k_proj` and `v_proj`, and PyTorch's linear layers; and `kind = "gpt_neo"`, Hugging Face's
//! GPT-Neo: as the reference's without biases of `q`, `k` and `v`, scores that are not scaled, and a window in some blocks.

use serde::Serialize;
use serde_json::json;

use super::{Found, Input, OfTransformers, Reads, read_heads};
use spd_configs::{
    reader::Table,
    values::{Flag, Number, OneOf, Size, Sizes},
};

use crate::run_file::config_json::ConfigJson;

/// Sizes of a GPT-2.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpt2 {
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
    /// Nonlinearity of the MLP.
    pub activation: Nonlinearity,
    /// Added to variances.
    pub norm_eps: f64,
    /// Whether the head is the token embedding.
    pub tied_head: bool,
}

/// Nonlinearity of the MLP of a language model without gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Nonlinearity {
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `x` times the normal distribution function of `x`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
}

impl Nonlinearity {
    pub(super) const WORDS: OneOf<'static, Self> = OneOf(&[
        ("gelu_tanh", Self::GeluTanh),
        ("gelu", Self::Gelu),
        ("relu", Self::Relu),
    ]);

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
}

/// What is added to variances where nothing is said.
pub(super) const NORM_EPS: f64 = 1e-5;

/// Sizes of a GPT-Neo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GptNeo {
    /// Those that a GPT-2 has too.
    #[serde(flatten)]
    pub sizes: Gpt2,
    /// Keys that a query of a local block sees, its own the last.
    pub window: usize,
    /// Blocks with a window, from 0.
    pub local_layers: Vec<usize>,
}

impl Gpt2 {
    /// What it reads.
    pub fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    /// Whether all that run files of the reference do not say is as theirs is.
    pub(crate) fn is_usual(&self) -> bool {
        self.activation == Nonlinearity::GeluTanh
            && self.norm_eps.to_bits() == NORM_EPS.to_bits()
            && self.tied_head
    }

    /// The `config.json` that [`of_json`] reads.
    pub(crate) fn of_transformers(&self) -> OfTransformers {
        OfTransformers {
            class: "transformers.GPT2LMHeadModel",
            config: json!({
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "vocab_size": self.vocab,
                "n_positions": self.n_ctx,
                "n_embd": self.d_model,
                "n_layer": self.n_layer,
                "n_head": self.n_head,
                "n_inner": self.d_mlp,
                "activation_function": self.activation.of_transformers(),
                "layer_norm_epsilon": self.norm_eps,
                "tie_word_embeddings": self.tied_head,
            }),
        }
    }
}

impl GptNeo {
    /// What it reads.
    pub fn input(&self) -> Input {
        self.sizes.input()
    }

    /// The `config.json` that [`neo_of_json`] reads.
    pub(crate) fn of_transformers(&self) -> OfTransformers {
        let s = &self.sizes;
        let kinds = (0..s.n_layer).map(|layer| match self.local_layers.contains(&layer) {
            true => "local",
            false => "global",
        });
        let kinds: Vec<_> = kinds.collect();
        OfTransformers {
            class: "transformers.GPTNeoForCausalLM",
            config: json!({
                "model_type": "gpt_neo",
                "architectures": ["GPTNeoForCausalLM"],
                "vocab_size": s.vocab,
                "max_position_embeddings": s.n_ctx,
                "hidden_size": s.d_model,
                "num_layers": s.n_layer,
                "num_heads": s.n_head,
                "intermediate_size": s.d_mlp,
                "window_size": self.window,
                "attention_types": [[kinds, 1]],
                "activation_function": s.activation.of_transformers(),
                "layer_norm_epsilon": s.norm_eps,
                "tie_word_embeddings": s.tied_head,
            }),
        }
    }
}

pub(super) fn read(table: &mut Table<'_>) -> Found<Gpt2> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = read_heads(table, d_model);
    let four_wide = d_model.map_or(1, |d_model| d_model.saturating_mul(4).min(Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), four_wide);
    let activation = table.or("activation", Nonlinearity::WORDS, Nonlinearity::GeluTanh);
    let norm_eps = table.or("norm_eps", Number::POSITIVE, NORM_EPS);
    let tied_head = table.or("tied_head", Flag, true);
    let network = || {
        Some(Gpt2 {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            d_mlp: d_mlp?,
            activation: activation?,
            norm_eps: norm_eps?,
            tied_head: tied_head?,
        })
    };
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}

/// Blocks with a window alternate with others, from the second on, where nothing is said.
pub(super) fn read_neo(table: &mut Table<'_>) -> Found<GptNeo> {
    let found = read(table);
    let window = table.or("window", Size::at_least(1), 256);
    let n_layer = found.network.map_or(0, |sizes| sizes.n_layer);
    let local_layers = table.or("local_layers", Sizes, (1..n_layer).step_by(2).collect());
    let beyond = |layers: &Vec<usize>| layers.iter().copied().find(|&layer| layer >= n_layer);
    if let (Some(_), Some(layer)) = (found.network, local_layers.as_ref().and_then(beyond)) {
        let message = format!("expected blocks below n_layer = {n_layer}, found {layer}");
        table.refuse::<()>("local_layers", message);
    }
    let network = || {
        Some(GptNeo {
            sizes: found.network?,
            window: window?,
            local_layers: local_layers?,
        })
    };
    Found {
        reads: found.reads,
        network: network(),
    }
}

/// The keys of a GPT-2 of Hugging Face.
pub(super) fn of_json(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["n_positions", "n_ctx"]);
    json.size("d_model", &["n_embd"]);
    json.size("n_layer", &["n_layer"]);
    json.size("n_head", &["n_head"]);
    json.maybe("d_mlp", &["n_inner"]);
    json.only("scale_attn_weights", &[true.into()]);
    json.only("scale_attn_by_inverse_layer_idx", &[false.into()]);
    json.only("add_cross_attention", &[false.into()]);
    of_both(json);
}

/// And of a GPT-Neo.
pub(super) fn neo_of_json(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["max_position_embeddings"]);
    json.size("d_model", &["hidden_size"]);
    json.size("n_layer", &["num_layers"]);
    json.size("n_head", &["num_heads"]);
    json.maybe("d_mlp", &["intermediate_size"]);
    json.maybe("window", &["window_size"]);
    json.local_layers("local_layers", "attention_types");
    of_both(json);
}

fn of_both(json: &mut ConfigJson) {
    json.word("activation", "activation_function", Nonlinearity::NAMES);
    json.maybe("norm_eps", &["layer_norm_epsilon"]);
    json.maybe("tied_head", &["tie_word_embeddings"]);
}
