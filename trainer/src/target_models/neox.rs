//! GPT-NeoX, of which the Pythias are: LayerNorm, rotary positions on the first columns of each head, `q`, `k` and `v` of a head side by
//! side in one matrix, biases, a GELU, and a head of its own. In most, attention and MLP read the same residual stream, each through a
//! norm of its own:
//!
//! ```text
//! x + attention(norm_1(x)) + mlp(norm_2(x))    or else    y + mlp(norm_2(y)) with y = x + attention(norm_1(x))
//! ```
//!
//! Black et al., "GPT-NeoX-20B", 2022; names and layouts are those of `transformers.GPTNeoXForCausalLM`.

use spd_engine::ops::{Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::gpt2::{layer_norm, layer_norm_tensors, layer_tensors, nonlinear, starts};
use super::{Layer, Target, TargetTensor};
use crate::pass::Pass;
use crate::run_file::{GptNeoX, Input};

const EMBEDDING: &str = "gpt_neox.embed_in";
const HEAD: &str = "embed_out";
const LAST_NORM: &str = "gpt_neox.final_layer_norm";
/// The layers that write to the residual stream.
const WRITERS: [&str; 2] = ["attention.dense", "mlp.dense_4h_to_h"];

fn block(layer: usize) -> String {
    format!("gpt_neox.layers.{layer}")
}

impl Target for GptNeoX {
    fn describe(&self) -> String {
        format!(
            "gpt_neox, {} layers of width {}, {} heads, mlp {}, {} tokens, {} positions",
            self.n_layer, self.d_model, self.n_head, self.d_mlp, self.vocab, self.n_ctx
        )
    }

    fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }

    fn layers(&self) -> Vec<Layer> {
        let (d, d_mlp) = (self.d_model, self.d_mlp);
        let of_block = [
            ("attention.query_key_value", d, 3 * d, self.attention_bias),
            (WRITERS[0], d, d, self.attention_bias),
            ("mlp.dense_h_to_4h", d, d_mlp, true),
            (WRITERS[1], d_mlp, d, true),
        ];
        let mut all = vec![Layer::embedding(EMBEDDING, self.vocab, d)];
        for layer in 0..self.n_layer {
            let block = block(layer);
            let linear = |&(name, d_in, d_out, bias): &(&str, usize, usize, bool)| {
                Layer::linear(format!("{block}.{name}"), d_in, d_out, bias)
            };
            all.extend(of_block.iter().map(linear));
        }
        let tied_to = self.tied_head.then(|| EMBEDDING.to_owned());
        all.push(Layer::head(HEAD, d, self.vocab, tied_to));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let [normal, residual] = starts(self.n_layer);
        let of_block = |layer| {
            ["input_layernorm", "post_attention_layernorm"]
                .map(|name| format!("{}.{name}", block(layer)))
        };
        let norms = (0..self.n_layer)
            .flat_map(of_block)
            .chain([LAST_NORM.to_owned()]);
        let norms = norms.flat_map(|norm| layer_norm_tensors(&norm, self.d_model));
        let layers = self
            .layers()
            .into_iter()
            .filter(|layer| layer.tied_to.is_none());
        let weights = layers.flat_map(|layer| {
            let writes = WRITERS.iter().any(|name| layer.path.ends_with(name));
            layer_tensors(&layer, if writes { residual } else { normal })
        });
        weights.chain(norms).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let eps = self.norm_eps;
        let positions = b.ty(tokens_bt).columns();
        let rotary = b.rotary_table(positions, self.d_rotary, self.rope_base, None)?;
        let mut x_btd = pass.embedding(b, EMBEDDING, tokens_bt, None)?;
        for layer in 0..self.n_layer {
            let block = block(layer);
            let normed_btd = layer_norm(b, pass, &format!("{block}.input_layernorm"), x_btd, eps)?;
            let qkv = pass.linear(b, &format!("{block}.attention.query_key_value"), normed_btd)?;
            let heads = Heads::causal(self.n_head, self.n_head);
            let mixed_btd = b.attention(Qkv::ByHead(qkv), heads, Some(rotary))?;
            let attn_btd = pass.linear(b, &format!("{block}.{}", WRITERS[0]), mixed_btd)?;
            let attended_btd = b.add(x_btd, attn_btd)?;
            let read_btd = if self.parallel { x_btd } else { attended_btd };
            let norm = format!("{block}.post_attention_layernorm");
            let normed_btd = layer_norm(b, pass, &norm, read_btd, eps)?;
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.dense_h_to_4h"), normed_btd)?;
            let hidden_btm = nonlinear(b, self.activation, hidden_btm)?;
            let mlp_btd = pass.linear(b, &format!("{block}.{}", WRITERS[1]), hidden_btm)?;
            x_btd = b.add(attended_btd, mlp_btd)?;
        }
        let x_btd = layer_norm(b, pass, LAST_NORM, x_btd, eps)?;
        pass.linear(b, HEAD, x_btd)
    }
}
