//! The reference's small Llamas: RMSNorm before each sublayer, rotary positions, causal attention whose query heads share key
//! heads, no bias, the head tied to the token embedding. `LlamaSimple` has a SwiGLU MLP, `LlamaSimpleMLP` a plain one.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023; names and layouts are the reference's.

use std::collections::BTreeMap;

use spd_configs::{Llama, Model};
use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::{Linear, Orientation, Start, TargetTensor};
use crate::pass::Pass;

const EPS: f32 = 1e-6;
const ROTARY_BASE: f32 = 10_000.0;

/// Sizes, and whether the MLP has a gate.
fn sizes(model: &Model) -> (Llama, bool) {
    match *model {
        Model::LlamaSimple(sizes) => (sizes, true),
        Model::LlamaSimpleMlp(sizes) => (sizes, false),
        _ => unreachable!("called for a Llama"),
    }
}

pub(super) fn linears(model: &Model) -> Vec<Linear> {
    let (s, gated) = sizes(model);
    let d_kv = s.d_model / s.n_head * s.n_kv_head;
    let attention = [
        ("attn.q_proj", s.d_model, s.d_model),
        ("attn.k_proj", s.d_model, d_kv),
        ("attn.v_proj", s.d_model, d_kv),
        ("attn.o_proj", s.d_model, s.d_model),
    ];
    let up: &[&str] = if gated {
        &["mlp.gate_proj", "mlp.up_proj"]
    } else {
        &["mlp.c_fc"]
    };
    let up = up.iter().map(|name| (*name, s.d_model, s.d_mlp));
    let down = ("mlp.down_proj", s.d_mlp, s.d_model);
    let block: Vec<_> = attention.into_iter().chain(up).chain([down]).collect();
    let linear = |layer: usize, (name, d_in, d_out): (&str, usize, usize)| Linear {
        path: format!("h.{layer}.{name}"),
        d_in,
        d_out,
        orientation: Orientation::OutIn,
        bias: false,
    };
    (0..s.n_layer)
        .flat_map(|layer| block.iter().map(move |&shape| linear(layer, shape)))
        .collect()
}

pub(super) fn tensors(model: &Model) -> Vec<TargetTensor> {
    let (s, _) = sizes(model);
    let tensor = |name: String, dims: &[usize], start| TargetTensor {
        name,
        dims: dims.to_vec(),
        start,
        trained: true,
        transpose_of: None,
    };
    // As for GPT-2: less where a block writes to the residual stream.
    let (std, residual) = (0.02, 0.02 / (2.0 * s.n_layer as f64).sqrt());
    let mut all = vec![tensor(
        "wte.weight".into(),
        &[s.vocab, s.d_model],
        Start::Normal(std),
    )];
    let norms = (0..s.n_layer).flat_map(|layer| [1, 2].map(|n| format!("h.{layer}.rms_{n}")));
    for norm in norms.chain(["ln_f".to_owned()]) {
        all.push(tensor(format!("{norm}.weight"), &[s.d_model], Start::Ones));
    }
    for linear in linears(model) {
        let writes = linear.path.ends_with("o_proj") || linear.path.ends_with("down_proj");
        let start = Start::Normal(if writes { residual } else { std });
        all.push(tensor(
            format!("{}.weight", linear.path),
            &linear.weight_dims(),
            start,
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
    let (s, gated) = sizes(model);
    let norm = |b: &mut Builder, name: &str, x_btd: Value| {
        b.rms_norm(x_btd, weights[&format!("{name}.weight")], EPS)
    };
    let positions = b.ty(tokens_bt).columns();
    let rotary = b.rotary_table(positions, s.d_model / s.n_head, ROTARY_BASE)?;
    let wte_vd = weights["wte.weight"];
    let mut x_btd = b.embed(tokens_bt, wte_vd, None)?;
    for layer in 0..s.n_layer {
        let block = format!("h.{layer}");
        let normed_btd = norm(b, &format!("{block}.rms_1"), x_btd)?;
        let mut project = |b: &mut Builder, name: &str| {
            pass.linear(b, &format!("{block}.attn.{name}"), normed_btd)
        };
        let qkv = [
            project(b, "q_proj")?,
            project(b, "k_proj")?,
            project(b, "v_proj")?,
        ];
        let mixed_btd = b.attention(qkv, (s.n_head, s.n_kv_head), true, Some(rotary))?;
        let attn_btd = pass.linear(b, &format!("{block}.attn.o_proj"), mixed_btd)?;
        x_btd = b.add(x_btd, attn_btd)?;
        let normed_btd = norm(b, &format!("{block}.rms_2"), x_btd)?;
        let hidden_btm = if gated {
            let gate_btm = pass.linear(b, &format!("{block}.mlp.gate_proj"), normed_btd)?;
            let up_btm = pass.linear(b, &format!("{block}.mlp.up_proj"), normed_btd)?;
            b.swiglu(gate_btm, up_btm)?
        } else {
            let up_btm = pass.linear(b, &format!("{block}.mlp.c_fc"), normed_btd)?;
            b.gelu(up_btm, GeluKind::Tanh)?
        };
        let mlp_btd = pass.linear(b, &format!("{block}.mlp.down_proj"), hidden_btm)?;
        x_btd = b.add(x_btd, mlp_btd)?;
    }
    let x_btd = norm(b, "ln_f", x_btd)?;
    b.linear_oi(x_btd, wte_vd, None)
}

pub(super) fn describe(model: &Model) -> String {
    let (s, gated) = sizes(model);
    let name = if gated {
        "llama_simple"
    } else {
        "llama_simple_mlp"
    };
    format!(
        "{name}, {} layers of width {}, {} heads on {} of keys, mlp {}, {} tokens, {} positions",
        s.n_layer, s.d_model, s.n_head, s.n_kv_head, s.d_mlp, s.vocab, s.n_ctx
    )
}
