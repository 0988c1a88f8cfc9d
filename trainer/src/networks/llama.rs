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
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size, brief};
use spd_engine::ops::{GeluKind, Heads, Qkv, RotaryScaling};
use spd_engine::{Builder, Result, Value};

use super::gpt2::{self, layer_tensors, starts};
use super::{
    Block, Export, Found, Input, Layer, Listed, Most, OfReference, OfTransformers, Start, TapKind,
    Target, TargetTensor, Units, read_heads, read_sizes,
};
use crate::pass::Pass;
use crate::rounded::rounded;
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
    /// Its input.
    pub(super) fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
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
    /// Its input.
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
    fn of_transformers(&self) -> std::result::Result<OfTransformers, String> {
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

/// The three matrices of its MLP hold as much as two of width `4 d_model`.
fn read_gated(table: &mut Table<'_>) -> Found<LlamaSimple> {
    read_simple(table, |d_model| d_model.saturating_mul(8) / 3)
}

fn read_plain(table: &mut Table<'_>) -> Found<LlamaSimple> {
    read_simple(table, |d_model| d_model.saturating_mul(4))
}

fn read_simple(
    table: &mut Table<'_>,
    natural_width: impl Fn(usize) -> usize,
) -> Found<LlamaSimple> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 1);
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
    Found::of_tokens(n_ctx, network())
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
    Found::of_tokens(n_ctx, network())
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

/// Differences of Hugging Face's Llama families that their files leave out.
#[derive(Clone, Copy)]
struct Family {
    qkv_bias: bool,
    qk_norm: bool,
}

const PLAIN: Family = Family {
    qkv_bias: false,
    qk_norm: false,
};

