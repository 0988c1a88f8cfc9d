//! GPT-2: learned positions, LayerNorm before each sublayer, tanh GELU, biases, the head tied to the token embedding.
//!
//! Once in Hugging Face's layout, with a fused `c_attn` and `Conv1D` weights (`[d_in, d_out]`), names and layouts those of
//! `transformers.GPT2LMHeadModel`; once in the reference's (`GPT2Simple`), with separate projections and PyTorch's linear layers.
//! Radford et al., "Language models are unsupervised multitask learners", 2019.

use spd_configs::{Gpt2, Input};
use spd_engine::ops::{GeluKind, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::{Layer, LayerKind, Start, Target, TargetTensor};
use crate::pass::Pass;

const EPS: f32 = 1e-5;

/// A GPT-2 in one of its layouts.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) sizes: Gpt2,
    /// The reference's layout.
    pub(super) simple: bool,
}

impl Network {
    /// What stands before every name.
    fn top(&self) -> &'static str {
        if self.simple { "" } else { "transformer." }
    }

    /// Names of the layers that write to the residual stream.
    fn writers(&self) -> [&'static str; 2] {
        if self.simple {
            ["attn.o_proj", "mlp.down_proj"]
        } else {
            ["attn.c_proj", "mlp.c_proj"]
        }
    }
}

impl Target for Network {
    fn describe(&self) -> String {
        let name = if self.simple { "gpt2_simple" } else { "gpt2" };
        let s = &self.sizes;
        format!(
            "{name}, {} layers of width {}, {} heads, mlp {}, {} tokens, {} positions",
            s.n_layer, s.d_model, s.n_head, s.d_mlp, s.vocab, s.n_ctx
        )
    }

    fn input(&self) -> Input {
        self.sizes.input()
    }

    fn layers(&self) -> Vec<Layer> {
        let Gpt2 {
            d_model: d, d_mlp, ..
        } = self.sizes;
        let linear = |path: String, d_in, d_out| Layer {
            kind: if self.simple {
                LayerKind::OutIn
            } else {
                LayerKind::InOut
            },
            ..Layer::linear(path, d_in, d_out, true)
        };
        let [attn_out, mlp_out] = self.writers();
        let inputs: &[(&str, usize)] = if self.simple {
            &[("q_proj", d), ("k_proj", d), ("v_proj", d)]
        } else {
            &[("c_attn", 3 * d)]
        };
        let top = self.top();
        let mut all = vec![Layer::embedding(format!("{top}wte"), self.sizes.vocab, d)];
        for layer in 0..self.sizes.n_layer {
            let block = format!("{top}h.{layer}");
            let inputs = inputs.iter();
            all.extend(
                inputs.map(|(name, d_out)| linear(format!("{block}.attn.{name}"), d, *d_out)),
            );
            all.push(linear(format!("{block}.{attn_out}"), d, d));
            all.push(linear(format!("{block}.mlp.c_fc"), d, d_mlp));
            all.push(linear(format!("{block}.{mlp_out}"), d_mlp, d));
        }
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (s, top) = (&self.sizes, self.top());
        let d = s.d_model;
        // 0.02 everywhere, and less where a block writes to the residual stream, so that its variance does not
        // grow with depth.
        let normal = Start::Normal(0.02);
        let residual = Start::Normal(0.02 / (2.0 * s.n_layer as f64).sqrt());
        let mut all = vec![
            TargetTensor::trained(format!("{top}wte.weight"), &[s.vocab, d], normal),
            TargetTensor::trained(format!("{top}wpe.weight"), &[s.n_ctx, d], normal),
        ];
        let norms =
            (0..s.n_layer).flat_map(|layer| [1, 2].map(|n| format!("{top}h.{layer}.ln_{n}")));
        for norm in norms.chain([format!("{top}ln_f")]) {
            all.push(TargetTensor::trained(
                format!("{norm}.weight"),
                &[d],
                Start::Ones,
            ));
            all.push(TargetTensor::trained(
                format!("{norm}.bias"),
                &[d],
                Start::Zeros,
            ));
        }
        for layer in self.layers().iter().filter(|layer| layer.bias) {
            let writes = self.writers().iter().any(|name| layer.path.ends_with(name));
            let start = if writes { residual } else { normal };
            let [weight, bias] = ["weight", "bias"].map(|name| format!("{}.{name}", layer.path));
            all.push(TargetTensor::trained(weight, &layer.weight_dims(), start));
            all.push(TargetTensor::trained(bias, &[layer.d_out], Start::Zeros));
        }
        all
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let (top, n_head) = (self.top(), self.sizes.n_head);
        let [attn_out, mlp_out] = self.writers();
        let norm = |b: &mut Builder, pass: &Pass<'_>, name: String, x_btd: Value| {
            let [weight, bias] =
                ["weight", "bias"].map(|part| pass.weight(&format!("{name}.{part}")));
            b.layer_norm(x_btd, weight, bias, EPS)
        };
        let wpe_td = pass.weight(&format!("{top}wpe.weight"));
        let mut x_btd = pass.embedding(b, &format!("{top}wte"), tokens_bt, Some(wpe_td))?;
        for layer in 0..self.sizes.n_layer {
            let block = format!("{top}h.{layer}");
            let normed_btd = norm(b, pass, format!("{block}.ln_1"), x_btd)?;
            let mut project = |b: &mut Builder, name: &str| {
                pass.linear(b, &format!("{block}.attn.{name}"), normed_btd)
            };
            let qkv = if self.simple {
                Qkv::Apart([
                    project(b, "q_proj")?,
                    project(b, "k_proj")?,
                    project(b, "v_proj")?,
                ])
            } else {
                Qkv::Joined(project(b, "c_attn")?)
            };
            let mixed_btd = b.attention(qkv, Heads::causal(n_head, n_head), None)?;
            let attn_btd = pass.linear(b, &format!("{block}.{attn_out}"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            let normed_btd = norm(b, pass, format!("{block}.ln_2"), x_btd)?;
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
            let hidden_btm = b.gelu(hidden_btm, GeluKind::Tanh)?;
            let mlp_btd = pass.linear(b, &format!("{block}.{mlp_out}"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
        }
        let x_btd = norm(b, pass, format!("{top}ln_f"), x_btd)?;
        b.linear_oi(x_btd, pass.weight(&format!("{top}wte.weight")), None)
    }
}
