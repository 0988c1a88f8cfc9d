//! GPT-2: learned positions, LayerNorm before each sublayer, tanh GELU, biases, the head tied to the token embedding.
//!
//! Once in Hugging Face's layout, with a fused `c_attn` and `Conv1D` weights (`[d_in, d_out]`), names and layouts those of
//! `transformers.GPT2LMHeadModel`; once in the reference's (`GPT2Simple`), with separate projections and PyTorch's linear layers.
//! Radford et al., "Language models are unsupervised multitask learners", 2019.

use std::collections::BTreeMap;

use spd_configs::Model;
use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::{Linear, Orientation, Start, TargetTensor};
use crate::pass::Pass;

const EPS: f32 = 1e-5;

struct Sizes {
    vocab: usize,
    n_ctx: usize,
    d: usize,
    n_layer: usize,
    n_head: usize,
    d_mlp: usize,
    /// The reference's layout.
    simple: bool,
}

impl Sizes {
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

fn sizes(model: &Model) -> Sizes {
    match *model {
        Model::Gpt2 {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            d_mlp,
        }
        | Model::Gpt2Simple {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            d_mlp,
        } => Sizes {
            vocab,
            n_ctx,
            d: d_model,
            n_layer,
            n_head,
            d_mlp,
            simple: matches!(model, Model::Gpt2Simple { .. }),
        },
        _ => unreachable!("called for a GPT-2"),
    }
}

pub(super) fn linears(model: &Model) -> Vec<Linear> {
    let s = sizes(model);
    let linear = |path: String, d_in, d_out| Linear {
        path,
        d_in,
        d_out,
        orientation: if s.simple {
            Orientation::OutIn
        } else {
            Orientation::InOut
        },
        bias: true,
    };
    let [attn_out, mlp_out] = s.writers();
    let inputs: &[(&str, usize)] = if s.simple {
        &[("q_proj", s.d), ("k_proj", s.d), ("v_proj", s.d)]
    } else {
        &[("c_attn", 3 * s.d)]
    };
    (0..s.n_layer)
        .flat_map(|layer| {
            let block = format!("{}h.{layer}", s.top());
            let mut all: Vec<Linear> = inputs
                .iter()
                .map(|&(name, d_out)| linear(format!("{block}.attn.{name}"), s.d, d_out))
                .collect();
            all.push(linear(format!("{block}.{attn_out}"), s.d, s.d));
            all.push(linear(format!("{block}.mlp.c_fc"), s.d, s.d_mlp));
            all.push(linear(format!("{block}.{mlp_out}"), s.d_mlp, s.d));
            all
        })
        .collect()
}

pub(super) fn tensors(model: &Model) -> Vec<TargetTensor> {
    let s = sizes(model);
    let top = s.top();
    let tensor = |name: String, dims: &[usize], start| TargetTensor {
        name,
        dims: dims.to_vec(),
        start,
        trained: true,
        transpose_of: None,
    };
    // 0.02 everywhere, and less where a block writes to the residual stream, so that its variance does not
    // grow with depth.
    let (std, residual) = (0.02, 0.02 / (2.0 * s.n_layer as f64).sqrt());
    let mut all = vec![
        tensor(
            format!("{top}wte.weight"),
            &[s.vocab, s.d],
            Start::Normal(std),
        ),
        tensor(
            format!("{top}wpe.weight"),
            &[s.n_ctx, s.d],
            Start::Normal(std),
        ),
    ];
    let mut norms: Vec<String> = (0..s.n_layer)
        .flat_map(|layer| [1, 2].map(|n| format!("{top}h.{layer}.ln_{n}")))
        .collect();
    norms.push(format!("{top}ln_f"));
    for norm in norms {
        all.push(tensor(format!("{norm}.weight"), &[s.d], Start::Ones));
        all.push(tensor(format!("{norm}.bias"), &[s.d], Start::Zeros));
    }
    for linear in linears(model) {
        let writes = s.writers().iter().any(|name| linear.path.ends_with(name));
        let start = if writes { residual } else { std };
        all.push(tensor(
            format!("{}.weight", linear.path),
            &linear.weight_dims(),
            Start::Normal(start),
        ));
        all.push(tensor(
            format!("{}.bias", linear.path),
            &[linear.d_out],
            Start::Zeros,
        ));
    }
    all
}

pub(super) fn forward(
    model: &Model,
    b: &mut Builder,
    weights: &BTreeMap<String, Value>,
    pass: &mut Pass<'_>,
    tokens_bt: Value,
) -> Result<Value> {
    let s = sizes(model);
    let top = s.top();
    let [attn_out, mlp_out] = s.writers();
    let norm = |b: &mut Builder, name: String, x_btd: Value| {
        let weight = weights[&format!("{name}.weight")];
        let bias = weights[&format!("{name}.bias")];
        b.layer_norm(x_btd, weight, bias, EPS)
    };
    let wte_vd = weights[&format!("{top}wte.weight")];
    let wpe_td = weights[&format!("{top}wpe.weight")];
    let mut x_btd = b.embed(tokens_bt, wte_vd, Some(wpe_td))?;
    for layer in 0..s.n_layer {
        let block = format!("{top}h.{layer}");
        let normed_btd = norm(b, format!("{block}.ln_1"), x_btd)?;
        let mut project = |b: &mut Builder, name: &str| {
            pass.linear(b, &format!("{block}.attn.{name}"), normed_btd)
        };
        let mixed_btd = if s.simple {
            let qkv = [
                project(b, "q_proj")?,
                project(b, "k_proj")?,
                project(b, "v_proj")?,
            ];
            b.attention(qkv, (s.n_head, s.n_head), true, None)?
        } else {
            let qkv_btd = project(b, "c_attn")?;
            b.fused_attention(qkv_btd, s.n_head, true)?
        };
        let attn_btd = pass.linear(b, &format!("{block}.{attn_out}"), mixed_btd)?;
        x_btd = b.add(x_btd, attn_btd)?;
        let normed_btd = norm(b, format!("{block}.ln_2"), x_btd)?;
        let hidden_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
        let hidden_btm = b.gelu(hidden_btm, GeluKind::Tanh)?;
        let mlp_btd = pass.linear(b, &format!("{block}.{mlp_out}"), hidden_btm)?;
        x_btd = b.add(x_btd, mlp_btd)?;
    }
    let x_btd = norm(b, format!("{top}ln_f"), x_btd)?;
    b.linear_oi(x_btd, wte_vd, None)
}

pub(super) fn describe(model: &Model) -> String {
    let s = sizes(model);
    let name = if s.simple { "gpt2_simple" } else { "gpt2" };
    format!(
        "{name}, {} layers of width {}, {} heads, mlp {}, {} tokens, {} positions",
        s.n_layer, s.d, s.n_head, s.d_mlp, s.vocab, s.n_ctx
    )
}
