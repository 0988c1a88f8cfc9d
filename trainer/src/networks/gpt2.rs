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
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, NUMBERED, Number, Size};

use super::decoder::{Decoder, Inputs, Names, Nonlinearity};
use super::layer_norm::NORM_EPS;
use super::{
    Export, Found, LayerKind, Listed, OfReference, OfTransformers, read_d_mlp, read_heads,
    read_sizes,
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

    /// The decoder of these sizes, with these names.
    fn decoder(&self, names: &'static Names) -> Decoder {
        Decoder {
            names,
            vocab: self.vocab,
            n_ctx: self.n_ctx,
            d_model: self.d_model,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_kv_head: self.n_head,
            d_head: None,
            d_mlp: self.d_mlp,
            biases: [true; 3],
            qk_norm: false,
            rotary: None,
            local: (Vec::new(), 0),
            parallel: false,
            activation: self.activation,
            norm_eps: self.norm_eps,
            tied_head: self.tied_head,
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
    fn decoder(&self) -> Decoder {
        Decoder {
            biases: [false, true, true],
            local: (self.local_layers.clone(), self.window),
            ..self.sizes.decoder(&NEO)
        }
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
    let d_mlp = read_d_mlp(table, d_model, [4, 1]);
    let activation = table.or("activation", Nonlinearity::WORDS, Nonlinearity::GeluTanh);
    let norm_eps = table.or("norm_eps", Number::POSITIVE, NORM_EPS);
    let tied_head = table.or("tied_head", Flag, true);
    let network = all_read! {
        Gpt2: vocab, n_ctx, d_model, n_layer, n_head, d_mlp, activation, norm_eps, tied_head
    };
    Found::of_tokens(n_ctx, network)
}

/// Blocks with a window alternate with others, from the second on, where nothing is said.
fn read_neo(table: &mut Table<'_>) -> Found<GptNeo> {
    let Found {
        reads,
        network: sizes,
    } = read(table);
    let window = table.or("window", Size::at_least(1), 256);
    let n_layer = sizes.map_or(0, |sizes| sizes.n_layer);
    let local_layers = table.or("local_layers", NUMBERED, (1..n_layer).step_by(2).collect());
    let beyond = |layers: &Vec<usize>| layers.iter().copied().find(|&layer| layer >= n_layer);
    if let (Some(_), Some(layer)) = (sizes, local_layers.as_ref().and_then(beyond)) {
        let message = format!("expected blocks below n_layer = {n_layer}, found {layer}");
        table.refuse::<()>("local_layers", message);
    }
    Found {
        reads,
        network: all_read! { GptNeo: sizes, window, local_layers },
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
    ..Listed::new(read, |sizes| Ok(Arc::new(sizes.decoder(&HUGGINGFACE))))
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
    ..Listed::new(read, |sizes| Ok(Arc::new(sizes.decoder(&SIMPLE))))
};

pub(super) const GPT_NEO: Listed<GptNeo> = Listed {
    architectures: &[("gpt_neo", neo_of_json)],
    export: Some(|neo| Ok(Export::Transformers(neo.of_transformers()))),
    ..Listed::new(read_neo, |sizes| Ok(Arc::new(sizes.decoder())))
};

/// The sizes in a file of the SPD reference that all of its language models have.
pub(super) fn reference_sizes(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["block_size"]);
    json.size("d_model", &["n_embd"]);
    json.size("n_layer", &["n_layer"]);
    json.size("n_head", &["n_head"]);
}

const HUGGINGFACE: Names = Names {
    kind: "gpt2",
    embedding: "transformer.wte",
    positions: Some("transformer.wpe"),
    blocks: "transformer.h",
    layer_norm: true,
    norms: ["ln_1", "ln_2"],
    last_norm: "transformer.ln_f",
    head_norms: [""; 2],
    inputs: Inputs::Joined("attn.c_attn"),
    attn_out: "attn.c_proj",
    into_mlp: &["mlp.c_fc"],
    mlp_out: "mlp.c_proj",
    head: "lm_head",
    layout: LayerKind::InOut,
    scale: None,
    shares_keys: false,
    norms_start_last: false,
};

const SIMPLE: Names = Names {
    kind: "gpt2_simple",
    embedding: "wte",
    positions: Some("wpe"),
    blocks: "h",
    last_norm: "ln_f",
    inputs: Inputs::Apart(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
    attn_out: "attn.o_proj",
    mlp_out: "mlp.down_proj",
    layout: LayerKind::OutIn,
    ..HUGGINGFACE
};

const NEO: Names = Names {
    kind: "gpt_neo",
    inputs: Inputs::Apart([
        "attn.attention.q_proj",
        "attn.attention.k_proj",
        "attn.attention.v_proj",
    ]),
    attn_out: "attn.attention.out_proj",
    layout: LayerKind::OutIn,
    scale: Some(1.0),
    ..HUGGINGFACE
};
