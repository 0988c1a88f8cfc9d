//! GPT-2: learned positions, LayerNorm before each sublayer, a GELU, biases, the head tied to the
//! token embedding.
//!
//! Once in Hugging Face's layout, with a fused `c_attn` and `Conv1D` weights (`[d_in, d_out]`),
//! names and layouts those of `transformers.GPT2LMHeadModel`; once in the reference's
//! (`GPT2Simple`), with separate projections and PyTorch's linear layers; and once as
//! `transformers.GPTNeoForCausalLM`, which is like the latter but for biases of `q`, `k` and `v`,
//! scores that are multiplied by 1, and a window in some blocks. Radford et al., "Language models
//! are unsupervised multitask learners", 2019; Black et al., "GPT-Neo", 2021.
//!
//! # Keys of `[target]`
//!
//! - gpt_neo: `window`, `local_layers` | 256, every second | | how many keys a query sees in some
//!   blocks, and which, from 0

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size, Sizes};
use spd_configs::words;
use spd_engine::ops::{GeluKind, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::{
    Block, Export, Found, Input, Layer, LayerKind, Listed, Most, OfReference, OfTransformers,
    Start, TapKind, Target, TargetTensor, Units, read_heads, read_sizes,
};
use crate::pass::Pass;
use crate::rounded::rounded;
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

words! {
    /// Nonlinearity of the MLP of a language model without gates.
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
}

/// Default epsilon of norms.
pub(super) const NORM_EPS: f64 = 1e-5;

/// Sizes of a GPT-Neo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GptNeo {
    /// Sizes shared with GPT-2.
    #[serde(flatten)]
    pub sizes: Gpt2,
    /// Keys that a query of a local block sees, its own the last.
    pub window: usize,
    /// Blocks with a window, from 0.
    pub local_layers: Vec<usize>,
}

impl Gpt2 {
    /// Its sizes in a file of the SPD reference.
    fn of_reference(&self) -> Json {
        json!({
            "model_type": "GPT2Simple",
            "block_size": self.n_ctx,
            "vocab_size": self.vocab,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.d_model,
        })
    }

    /// Its input.
    pub fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    /// Whether all that run files of the reference do not say is as theirs is.
    fn is_usual(&self) -> bool {
        self.activation == Nonlinearity::GeluTanh
            && self.norm_eps.to_bits() == NORM_EPS.to_bits()
            && self.tied_head
    }

