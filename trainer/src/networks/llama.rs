//! Llamas: RMSNorm before each sublayer, rotary positions, causal attention whose query heads may
//! share key heads.
//!
//! The reference's small ones have no bias and a head tied to the token embedding; `LlamaSimple`
//! has a SwiGLU MLP, `LlamaSimpleMLP` a plain one. Hugging Face's (`transformers.LlamaForCausalLM`,
//! and Mistral, Qwen 2 and Qwen 3, which are built on it) have a head of their own or a tied one,
//! heads of any width, and where they say so biases, a norm of each head of `q` and `k`, or slower
//! angles for longer texts.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023; names and layouts
//! are theirs.
//!
//! # Keys of `[target]`
//!
//! - llamas: `n_kv_head` | `n_head` | `n_key_value_heads` | heads of keys and values, each shared
//!   by `n_head / n_kv_head` of queries
//! - llama: `d_head`, `qkv_bias`, `o_bias`, `qk_norm` | `d_model / n_head`, false, false, false | |
//!   width of a head; biases; whether heads of `q` and `k` go through a norm
//! - llama: `rope_scaling` | none | | `{ factor, low, high, n_ctx }`: slower angles for longer
//!   texts, as in Llama 3.1

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size, brief};
use spd_engine::ops::RotaryScaling;

