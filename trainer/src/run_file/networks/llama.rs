//! `kind = "llama_simple"`, the reference's small Llama: RMSNorm, rotary positions, shared key heads, a SwiGLU MLP, a tied head, no
//! bias anywhere; `kind = "llama_simple_mlp"`: the same with one matrix up, a tanh GELU and one matrix down; and `kind = "llama"`, Hugging
//! Face's Llama and its descendants: with a head of its own or a tied one, with biases or norms of `q` and `k` or without.

use serde::Serialize;
use serde_json::{Value, json};

use super::{Found, Input, OfTransformers, Reads, read_heads};
use spd_configs::{
    reader::Table,
    values::{Flag, Number, Size, brief},
};

use crate::run_file::config_json::ConfigJson;

/// Sizes of one of the reference's Llamas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LlamaSimple {
    /// Vocabulary size.
    pub vocab: usize,
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Query heads; divides `d_model` into heads of an even width.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_kv_head: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
}

impl LlamaSimple {
    /// What it reads.
    pub fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }
}

/// Sizes of a Llama of Hugging Face.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Llama {
    /// Vocabulary size.
    pub vocab: usize,
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_kv_head: usize,
    /// Width of a head, an even number.
    pub d_head: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
    /// Base of the angles of rotary positions.
    pub rope_base: f64,
    /// Whether `q`, `k` and `v` have biases.
    pub qkv_bias: bool,
    /// Whether the matrix after the attention has one.
    pub o_bias: bool,
    /// Whether each head of `q` and `k` goes through a norm before it is turned.
    pub qk_norm: bool,
    /// Whether the head is the token embedding.
    pub tied_head: bool,
    /// Added to mean squares.
    pub norm_eps: f64,
    /// Slower angles for longer texts, as Llama 3.1 has them.
    pub rope_scaling: Option<RopeScaling>,
}

/// How slow angles of rotary positions are made slower still, so that a model reads longer texts than those of its first training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RopeScaling {
    /// What the slowest angles are divided by.
    pub factor: f64,
    /// Angles of fewer turns in `n_ctx` positions are divided whole.
    pub low: f64,
    /// Angles of more turns stay.
    pub high: f64,
    /// Positions of the first training.
    pub n_ctx: usize,
}

impl Llama {
    pub(super) fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    /// The `config.json` that [`of_json`] reads, in the family that has these biases and norms.
    ///
    /// # Errors
    ///
    /// When none has them.
    pub(crate) fn of_transformers(&self) -> Result<OfTransformers, String> {
        let (model_type, class) = match (self.qk_norm, self.qkv_bias, self.o_bias) {
            (false, qkv, o) if qkv == o => ("llama", "transformers.LlamaForCausalLM"),
            (false, true, false) => ("qwen2", "transformers.Qwen2ForCausalLM"),
            (true, qkv, o) if qkv == o => ("qwen3", "transformers.Qwen3ForCausalLM"),
            _ => {
                return Err(
                    "Hugging Face's library has no Llama with this qkv_bias, o_bias and qk_norm"
                        .into(),
                );
            }
        };
        let scaling = self.rope_scaling.map_or(Value::Null, |scaling| {
            json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.n_ctx,
            })
        });
        let config = json!({
            "model_type": model_type,
            "architectures": [class.trim_start_matches("transformers.")],
            "vocab_size": self.vocab,
            "max_position_embeddings": self.n_ctx,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_kv_head,
            "head_dim": self.d_head,
            "intermediate_size": self.d_mlp,
            "rope_theta": self.rope_base,
            "rope_scaling": scaling,
            "attention_bias": self.o_bias,
            "tie_word_embeddings": self.tied_head,
            "rms_norm_eps": self.norm_eps,
        });
        Ok(OfTransformers { class, config })
    }
}

/// The three matrices of its MLP hold as much as two of width `4 d_model`.
pub(super) fn read_gated(table: &mut Table<'_>) -> Found<LlamaSimple> {
    read_simple(table, |d_model| d_model.saturating_mul(8) / 3)
}

pub(super) fn read_plain(table: &mut Table<'_>) -> Found<LlamaSimple> {
    read_simple(table, |d_model| d_model.saturating_mul(4))
}

fn read_simple(
    table: &mut Table<'_>,
    natural_width: impl Fn(usize) -> usize,
) -> Found<LlamaSimple> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = read_heads(table, d_model);
    let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
    let width = d_model.map_or(1, |d_model| natural_width(d_model).clamp(1, Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), width);
    if let (Some(d_model), Some(n_head)) = (d_model, n_head)
        && d_model % n_head == 0
        && d_model / n_head % 2 != 0
    {
        let message = format!(
            "expected heads of an even width, whose columns rotary positions turn in pairs, found d_model / n_head = {}",
            d_model / n_head
        );
        table.refuse::<()>("n_head", message);
    }
    check_kv_heads(table, n_head, n_kv_head);
    let network = || {
        Some(LlamaSimple {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            n_kv_head: n_kv_head?,
            d_mlp: d_mlp?,
        })
    };
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}