    /// The `config.json` that [`of_json`] reads.
    fn of_transformers(&self) -> OfTransformers {
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
    /// Its input.
    pub fn input(&self) -> Input {
        self.sizes.input()
    }

    /// The `config.json` that [`neo_of_json`] reads.
    fn of_transformers(&self) -> OfTransformers {
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

fn read(table: &mut Table<'_>) -> Found<Gpt2> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 1);
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
    Found::of_tokens(n_ctx, network())
}

/// Blocks with a window alternate with others, from the second on, where nothing is said.
fn read_neo(table: &mut Table<'_>) -> Found<GptNeo> {
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
fn of_json(json: &mut ConfigJson) {
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
fn neo_of_json(json: &mut ConfigJson) {
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

pub(super) const GPT2: Listed<Gpt2> = Listed {
    architectures: &[("gpt2", of_json)],
    export: Some(|gpt2| Ok(Export::Transformers(gpt2.of_transformers()))),
    ..Listed::new(read, |sizes| {
        Ok(Arc::new(Network::of(*sizes, &HUGGINGFACE)))
    })
};

pub(super) const GPT2_SIMPLE: Listed<Gpt2> = Listed {
    reference: Some(OfReference {
        class: "spd.pretrain.models.gpt2_simple.GPT2Simple",
        file: "GPT2Simple",
        read: reference_sizes,
    }),
    export: Some(|gpt2| {
        if gpt2.d_mlp == 4 * gpt2.d_model && gpt2.is_usual() {
            return Ok(Export::Simple(gpt2.of_reference()));
        }
        Err(
            "its GPT2Simple has an MLP of width 4 d_model, a tanh GELU and norms of eps 1e-5"
                .into(),
        )
    }),
    ..Listed::new(read, |sizes| Ok(Arc::new(Network::of(*sizes, &SIMPLE))))
};

pub(super) const GPT_NEO: Listed<GptNeo> = Listed {
    architectures: &[("gpt_neo", neo_of_json)],
    export: Some(|neo| Ok(Export::Transformers(neo.of_transformers()))),
    ..Listed::new(read_neo, |sizes| Ok(Arc::new(Network::neo(sizes))))
};

/// The sizes in a file of the SPD reference that all of its language models have.
pub(super) fn reference_sizes(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["block_size"]);
    json.size("d_model", &["n_embd"]);
    json.size("n_layer", &["n_layer"]);
    json.size("n_head", &["n_head"]);
}

/// A GPT-2 in one of its layouts.
#[derive(Debug)]
struct Network {
    sizes: Gpt2,
    layout: &'static Layout,
    /// Blocks with a window, and the window.
    local: (Vec<usize>, usize),
}

/// Names, and what else differs.
#[derive(Debug)]
struct Layout {
    name: &'static str,
    /// Prefix of every name.
    top: &'static str,
    /// The matrices that attention reads from: one for all of `q`, `k` and `v`, or one each.
    inputs: &'static [&'static str],
    /// Whether they have biases.
    input_bias: bool,
    /// The layers that write to the residual stream.
    writers: [&'static str; 2],
    kind: LayerKind,
    /// Factor of attention scores, if not `1 / sqrt(d_head)`.
    scale: Option<f32>,
}

const HUGGINGFACE: Layout = Layout {
    name: "gpt2",
    top: "transformer.",
    inputs: &["attn.c_attn"],
    input_bias: true,
    writers: ["attn.c_proj", "mlp.c_proj"],
    kind: LayerKind::InOut,
    scale: None,
};

const SIMPLE: Layout = Layout {
    name: "gpt2_simple",
    top: "",
    inputs: &["attn.q_proj", "attn.k_proj", "attn.v_proj"],
    input_bias: true,
    writers: ["attn.o_proj", "mlp.down_proj"],
    kind: LayerKind::OutIn,
    scale: None,
};

const NEO: Layout = Layout {
    name: "gpt_neo",
    top: "transformer.",
    inputs: &[
        "attn.attention.q_proj",
        "attn.attention.k_proj",
        "attn.attention.v_proj",
    ],
    input_bias: false,
    writers: ["attn.attention.out_proj", "mlp.c_proj"],
    kind: LayerKind::OutIn,
    scale: Some(1.0),
};

impl Network {
    fn neo(sizes: &GptNeo) -> Self {
        Self {
            local: (sizes.local_layers.clone(), sizes.window),
            ..Self::of(sizes.sizes, &NEO)
        }
    }

    fn of(sizes: Gpt2, layout: &'static Layout) -> Self {
        Self {
            sizes,
            layout,
            local: (Vec::new(), 0),
        }
    }

    /// The heads of a block.
    fn heads(&self, layer: usize) -> Heads {
        let (local, window) = &self.local;
        Heads {
            window: local.contains(&layer).then_some(*window),
            scale: self.layout.scale,
            ..Heads::causal(self.sizes.n_head, self.sizes.n_head)
        }
    }
}

/// The nonlinearity of an MLP.
pub(super) fn nonlinear(b: &mut Builder, kind: Nonlinearity, x: Value) -> Result<Value> {
    match kind {
        Nonlinearity::GeluTanh => b.gelu(x, GeluKind::Tanh),
        Nonlinearity::Gelu => b.gelu(x, GeluKind::Exact),
        Nonlinearity::Relu => b.relu(x),
    }
}

/// Standard deviation of matrices when a language model starts: 0.02 everywhere, and less where a
/// block writes to the residual stream, so that its variance does not grow with depth.
pub(super) fn starts(n_layer: usize) -> [Start; 2] {
    [0.02, 0.02 / (2.0 * n_layer as f64).sqrt()].map(Start::Normal)
}

/// Weight and bias of a LayerNorm.
pub(super) fn layer_norm_tensors(name: &str, d: usize) -> [TargetTensor; 2] {
    [("weight", Start::Ones), ("bias", Start::Zeros)]
        .map(|(part, start)| TargetTensor::trained(format!("{name}.{part}"), &[d], start))
}

/// The LayerNorm at a path.
pub(super) fn layer_norm(
    b: &mut Builder,
    pass: &Pass<'_>,
    name: &str,
    x_btd: Value,
    eps: f64,
) -> Result<Value> {
    let [weight, bias] = ["weight", "bias"].map(|part| pass.weight(&format!("{name}.{part}")));
    b.layer_norm(x_btd, weight, bias, rounded(eps))
}

impl Target for Network {
    fn describe(&self) -> String {
        let s = &self.sizes;
        format!(
            "{}, {} layers of width {}, {} heads, mlp {}, {} tokens, {} positions",
            self.layout.name, s.n_layer, s.d_model, s.n_head, s.d_mlp, s.vocab, s.n_ctx
        )
    }

    fn input(&self) -> Input {
        self.sizes.input()
    }

    fn cut_to(&self, most: Most) -> Option<super::Network> {
        let s = &self.sizes;
        let [n_head, _] = most.heads(s.d_model, s.n_head, s.n_head);
        let d_model = s.d_model.min(most.width);
        let sizes = Gpt2 {
            vocab: s.vocab.min(most.vocab),
            n_ctx: s.n_ctx.min(most.positions),
            d_model,
            n_layer: s.n_layer.min(most.layers),
            n_head,
            d_mlp: s.d_mlp.min(4 * d_model),
            ..*s
        };
        let (layers, window) = &self.local;
        // Alternating windows go on to alternate.
        let local = layers.iter().map(|layer| layer % most.layers);
        let local = local.filter(|layer| *layer < sizes.n_layer).collect();
        Some(Arc::new(Self {
            sizes,
            layout: self.layout,
            local: (local, (*window).min(sizes.n_ctx / 2).max(1)),
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let Gpt2 {
            d_model: d,
            d_mlp,
            n_head,
            ..
        } = self.sizes;
        let Layout {
            top,
            inputs,
            writers: [attn_out, mlp_out],
            ..
        } = self.layout;
        let linear = |path: String, d_in, d_out, bias| Layer {
            kind: self.layout.kind,
            ..Layer::linear(path, d_in, d_out, bias)
        };
        // Of `q`, `k` and `v`, where they are in one matrix.
        let [d_out, input_heads] = [d, n_head].map(|each| 3 * each / inputs.len());
        let (neurons, heads) = (Units::neurons(d_mlp), Units::heads(n_head));
        let wte = format!("{top}wte");
        let mut all = vec![Layer::embedding(&wte, self.sizes.vocab, d)];
        for layer in 0..self.sizes.n_layer {
            let path = |name: &str| format!("{top}h.{layer}.{name}");
            let input = |name: &&str| {
                let input = linear(path(name), d, d_out, self.layout.input_bias);
                input.feeds(Units::heads(input_heads))
            };
            let others = [
                linear(path(attn_out), d, d, true).reads(heads),
                linear(path("mlp.c_fc"), d, d_mlp, true).feeds(neurons),
                linear(path(mlp_out), d_mlp, d, true).reads(neurons),
            ];
            let block = Block {
                number: layer,
                of: self.sizes.n_layer,
                d_model: d,
                d_heads: d,
                d_mlp,
            };
            let layers = inputs.iter().map(input).chain(others);
            all.extend(layers.map(|layer| layer.inside(block)));
        }
        let tied_to = self.sizes.tied_head.then_some(wte);
        all.push(Layer::head(HEAD, d, self.sizes.vocab, tied_to));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (s, top) = (&self.sizes, self.layout.top);
        let d = s.d_model;
        let [normal, residual] = starts(s.n_layer);
        let mut all = vec![
            TargetTensor::trained(format!("{top}wte.weight"), &[s.vocab, d], normal),
            TargetTensor::trained(format!("{top}wpe.weight"), &[s.n_ctx, d], normal),
        ];
        let norms =
            (0..s.n_layer).flat_map(|layer| [1, 2].map(|n| format!("{top}h.{layer}.ln_{n}")));
        for norm in norms.chain([format!("{top}ln_f")]) {
            all.extend(layer_norm_tensors(&norm, d));
        }
        let layers = self.layers();
        for layer in layers[1..].iter().filter(|layer| layer.tied_to.is_none()) {
            let writers = &self.layout.writers;
            let writes = writers.iter().any(|name| layer.path.ends_with(name));
            let start = if writes { residual } else { normal };
            all.extend(layer_tensors(layer, start));
        }
        all
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let Layout {
            top,
            inputs,
            writers: [attn_out, mlp_out],
            ..
        } = self.layout;
        let eps = self.sizes.norm_eps;
        let wpe_td = pass.weight(&format!("{top}wpe.weight"));
        let mut x_btd = pass.embedding(b, &format!("{top}wte"), tokens_bt, Some(wpe_td))?;
        for layer in 0..self.sizes.n_layer {
            let block = format!("{top}h.{layer}");
            pass.tap(TapKind::ResidPre, layer, x_btd);
            let normed_btd = layer_norm(b, pass, &format!("{block}.ln_1"), x_btd, eps)?;
            pass.tap(TapKind::AttnIn, layer, normed_btd);
            let mut project = |b: &mut Builder, name: &str| {
                pass.linear(b, &format!("{block}.{name}"), normed_btd)
            };
            let qkv = match inputs {
                [q, k, v] => Qkv::Apart([project(b, q)?, project(b, k)?, project(b, v)?]),
                _ => Qkv::Joined(project(b, inputs[0])?),
            };
            let mixed_btd = pass.attention(b, qkv, self.heads(layer), None)?;
            pass.tap(TapKind::AttnOut, layer, mixed_btd);
            let attn_btd = pass.linear(b, &format!("{block}.{attn_out}"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            pass.tap(TapKind::ResidMid, layer, x_btd);
            let normed_btd = layer_norm(b, pass, &format!("{block}.ln_2"), x_btd, eps)?;
            pass.tap(TapKind::MlpIn, layer, normed_btd);
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
            let hidden_btm = nonlinear(b, self.sizes.activation, hidden_btm)?;
            pass.tap(TapKind::MlpHidden, layer, hidden_btm);
            let mlp_btd = pass.linear(b, &format!("{block}.{mlp_out}"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
            pass.tap(TapKind::ResidPost, layer, x_btd);
        }
        let x_btd = layer_norm(b, pass, &format!("{top}ln_f"), x_btd, eps)?;
        pass.linear(b, HEAD, x_btd)
    }
}

/// Path of the head.
const HEAD: &str = "lm_head";

/// Weight and bias of a layer, the weight starting so and the bias at zero.
pub(super) fn layer_tensors(layer: &Layer, start: Start) -> Vec<TargetTensor> {
    let [weight, bias] = ["weight", "bias"].map(|name| format!("{}.{name}", layer.path));
    let weight = TargetTensor::trained(weight, &layer.weight_dims(), start);
    let bias = || TargetTensor::trained(bias, &[layer.d_out], Start::Zeros);
    [weight].into_iter().chain(layer.bias.then(bias)).collect()
}