/// The keys of a Llama of Hugging Face.
fn of_json(json: &mut ConfigJson, family: Family) {
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

pub(super) const LLAMA: Listed<Llama> = Listed {
    architectures: &[
        ("llama", |json| of_json(json, PLAIN)),
        ("mistral", |json| of_json(json, PLAIN)),
        ("qwen2", |json| {
            let family = Family {
                qkv_bias: true,
                ..PLAIN
            };
            of_json(json, family);
        }),
        ("qwen3", |json| {
            let family = Family {
                qk_norm: true,
                ..PLAIN
            };
            of_json(json, family);
        }),
    ],
    export: Some(|llama| llama.of_transformers().map(Export::Transformers)),
    ..Listed::new(read, |sizes| Ok(Arc::new(Network::huggingface(*sizes))))
};

pub(super) const LLAMA_SIMPLE: Listed<LlamaSimple> = Listed {
    reference: Some(OfReference {
        class: "spd.pretrain.models.llama_simple.LlamaSimple",
        file: "LlamaSimple",
        read: reference_sizes,
    }),
    export: Some(|llama| Ok(Export::Simple(llama.of_reference("LlamaSimple")))),
    ..Listed::new(read_gated, |sizes| {
        Ok(Arc::new(Network::simple(*sizes, true)))
    })
};

pub(super) const LLAMA_SIMPLE_MLP: Listed<LlamaSimple> = Listed {
    reference: Some(OfReference {
        class: "spd.pretrain.models.llama_simple_mlp.LlamaSimpleMLP",
        file: "LlamaSimpleMLP",
        read: reference_sizes,
    }),
    export: Some(|llama| Ok(Export::Simple(llama.of_reference("LlamaSimpleMLP")))),
    ..Listed::new(read_plain, |sizes| {
        Ok(Arc::new(Network::simple(*sizes, false)))
    })
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

/// A Llama in one of its layouts.
#[derive(Debug)]
struct Network {
    sizes: Llama,
    names: &'static Names,
    /// Whether the MLP has a gate.
    gated: bool,
}

#[derive(Debug)]
struct Names {
    embedding: &'static str,
    blocks: &'static str,
    attention: &'static str,
    norms: [&'static str; 2],
    last_norm: &'static str,
}

const HUGGINGFACE: Names = Names {
    embedding: "model.embed_tokens",
    blocks: "model.layers",
    attention: "self_attn",
    norms: ["input_layernorm", "post_attention_layernorm"],
    last_norm: "model.norm",
};

const SIMPLE: Names = Names {
    embedding: "wte",
    blocks: "h",
    attention: "attn",
    norms: ["rms_1", "rms_2"],
    last_norm: "ln_f",
};

const HEAD: &str = "lm_head";

impl Network {
    fn huggingface(sizes: Llama) -> Self {
        Self {
            sizes,
            names: &HUGGINGFACE,
            gated: true,
        }
    }

    fn simple(sizes: LlamaSimple, gated: bool) -> Self {
        let LlamaSimple {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            n_kv_head,
            d_mlp,
        } = sizes;
        let sizes = Llama {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            n_kv_head,
            d_head: d_model / n_head,
            d_mlp,
            rope_base: 10_000.0,
            qkv_bias: false,
            o_bias: false,
            qk_norm: false,
            tied_head: true,
            norm_eps: 1e-6,
            rope_scaling: None,
        };
        Self {
            sizes,
            names: &SIMPLE,
            gated,
        }
    }

    fn name(&self) -> &'static str {
        match (self.names.embedding == SIMPLE.embedding, self.gated) {
            (false, _) => "llama",
            (true, true) => "llama_simple",
            (true, false) => "llama_simple_mlp",
        }
    }

    fn block(&self, layer: usize) -> String {
        format!("{}.{layer}", self.names.blocks)
    }

    /// Each head of `x`, f32 `[b, t, heads d_head]`, through a norm.
    fn head_norm(&self, b: &mut Builder, pass: &Pass<'_>, name: &str, x: Value) -> Result<Value> {
        let dims = b.ty(x).dims.clone();
        let d_head = self.sizes.d_head;
        let heads = b.reshape(x, &[dims[0], dims[1], dims[2] / d_head, d_head])?;
        let normed = self.norm(b, pass, name, heads)?;
        b.reshape(normed, &dims)
    }

    fn norm(&self, b: &mut Builder, pass: &Pass<'_>, name: &str, x: Value) -> Result<Value> {
        let weight = pass.weight(&format!("{name}.weight"));
        b.rms_norm(x, weight, rounded(self.sizes.norm_eps))
    }
}

impl Target for Network {
    fn describe(&self) -> String {
        let s = &self.sizes;
        format!(
            "{}, {} layers of width {}, {} heads on {} of keys, mlp {}, {} tokens, {} positions",
            self.name(),
            s.n_layer,
            s.d_model,
            s.n_head,
            s.n_kv_head,
            s.d_mlp,
            s.vocab,
            s.n_ctx
        )
    }

    fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.sizes.vocab,
            n_ctx: self.sizes.n_ctx,
        }
    }

    fn cut_to(&self, most: Most) -> Option<super::Network> {
        let s = &self.sizes;
        let [n_head, n_kv_head] = most.heads(s.d_model, s.n_head, s.n_kv_head);
        let d_model = s.d_model.min(most.width);
        let d_head = match d_model < s.d_model {
            true => s.d_head.min(d_model / n_head),
            false => s.d_head,
        };
        let sizes = Llama {
            vocab: s.vocab.min(most.vocab),
            n_ctx: s.n_ctx.min(most.positions),
            d_model,
            n_layer: s.n_layer.min(most.layers),
            n_head,
            n_kv_head,
            d_head,
            d_mlp: s.d_mlp.min(4 * d_model),
            ..*s
        };
        Some(Arc::new(Self { sizes, ..*self }))
    }

    fn layers(&self) -> Vec<Layer> {
        let s = &self.sizes;
        let (d, d_q, d_kv) = (s.d_model, s.n_head * s.d_head, s.n_kv_head * s.d_head);
        let (heads, neurons) = (Units::heads(s.n_head), Units::neurons(s.d_mlp));
        let kv_heads = Units::shared_heads(s.n_kv_head, s.n_head / s.n_kv_head);
        let into_mlp: &[&str] = if self.gated {
            &["gate_proj", "up_proj"]
        } else {
            &["c_fc"]
        };
        let mut all = vec![Layer::embedding(self.names.embedding, s.vocab, d)];
        for layer in 0..s.n_layer {
            let block = self.block(layer);
            let first = all.len();
            let attention = |name| format!("{block}.{}.{name}", self.names.attention);
            let mlp = |name| format!("{block}.mlp.{name}");
            for (name, d_out, units) in [
                ("q_proj", d_q, heads),
                ("k_proj", d_kv, kv_heads),
                ("v_proj", d_kv, kv_heads),
            ] {
                all.push(Layer::linear(attention(name), d, d_out, s.qkv_bias).feeds(units));
            }
            all.push(Layer::linear(attention("o_proj"), d_q, d, s.o_bias).reads(heads));
            for &name in into_mlp {
                all.push(Layer::linear(mlp(name), d, s.d_mlp, false).feeds(neurons));
            }
            all.push(Layer::linear(mlp("down_proj"), s.d_mlp, d, false).reads(neurons));
            let place = Block {
                number: layer,
                of: s.n_layer,
                d_model: d,
                d_heads: d_q,
                d_mlp: s.d_mlp,
            };
            for layer in &mut all[first..] {
                layer.block = Some(place);
            }
        }
        let tied_to = s.tied_head.then(|| self.names.embedding.to_owned());
        all.push(Layer::head(HEAD, d, s.vocab, tied_to));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (s, names) = (&self.sizes, self.names);
        let [normal, residual] = starts(s.n_layer);
        let layers = self.layers();
        let of_norm =
            |(name, d)| TargetTensor::trained(format!("{name}.weight"), &[d], Start::Ones);
        let of_block = |layer| {
            let block = self.block(layer);
            let mut norms = Vec::new();
            norms.extend(
                names
                    .norms
                    .map(|norm| (format!("{block}.{norm}"), s.d_model)),
            );
            if s.qk_norm {
                let of_heads = ["q_norm", "k_norm"];
                let path = |norm| format!("{block}.{}.{norm}", names.attention);
                norms.extend(of_heads.map(|norm| (path(norm), s.d_head)));
            }
            norms
        };
        let norms = (0..s.n_layer).flat_map(of_block);
        let norms = norms
            .chain([(names.last_norm.to_owned(), s.d_model)])
            .map(of_norm);
        let weights = layers[1..].iter().filter(|layer| layer.tied_to.is_none());
        let weights = weights.flat_map(|layer| {
            let writes = layer.path.ends_with("o_proj") || layer.path.ends_with("down_proj");
            layer_tensors(layer, if writes { residual } else { normal })
        });
        let embedding = layer_tensors(&layers[0], normal);
        embedding.into_iter().chain(norms).chain(weights).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let (s, names) = (&self.sizes, self.names);
        let positions = b.ty(tokens_bt).columns();
        let scaling = s.rope_scaling.map(|scaling| RotaryScaling {
            factor: scaling.factor,
            low: scaling.low,
            high: scaling.high,
            context: scaling.n_ctx as f64,
        });
        let rotary = b.rotary_table(positions, s.d_head, s.rope_base, scaling)?;
        let mut x_btd = pass.embedding(b, names.embedding, tokens_bt, None)?;
        for layer in 0..s.n_layer {
            let block = self.block(layer);
            let attention = format!("{block}.{}", names.attention);
            pass.tap(TapKind::ResidPre, layer, x_btd);
            let normed_btd = self.norm(b, pass, &format!("{block}.{}", names.norms[0]), x_btd)?;
            pass.tap(TapKind::AttnIn, layer, normed_btd);
            let mut project = |b: &mut Builder, name: &str| {
                pass.linear(b, &format!("{attention}.{name}"), normed_btd)
            };
            let [mut q, mut k, v] = [
                project(b, "q_proj")?,
                project(b, "k_proj")?,
                project(b, "v_proj")?,
            ];
            if s.qk_norm {
                q = self.head_norm(b, pass, &format!("{attention}.q_norm"), q)?;
                k = self.head_norm(b, pass, &format!("{attention}.k_norm"), k)?;
            }
            let heads = Heads::causal(s.n_head, s.n_kv_head);
            let mixed_btd = pass.attention(b, Qkv::Apart([q, k, v]), heads, Some(rotary))?;
            pass.tap(TapKind::AttnOut, layer, mixed_btd);
            let attn_btd = pass.linear(b, &format!("{attention}.o_proj"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            pass.tap(TapKind::ResidMid, layer, x_btd);
            let normed_btd = self.norm(b, pass, &format!("{block}.{}", names.norms[1]), x_btd)?;
            pass.tap(TapKind::MlpIn, layer, normed_btd);
            let hidden_btm = if self.gated {
                let gate_btm = pass.linear(b, &format!("{block}.mlp.gate_proj"), normed_btd)?;
                let up_btm = pass.linear(b, &format!("{block}.mlp.up_proj"), normed_btd)?;
                b.swiglu(gate_btm, up_btm)?
            } else {
                let up_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
                b.gelu(up_btm, GeluKind::Tanh)?
            };
            pass.tap(TapKind::MlpHidden, layer, hidden_btm);
            let mlp_btd = pass.linear(b, &format!("{block}.mlp.down_proj"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
            pass.tap(TapKind::ResidPost, layer, x_btd);
        }
        let x_btd = self.norm(b, pass, names.last_norm, x_btd)?;
        pass.linear(b, HEAD, x_btd)
    }
}