/// The number of key heads, which has to divide that of query heads.
fn check_kv_heads(table: &mut Table<'_>, n_head: Option<usize>, n_kv_head: Option<usize>) {
    if let (Some(n_head), Some(n_kv_head)) = (n_head, n_kv_head)
        && n_head % n_kv_head != 0
    {
        let message = format!("expected a divisor of n_head = {n_head}, found {n_kv_head}");
        table.refuse::<()>("n_kv_head", message);
    }
}

pub(super) fn read(table: &mut Table<'_>) -> Found<Llama> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    // Where the width of a head is said, heads need not be as wide together as the residual stream.
    let (n_head, d_head) = if table.has("d_head") {
        let n_head = table.need("n_head", Size::at_least(1));
        (n_head, table.need("d_head", Size::at_least(2)))
    } else {
        let n_head = read_heads(table, d_model);
        let natural = d_model
            .zip(n_head)
            .map_or(2, |(d_model, n_head)| d_model / n_head);
        (n_head, table.or("d_head", Size::at_least(2), natural))
    };
    if let Some(d_head) = d_head.filter(|d_head| d_head % 2 != 0 || *d_head == 0) {
        let message = format!(
            "expected heads of an even width, whose columns rotary positions turn in pairs, found {d_head}"
        );
        table.refuse::<()>("d_head", message);
    }
    let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
    check_kv_heads(table, n_head, n_kv_head);
    let width = d_model.map_or(1, |d_model| {
        (d_model.saturating_mul(8) / 3).clamp(1, Size::MOST)
    });
    let d_mlp = table.or("d_mlp", Size::at_least(1), width);
    let rope_base = table.or("rope_base", Number::POSITIVE, 1e4);
    let qkv_bias = table.or("qkv_bias", Flag, false);
    let o_bias = table.or("o_bias", Flag, false);
    let qk_norm = table.or("qk_norm", Flag, false);
    let tied_head = table.or("tied_head", Flag, false);
    let norm_eps = table.or("norm_eps", Number::POSITIVE, 1e-6);
    let rope_scaling = table.maybe_table("rope_scaling", read_scaling);
    let network = || {
        Some(Llama {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            n_kv_head: n_kv_head?,
            d_head: d_head?,
            d_mlp: d_mlp?,
            rope_base: rope_base?,
            qkv_bias: qkv_bias?,
            o_bias: o_bias?,
            qk_norm: qk_norm?,
            tied_head: tied_head?,
            norm_eps: norm_eps?,
            rope_scaling: rope_scaling?,
        })
    };
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}

fn read_scaling(table: &mut Table<'_>) -> Option<RopeScaling> {
    let factor = table.need("factor", Number::POSITIVE);
    let low = table.need("low", Number::POSITIVE);
    let high = table.need("high", Number::POSITIVE);
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    if let (Some(low), Some(high)) = (low, high)
        && low >= high
    {
        table.refuse::<()>(
            "high",
            format!(
                "expected more turns than low = {}, found {}",
                brief(low),
                brief(high)
            ),
        );
    }
    Some(RopeScaling {
        factor: factor?,
        low: low?,
        high: high?,
        n_ctx: n_ctx?,
    })
}

/// What Hugging Face's families on Llama differ in, where their files do not say it.
#[derive(Clone, Copy)]
pub(super) struct Family {
    pub(super) qkv_bias: bool,
    pub(super) qk_norm: bool,
}

/// The keys of a Llama of Hugging Face.
pub(super) fn of_json(json: &mut ConfigJson, family: Family) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["max_position_embeddings"]);
    json.size("d_model", &["hidden_size"]);
    json.size("n_layer", &["num_hidden_layers"]);
    json.size("n_head", &["num_attention_heads"]);
    json.maybe("n_kv_head", &["num_key_value_heads"]);
    json.maybe("d_head", &["head_dim"]);
    json.size("d_mlp", &["intermediate_size"]);
    json.maybe("rope_base", &["rope_theta", "rope_parameters.rope_theta"]);
    json.rope_scaling("rope_scaling");
    if family.qkv_bias {
        json.say("qkv_bias", "true", "model_type");
    } else {
        json.maybe("qkv_bias", &["attention_bias"]);
        json.maybe("o_bias", &["attention_bias"]);
    }
    if family.qk_norm {
        json.say("qk_norm", "true", "model_type");
    }
    json.maybe("tied_head", &["tie_word_embeddings"]);
    json.maybe("norm_eps", &["rms_norm_eps"]);
    json.only("hidden_act", &["silu".into()]);
    json.only("mlp_bias", &[false.into()]);
    json.only("rope_interleaved", &[false.into()]);
    json.within_window("n_ctx");
}
