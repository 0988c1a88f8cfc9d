//! GPT-2 in Hugging Face's layout: learned positions, LayerNorm before each sublayer, fused `c_attn`, `Conv1D` weights
//! (`[d_in, d_out]`), tanh GELU, the head tied to the token embedding.
//!
//! Radford et al., "Language models are unsupervised multitask learners", 2019; names and layouts are those of
//! `transformers.GPT2LMHeadModel`.

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
        } => Sizes {
            vocab,
            n_ctx,
            d: d_model,
            n_layer,
            n_head,
            d_mlp,
        },
        _ => unreachable!("called for a GPT-2"),
    }
}

pub(super) fn linears(model: &Model) -> Vec<Linear> {
    let s = sizes(model);
    let conv1d = |path: String, d_in, d_out| Linear {
        path,
        d_in,
        d_out,
        orientation: Orientation::InOut,
        bias: true,
    };
    (0..s.n_layer)
        .flat_map(|layer| {
            let block = format!("transformer.h.{layer}");
            [
                conv1d(format!("{block}.attn.c_attn"), s.d, 3 * s.d),
                conv1d(format!("{block}.attn.c_proj"), s.d, s.d),
                conv1d(format!("{block}.mlp.c_fc"), s.d, s.d_mlp),
                conv1d(format!("{block}.mlp.c_proj"), s.d_mlp, s.d),
            ]
        })
        .collect()
}

pub(super) fn tensors(model: &Model) -> Vec<TargetTensor> {
    let s = sizes(model);
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
            "transformer.wte.weight".into(),
            &[s.vocab, s.d],
            Start::Normal(std),
        ),
        tensor(
            "transformer.wpe.weight".into(),
            &[s.n_ctx, s.d],
            Start::Normal(std),
        ),
    ];
    let mut norms: Vec<String> = (0..s.n_layer)
        .flat_map(|layer| [1, 2].map(|n| format!("transformer.h.{layer}.ln_{n}")))
        .collect();
    norms.push("transformer.ln_f".into());
    for norm in norms {
        all.push(tensor(format!("{norm}.weight"), &[s.d], Start::Ones));
        all.push(tensor(format!("{norm}.bias"), &[s.d], Start::Zeros));
    }
    for linear in linears(model) {
        let start = if linear.path.ends_with("c_proj") {
            residual
        } else {
            std
        };
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
    let wte_vd = weights["transformer.wte.weight"];
    let norm = |b: &mut Builder, name: String, x_btd: Value| {
        let weight = weights[&format!("{name}.weight")];
        let bias = weights[&format!("{name}.bias")];
        b.layer_norm(x_btd, weight, bias, EPS)
    };
    let wpe_td = weights["transformer.wpe.weight"];
    let mut x_btd = b.embed(tokens_bt, wte_vd, Some(wpe_td))?;
    for layer in 0..s.n_layer {
        let block = format!("transformer.h.{layer}");
        let normed_btd = norm(b, format!("{block}.ln_1"), x_btd)?;
        let qkv_btd = pass.linear(b, &format!("{block}.attn.c_attn"), normed_btd)?;
        let mixed_btd = b.fused_attention(qkv_btd, s.n_head, true)?;
        let attn_btd = pass.linear(b, &format!("{block}.attn.c_proj"), mixed_btd)?;
        x_btd = b.add(x_btd, attn_btd)?;
        let normed_btd = norm(b, format!("{block}.ln_2"), x_btd)?;
        let hidden_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
        let hidden_btm = b.gelu(hidden_btm, GeluKind::Tanh)?;
        let mlp_btd = pass.linear(b, &format!("{block}.mlp.c_proj"), hidden_btm)?;
        x_btd = b.add(x_btd, mlp_btd)?;
    }
    let x_btd = norm(b, "transformer.ln_f".into(), x_btd)?;
    b.linear_oi(x_btd, wte_vd, None)
}
