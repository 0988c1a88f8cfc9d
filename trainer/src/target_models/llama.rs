//! Llamas: RMSNorm before each sublayer, rotary positions, causal attention whose query heads may share key heads.
//!
//! The reference's small ones have no bias and a head tied to the token embedding; `LlamaSimple` has a SwiGLU MLP, `LlamaSimpleMLP` a plain
//! one. Hugging Face's (`transformers.LlamaForCausalLM`, and Mistral, Qwen 2 and Qwen 3, which are built on it) have a head of their own or
//! a tied one, heads of any width, and where they say so biases, a norm of each head of `q` and `k`, or slower angles for longer texts.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023; names and layouts are theirs.

use spd_engine::ops::{GeluKind, Heads, Qkv, RotaryScaling};
use spd_engine::{Builder, Result, Value};

use super::gpt2::{layer_tensors, rounded, starts};
use super::{Layer, Start, Target, TargetTensor};
use crate::pass::Pass;
use crate::run_file::{Input, Llama, LlamaSimple};

/// A Llama in one of its layouts.
#[derive(Debug)]
pub(super) struct Network {
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
    pub(super) fn huggingface(sizes: Llama) -> Self {
        Self {
            sizes,
            names: &HUGGINGFACE,
            gated: true,
        }
    }

    pub(super) fn simple(sizes: LlamaSimple, gated: bool) -> Self {
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

    fn layers(&self) -> Vec<Layer> {
        let s = &self.sizes;
        let (d, d_q, d_kv) = (s.d_model, s.n_head * s.d_head, s.n_kv_head * s.d_head);
        let of_attention = [
            ("q_proj", d, d_q, s.qkv_bias),
            ("k_proj", d, d_kv, s.qkv_bias),
            ("v_proj", d, d_kv, s.qkv_bias),
            ("o_proj", d_q, d, s.o_bias),
        ];
        let mut of_mlp = if self.gated {
            vec![("gate_proj", d, s.d_mlp), ("up_proj", d, s.d_mlp)]
        } else {
            vec![("c_fc", d, s.d_mlp)]
        };
        of_mlp.push(("down_proj", s.d_mlp, d));
        let mut all = vec![Layer::embedding(self.names.embedding, s.vocab, d)];
        for layer in 0..s.n_layer {
            let block = self.block(layer);
            for (name, d_in, d_out, bias) in of_attention {
                let path = format!("{block}.{}.{name}", self.names.attention);
                all.push(Layer::linear(path, d_in, d_out, bias));
            }
            for &(name, d_in, d_out) in &of_mlp {
                all.push(Layer::linear(
                    format!("{block}.mlp.{name}"),
                    d_in,
                    d_out,
                    false,
                ));
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
            let normed_btd = self.norm(b, pass, &format!("{block}.{}", names.norms[0]), x_btd)?;
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
            let mixed_btd = b.attention(Qkv::Apart([q, k, v]), heads, Some(rotary))?;
            let attn_btd = pass.linear(b, &format!("{attention}.o_proj"), mixed_btd)?;
            x_btd = b.add(x_btd, attn_btd)?;
            let normed_btd = self.norm(b, pass, &format!("{block}.{}", names.norms[1]), x_btd)?;
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
        let x_btd = self.norm(b, pass, names.last_norm, x_btd)?;
        pass.linear(b, HEAD, x_btd)
    }
}