use super::decoder::{Decoder, Inputs, Names, Nonlinearity, Rotary};
use super::gpt2;
use super::{
    Export, Found, LayerKind, Listed, OfReference, OfTransformers, read_d_mlp, read_heads,
    read_sizes,
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
    /// The decoder of these sizes, with these names.
    fn decoder(&self, names: &'static Names) -> Decoder {
        let sizes = Llama {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
            d_model: self.d_model,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_kv_head: self.n_kv_head,
            d_head: self.d_model / self.n_head,
            d_mlp: self.d_mlp,
            rope_base: 10_000.0,
            qkv_bias: false,
            o_bias: false,
            qk_norm: false,
            tied_head: true,
            norm_eps: 1e-6,
            rope_scaling: None,
        };
        sizes.decoder(names)
    }

    /// Its sizes in a file of the SPD reference.
    fn of_reference(&self, model_type: &str) -> Json {
        json!({
            "model_type": model_type,
            "block_size": self.n_ctx,
            "vocab_size": self.vocab,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.d_model,
            "n_intermediate": self.d_mlp,
            "rotary_dim": self.d_model / self.n_head,
            "n_ctx": self.n_ctx,
            "n_key_value_heads": self.n_kv_head,
            "use_grouped_query_attention": true,
        })
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

/// How slow angles of rotary positions are made slower still, so that a model reads longer texts
/// than those of its first training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RopeScaling {
    /// Divisor of the slowest angles.
    pub factor: f64,
    /// Angles of fewer turns in `n_ctx` positions are divided whole.
    pub low: f64,
    /// Angles of more turns stay.
    pub high: f64,
    /// Positions of the first training.
    pub n_ctx: usize,
}

impl Llama {
    /// The decoder of these sizes, with these names.
    fn decoder(&self, names: &'static Names) -> Decoder {
        let scaling = self.rope_scaling.map(|scaling| RotaryScaling {
            factor: scaling.factor,
            low: scaling.low,
            high: scaling.high,
            context: scaling.n_ctx as f64,
        });
        Decoder {
            names,
            vocab: self.vocab,
            n_ctx: self.n_ctx,
            d_model: self.d_model,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_kv_head: self.n_kv_head,
            d_head: Some(self.d_head),
            d_mlp: self.d_mlp,
            biases: [self.qkv_bias, self.o_bias, false],
            qk_norm: self.qk_norm,
            rotary: Some(Rotary {
                columns: self.d_head,
                base: self.rope_base,
                scaling,
            }),
            local: (Vec::new(), 0),
            parallel: false,
            activation: Nonlinearity::GeluTanh,
            norm_eps: self.norm_eps,
            tied_head: self.tied_head,
        }
    }

    /// The `config.json` that [`of_json`] reads, in the family that has these biases and norms.
    ///
    /// # Errors
    ///
    /// When none has them.
    fn of_transformers(&self) -> Result<OfTransformers, String> {
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
        let scaling = self.rope_scaling.map_or(Json::Null, |scaling| {
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

/// - `d_mlp`: the usual width of the MLP, as a quotient of that of the residual stream: three
///   matrices of 8/3 of it hold as much as two of 4 times it
fn read_simple(table: &mut Table<'_>, d_mlp: [usize; 2]) -> Found<LlamaSimple> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 1);
    let n_head = read_heads(table, d_model);
    let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
    let d_mlp = read_d_mlp(table, d_model, d_mlp);
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
    table.divides("n_kv_head", n_kv_head, ("n_head", n_head));
    let network = all_read! {
        LlamaSimple: vocab, n_ctx, d_model, n_layer, n_head, n_kv_head, d_mlp
    };
    Found::of_tokens(n_ctx, network)
}

fn read(table: &mut Table<'_>) -> Found<Llama> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 1);
    // With an explicit head width, heads need not add up to the residual stream.
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
    table.divides("n_kv_head", n_kv_head, ("n_head", n_head));
    let d_mlp = read_d_mlp(table, d_model, [8, 3]);
    let rope_base = table.or("rope_base", Number::POSITIVE, 1e4);
    let qkv_bias = table.or("qkv_bias", Flag, false);
    let o_bias = table.or("o_bias", Flag, false);
    let qk_norm = table.or("qk_norm", Flag, false);
    let tied_head = table.or("tied_head", Flag, false);
    let norm_eps = table.or("norm_eps", Number::POSITIVE, 1e-6);
    let rope_scaling = table.maybe_table("rope_scaling", read_scaling);
    let network = all_read! {
        Llama: vocab, n_ctx, d_model, n_layer, n_head, n_kv_head, d_head, d_mlp, rope_base,
            qkv_bias, o_bias, qk_norm, tied_head, norm_eps, rope_scaling
    };
    Found::of_tokens(n_ctx, network)
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
    all_read! { RopeScaling: factor, low, high, n_ctx }
}

/// The keys of a Llama of Hugging Face.
///
/// - `qkv_bias`, `qk_norm`: whether its family has them, which files leave out
fn of_json(json: &mut ConfigJson, [qkv_bias, qk_norm]: [bool; 2]) {
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
    if qkv_bias {
        json.say("qkv_bias", "true", "model_type");
    } else {
        json.maybe("qkv_bias", &["attention_bias"]);
        json.maybe("o_bias", &["attention_bias"]);
    }
    if qk_norm {
        json.say("qk_norm", "true", "model_type");
    }
    json.maybe("tied_head", &["tie_word_embeddings"]);
    json.maybe("norm_eps", &["rms_norm_eps"]);
    json.only("hidden_act", &["silu".into()]);
    json.only("mlp_bias", &[false.into()]);
    json.only("rope_interleaved", &[false.into()]);
    json.within_window("n_ctx");
}

pub(super) const LLAMA: Listed<Llama> = Listed {
    architectures: &[
        ("llama", |json| of_json(json, [false, false])),
        ("mistral", |json| of_json(json, [false, false])),
        ("qwen2", |json| of_json(json, [true, false])),
        ("qwen3", |json| of_json(json, [false, true])),
    ],
    export: Some(|llama| llama.of_transformers().map(Export::Transformers)),
    ..Listed::new(read, |sizes| Ok(Arc::new(sizes.decoder(&HUGGINGFACE))))
};

pub(super) const LLAMA_SIMPLE: Listed<LlamaSimple> = Listed {
    reference: Some(OfReference {
        class: "spd.pretrain.models.llama_simple.LlamaSimple",
        file: "LlamaSimple",
        read: reference_sizes,
    }),
    export: Some(|llama| Ok(Export::Simple(llama.of_reference("LlamaSimple")))),
    ..Listed::new(
        |table| read_simple(table, [8, 3]),
        |sizes| Ok(Arc::new(sizes.decoder(&SIMPLE))),
    )
};

pub(super) const LLAMA_SIMPLE_MLP: Listed<LlamaSimple> = Listed {
    reference: Some(OfReference {
        class: "spd.pretrain.models.llama_simple_mlp.LlamaSimpleMLP",
        file: "LlamaSimpleMLP",
        read: reference_sizes,
    }),
    export: Some(|llama| Ok(Export::Simple(llama.of_reference("LlamaSimpleMLP")))),
    ..Listed::new(
        |table| read_simple(table, [4, 1]),
        |sizes| Ok(Arc::new(sizes.decoder(&SIMPLE_MLP))),
    )
};

/// The sizes in a file of the SPD reference.
fn reference_sizes(json: &mut ConfigJson) {
    gpt2::reference_sizes(json);
    json.size("d_mlp", &["n_intermediate"]);
    // Without it, queries, keys and values come from one matrix.
    json.only("use_grouped_query_attention", &[true.into()]);
    json.size("n_kv_head", &["n_key_value_heads"]);
    json.only("attn_bias", &[false.into()]);
    json.only("mlp_bias", &[false.into()]);
    json.only("rotary_adjacent_pairs", &[false.into()]);
    json.only("rotary_base", &[10_000.into(), 10_000.0.into()]);
    json.only("rms_norm_eps", &[1e-6.into()]);
}

const HUGGINGFACE: Names = Names {
    kind: "llama",
    embedding: "model.embed_tokens",
    positions: None,
    blocks: "model.layers",
    layer_norm: false,
    norms: ["input_layernorm", "post_attention_layernorm"],
    last_norm: "model.norm",
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    inputs: Inputs::Apart(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    attn_out: "self_attn.o_proj",
    into_mlp: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
    head: "lm_head",
    layout: LayerKind::OutIn,
    scale: None,
    shares_keys: true,
    norms_start_last: false,
};

const SIMPLE: Names = Names {
    kind: "llama_simple",
    embedding: "wte",
    blocks: "h",
    norms: ["rms_1", "rms_2"],
    last_norm: "ln_f",
    inputs: Inputs::Apart(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
    attn_out: "attn.o_proj",
    ..HUGGINGFACE
};

const SIMPLE_MLP: Names = Names {
    kind: "llama_simple_mlp",
    into_mlp: &["mlp.c_fc"],
    ..SIMPLE
};
