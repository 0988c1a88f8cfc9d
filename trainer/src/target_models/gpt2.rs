//! GPT-2: learned positions, LayerNorm before each sublayer, a GELU, biases, the head tied to the token embedding.
//!
//! Once in Hugging Face's layout, with a fused `c_attn` and `Conv1D` weights (`[d_in, d_out]`), names and layouts those of
//! `transformers.GPT2LMHeadModel`; once in the reference's (`GPT2Simple`), with separate projections and PyTorch's linear layers; and
//! once as `transformers.GPTNeoForCausalLM`, which is like the latter but for biases of `q`, `k` and `v`, scores that are multiplied by
//! 1, and a window in some blocks.
//! Radford et al., "Language models are unsupervised multitask learners", 2019; Black et al., "GPT-Neo", 2021.

use spd_engine::ops::{GeluKind, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::{Layer, LayerKind, Start, Target, TargetTensor};
use crate::pass::Pass;
use crate::run_file::{Gpt2, GptNeo, Input, Nonlinearity};

/// A GPT-2 in one of its layouts.
#[derive(Debug)]
pub(super) struct Network {
    sizes: Gpt2,
    layout: &'static Layout,
    /// Blocks with a window, and the window.
    local: (Vec<usize>, usize),
}

/// Names, and what else differs.
#[derive(Debug)]
struct Layout {
    name: &'static str,
    /// What stands before every name.
    top: &'static str,
    /// The matrices that attention reads from: one for all of `q`, `k` and `v`, or one each.
    inputs: &'static [&'static str],
    /// Whether they have biases.
    input_bias: bool,
    /// The layers that write to the residual stream.
    writers: [&'static str; 2],
    kind: LayerKind,
    /// What scores are multiplied by, if not the usual.
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
    pub(super) fn huggingface(sizes: Gpt2) -> Self {
        Self::of(sizes, &HUGGINGFACE)
    }

    pub(super) fn simple(sizes: Gpt2) -> Self {
        Self::of(sizes, &SIMPLE)
    }

    pub(super) fn neo(sizes: &GptNeo) -> Self {
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

/// Standard deviation of matrices when a language model starts: 0.02 everywhere, and less where a block writes to the residual stream,
/// so that its variance does not grow with depth.
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

/// An epsilon as networks compute with it.
pub(super) fn rounded(eps: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let eps = eps as f32;
    eps
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

    fn layers(&self) -> Vec<Layer> {
        let Gpt2 {
            d_model: d, d_mlp, ..
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
        let d_out = 3 * d / inputs.len();
        let wte = format!("{top}wte");
        let mut all = vec![Layer::embedding(&wte, self.sizes.vocab, d)];
        for layer in 0..self.sizes.n_layer {
            let block = format!("{top}h.{layer}");
            for name in *inputs {
                let path = format!("{block}.{name}");
                all.push(linear(path, d, d_out, self.layout.input_bias));
            }
            all.push(linear(format!("{block}.{attn_out}"), d, d, true));
            all.push(linear(format!("{block}.mlp.c_fc"), d, d_mlp, true));
            all.push(linear(format!("{block}.{mlp_out}"), d_mlp, d, true));
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
            let normed_btd = layer_norm(b, pass, &format!("{block}.ln_1"), x_btd, eps)?;
            let mut project = |b: &mut Builder, name: &str| {
                pass.linear(b, &format!("{block}.{name}"), normed_btd)
            };
            let qkv = match inputs {
                [q, k, v] => Qkv::Apart([project(b, q)?, project(b, k)?, project(b, v)?]),
                _ => Qkv::Joined(project(b, inputs[0])?),
            };
            let mixed_btd = b.attention(qkv, self.heads(layer), None)?;
            let attn_btd = pass.linear(b, &format!("{block}.{attn_out}"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            let normed_btd = layer_norm(b, pass, &format!("{block}.ln_2"), x_btd, eps)?;
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
            let hidden_btm = nonlinear(b, self.sizes.activation, hidden_btm)?;
            let mlp_btd = pass.linear(b, &format!("{block}.{mlp_out}"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
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
