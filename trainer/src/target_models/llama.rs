//! The reference's small Llamas: RMSNorm before each sublayer, rotary positions, causal attention whose query heads share key
//! heads, no bias, the head tied to the token embedding. `LlamaSimple` has a SwiGLU MLP, `LlamaSimpleMLP` a plain one.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023; names and layouts are the reference's.

use spd_configs::{Input, Llama};
use spd_engine::ops::{GeluKind, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::{Layer, Start, Target, TargetTensor};
use crate::pass::Pass;

const EPS: f32 = 1e-6;
const ROTARY_BASE: f64 = 10_000.0;

/// A Llama with one of its MLPs.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) sizes: Llama,
    /// Whether the MLP has a gate.
    pub(super) gated: bool,
}

impl Target for Network {
    fn describe(&self) -> String {
        let name = if self.gated {
            "llama_simple"
        } else {
            "llama_simple_mlp"
        };
        let s = &self.sizes;
        format!(
            "{name}, {} layers of width {}, {} heads on {} of keys, mlp {}, {} tokens, {} positions",
            s.n_layer, s.d_model, s.n_head, s.n_kv_head, s.d_mlp, s.vocab, s.n_ctx
        )
    }

    fn input(&self) -> Input {
        self.sizes.input()
    }

    fn layers(&self) -> Vec<Layer> {
        let s = &self.sizes;
        let (d, d_kv) = (s.d_model, s.d_model / s.n_head * s.n_kv_head);
        let mut block = vec![
            ("attn.q_proj", d, d),
            ("attn.k_proj", d, d_kv),
            ("attn.v_proj", d, d_kv),
            ("attn.o_proj", d, d),
        ];
        block.extend(if self.gated {
            vec![("mlp.gate_proj", d, s.d_mlp), ("mlp.up_proj", d, s.d_mlp)]
        } else {
            vec![("mlp.c_fc", d, s.d_mlp)]
        });
        block.push(("mlp.down_proj", s.d_mlp, d));
        let mut all = vec![Layer::embedding("wte", s.vocab, d)];
        for layer in 0..s.n_layer {
            let linear = |&(name, d_in, d_out): &(&str, usize, usize)| {
                Layer::linear(format!("h.{layer}.{name}"), d_in, d_out, false)
            };
            all.extend(block.iter().map(linear));
        }
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let s = &self.sizes;
        // As for GPT-2: less where a block writes to the residual stream.
        let normal = Start::Normal(0.02);
        let residual = Start::Normal(0.02 / (2.0 * s.n_layer as f64).sqrt());
        let wte = TargetTensor::trained("wte.weight", &[s.vocab, s.d_model], normal);
        let norms = (0..s.n_layer).flat_map(|layer| [1, 2].map(|n| format!("h.{layer}.rms_{n}")));
        let norms = norms
            .chain(["ln_f".to_owned()])
            .map(|norm| TargetTensor::trained(format!("{norm}.weight"), &[s.d_model], Start::Ones));
        let layers = self.layers();
        let weights = layers[1..].iter().map(|layer| {
            let writes = layer.path.ends_with("o_proj") || layer.path.ends_with("down_proj");
            let start = if writes { residual } else { normal };
            TargetTensor::trained(
                format!("{}.weight", layer.path),
                &layer.weight_dims(),
                start,
            )
        });
        [wte].into_iter().chain(norms).chain(weights).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let s = &self.sizes;
        let norm = |b: &mut Builder, pass: &Pass<'_>, name: &str, x_btd: Value| {
            b.rms_norm(x_btd, pass.weight(&format!("{name}.weight")), EPS)
        };
        let positions = b.ty(tokens_bt).columns();
        let rotary = b.rotary_table(positions, s.d_model / s.n_head, ROTARY_BASE, None)?;
        let mut x_btd = pass.embedding(b, "wte", tokens_bt, None)?;
        for layer in 0..s.n_layer {
            let block = format!("h.{layer}");
            let normed_btd = norm(b, pass, &format!("{block}.rms_1"), x_btd)?;
            let mut project = |b: &mut Builder, name: &str| {
                pass.linear(b, &format!("{block}.attn.{name}"), normed_btd)
            };
            let qkv = Qkv::Apart([
                project(b, "q_proj")?,
                project(b, "k_proj")?,
                project(b, "v_proj")?,
            ]);
            let mixed_btd = b.attention(qkv, Heads::causal(s.n_head, s.n_kv_head), Some(rotary))?;
            let attn_btd = pass.linear(b, &format!("{block}.attn.o_proj"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            let normed_btd = norm(b, pass, &format!("{block}.rms_2"), x_btd)?;
            let hidden_btm = if self.gated {
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
        let x_btd = norm(b, pass, "ln_f", x_btd)?;
        b.linear_oi(x_btd, pass.weight("wte.weight"), None)
    }
}
