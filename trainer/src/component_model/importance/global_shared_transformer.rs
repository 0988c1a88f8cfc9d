//! `global_shared_transformer`: one transformer over the positions of a row, from the normed inputs
//! of all sites side by side to the logits of all their components.
//!
//! ```text
//! x = W_in concat(rms(input of each site)) + b_in
//! x = x + attention(rms(x))      x = x + mlp(rms(x))         each block
//! z = W_out x + b_out
//! ```
//!
//! Sites are in the order of their names; an embedding shows its activations `V[x]`. The attention
//! is not causal: an importance may depend on later positions. `rms` has no weight, and there is
//! none behind the last block. A row of features is one of one position.
//!
//! # Keys of `[importance]`
//!
//! - global_shared_transformer: `d_model`, `n_layer`, `n_head` | | `simple_transformer_ci_cfg`:
//!   `d_model`, `n_blocks`, `attn_config`: `n_heads` | width, blocks, and heads, which are of an
//!   even width
//! - global_shared_transformer: `hidden` | `[4 d_model]` | `mlp_hidden_dim` | widths inside each
//!   block's MLP
//! - global_shared_transformer, global_reverse_residual: `rope_base` | 10000 | `rope_base` | base
//!   of the rotary angles

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Size, WIDTHS};
use spd_engine::{Builder, Result, Value};

use super::all_sites::{all, by_name, on_positions, share_out, width};
use super::layers::{
    AT_END, BEFORE_GELU, ImportanceTensor, Linear, SelfAttention, Tensors, Weights, mlp,
    mlp_layers, norm,
};
use super::{ImportanceFunction, Seen};
use crate::run_file::reference::Made;
use crate::sites::Site;

/// One transformer from the inputs of all sites to the components of all sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalSharedTransformer {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// The attention of each block.
    #[serde(flatten)]
    pub attention: SelfAttention,
    /// Widths inside each block's MLP.
    pub hidden: Vec<usize>,
}

const OF: &str = "_global_ci_fn";

fn attention_of(block: usize) -> String {
    format!("{OF}._blocks.{block}.attn")
}

impl GlobalSharedTransformer {
    fn first(&self, width: usize) -> Linear {
        Linear::new(&format!("{OF}._input_projector"), width, self.d_model)
    }

    fn mlp_of(&self, block: usize) -> Vec<Linear> {
        let of = format!("{OF}._blocks.{block}.mlp");
        mlp_layers(&of, self.d_model, &self.hidden, self.d_model)
    }

    fn last(&self, components: usize) -> Linear {
        Linear::new(&format!("{OF}._output_head"), self.d_model, components)
    }
}

impl ImportanceFunction for GlobalSharedTransformer {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let d_model = table.need("d_model", Size::at_least(2));
        let n_layer = table.need("n_layer", Size::at_least(1));
        let n_head = table.need("n_head", Size::at_least(1));
        let attention = SelfAttention::read(table, d_model, n_head);
        let usual = vec![d_model.map_or(1, |width| width.saturating_mul(4).min(Size::MOST))];
        let hidden = table.or("hidden", WIDTHS, usual);
        all_read! { Self: d_model, n_layer, attention, hidden }
    }

    fn details(&self) -> String {
        let (heads, width) = (self.attention.n_head, self.d_model);
        let layers = self.n_layer;
        format!(
            "{layers} blocks of width {width}, {heads} heads, mlp {:?}",
            self.hidden
        )
    }

    fn sees_later(&self) -> bool {
        true
    }

    fn takes_muon() -> bool {
        true
    }

    fn from_reference(of: &mut Table<'_>, made: &mut Made) {
        let read = |of: &mut Table<'_>| {
            made.need(of, ("d_model", "a width"), "d_model");
            made.need(of, ("n_blocks", "a whole number"), "n_layer");
            made.carry(of, "mlp_hidden_dim", "hidden");
            of.table("attn_config", |of| SelfAttention::from_reference(of, made))
        };
        of.table("simple_transformer_ci_cfg", read);
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_config": {
            "mode": "global",
            "fn_type": "global_shared_transformer",
            "simple_transformer_ci_cfg": {
                "d_model": self.d_model,
                "n_blocks": self.n_layer,
                "mlp_hidden_dim": self.hidden,
                "attn_config": self.attention.to_reference(),
            },
        } })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        let seen = sites.iter().map(width).sum();
        tensors.linear(self.first(seen), BEFORE_GELU);
        for block in 0..self.n_layer {
            tensors.attention(&attention_of(block), [self.d_model; 2]);
            tensors.mlp(self.mlp_of(block), AT_END);
        }
        let components = sites.iter().map(|site| site.components).sum();
        tensors.linear(self.last(components), AT_END);
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let sites = || seen.iter().map(|seen| seen.site);
        let order = by_name(sites());
        let mut inputs = Vec::with_capacity(seen.len());
        for &index in &order {
            let input = seen[index].shown(b)?;
            inputs.push(norm(b, input, None)?);
        }
        let inputs = b.concatenate(&inputs)?;
        let first = self.first(sites().map(width).sum());
        let x = first.apply(b, weights, inputs)?;
        let x = on_positions(b, x, |b, mut x| {
            for block in 0..self.n_layer {
                b.begin_region();
                let normed = norm(b, x, None)?;
                let mixed = self
                    .attention
                    .apply(b, weights, &attention_of(block), normed)?;
                x = b.add(x, mixed)?;
                let normed = norm(b, x, None)?;
                let changed = mlp(b, weights, &self.mlp_of(block), normed)?;
                x = b.add(x, changed)?;
            }
            Ok(x)
        })?;
        let last = self.last(sites().map(|site| site.components).sum());
        let x = last.apply(b, weights, x)?;
        let mut logits = vec![None; seen.len()];
        share_out(b, x, seen, &order, &mut logits)?;
        Ok(all(logits))
    }
}
