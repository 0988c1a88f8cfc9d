//! The transformer of an importance function that reads taps of the target.
//!
//! ```text
//! x = W_in concat(rms(each tap)) + b_in
//! x = x + attention(norm(x))      x = x + ffn(norm(x))         each block
//! z = W_s x + b_s                                              each site
//!
//! gelu:    ffn(h) = W_2 gelu(W_1 h + b_1) + b_2
//! swiglu:  ffn(h) = W_2 (silu(W_g h + b_g) * (W_1 h + b_1)) + b_2
//! ```
//!
//! `norm` brings the mean square to 1, and has learned scales if asked for. There is none behind
//! the last block. Query heads may share heads of keys and values. Positions attend to those of
//! their own document, if the token that ends documents is known. Without blocks, `z` is affine in
//! the normed taps of its own position.

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size};
use spd_configs::words;
use spd_engine::ops::Heads;
use spd_engine::{Builder, Result, Value};

use super::Seen;
use super::all_sites::on_positions;
use super::layers::{
    AT_END, Attending, BEFORE_GELU, Linear, Tensors, Weights, attend, check_heads, mlp, mlp_layers,
    norm, scale_name,
};
use crate::sites::Site;

/// A transformer from taps to the components of some sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Transformer {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// The settings of each block, where there are any.
    #[serde(flatten)]
    pub block: Option<TransformerBlock>,
}

/// A block of a [`Transformer`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TransformerBlock {
    /// Query heads, of an even width.
    pub n_head: usize,
    /// Heads of keys and values; divides `n_head`.
    pub n_kv_head: usize,
    /// Whether a position sees none after its own.
    pub causal: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// Width inside the feed-forward network.
    pub hidden: usize,
    /// The feed-forward network.
    pub ffn: Ffn,
    /// Whether norms have learned scales.
    pub learned_norm_scale: bool,
    /// The token that ends a document, if positions see no other document than their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document_end: Option<u32>,
}

words! {
    /// A feed-forward network.
    pub enum Ffn {
        /// Two linear layers, and the exact GELU between them.
        Gelu = "gelu",
        /// A second linear layer whose SiLU multiplies the first.
        Swiglu = "swiglu",
    }
}

/// A transformer in its place: whose tensors begin with `of`, which reads so many columns.
pub(super) struct Placed<'t> {
    pub(super) of: String,
    pub(super) width: usize,
    pub(super) transformer: &'t Transformer,
}

impl Transformer {
    /// Reads its keys.
    ///
    /// - `least`: blocks that it has to have
    pub(super) fn read(table: &mut Table<'_>, least: usize) -> Option<Self> {
        let d_model = table.need("d_model", Size::at_least(1));
        let n_layer = table.need("n_layer", Size::at_least(least));
        let block = match n_layer {
            Some(0) => Some(None),
            _ => TransformerBlock::read(table, d_model).map(Some),
        };
        all_read! { Self: d_model, n_layer, block }
    }

    pub(super) fn details(&self) -> String {
        let (layers, width) = (self.n_layer, self.d_model);
        let Some(block) = self.block else {
            return format!("no blocks, width {width}");
        };
        let causal = if block.causal { ", causal" } else { "" };
        let apart = if block.document_end.is_some() {
            ", documents apart"
        } else {
            ""
        };
        format!(
            "{layers} blocks of width {width}, {} heads on {} of keys, {} {}{causal}{apart}",
            block.n_head,
            block.n_kv_head,
            block.ffn.word(),
            block.hidden
        )
    }
}

impl TransformerBlock {
    fn read(table: &mut Table<'_>, d_model: Option<usize>) -> Option<Self> {
        let n_head = table.need("n_head", Size::at_least(1));
        let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
        let causal = table.or("causal", Flag, false);
        let rope_base = table.or("rope_base", Number::POSITIVE, 1e4);
        let usual = d_model.map_or(1, |width| width.saturating_mul(4).min(Size::MOST));
        let hidden = table.or("hidden", Size::at_least(1), usual);
        let ffn = table.or("ffn", Ffn::WORDS, Ffn::Gelu);
        let learned_norm_scale = table.or("learned_norm_scale", Flag, false);
        let document_end = table.maybe("document_end", Size::at_least(0));
        table.divides("n_kv_head", n_kv_head, ("n_head", n_head));
        check_heads(table, d_model?, n_head?)?;
        let id = |end| u32::try_from(end).expect("`Size` ends with u32::MAX");
        let document_end = document_end.map(|end| end.map(id));
        all_read! {
            Self: n_head, n_kv_head, causal, rope_base, hidden, ffn, learned_norm_scale,
                document_end
        }
    }

    fn heads(&self) -> Heads {
        match self.causal {
            true => Heads::causal(self.n_head, self.n_kv_head),
            false => Heads::full(self.n_head, self.n_kv_head),
        }
    }
}

impl Placed<'_> {
    fn first(&self) -> Linear {
        let of = format!("{}.in_proj", self.of);
        Linear::new(&of, self.width, self.transformer.d_model)
    }

    fn head(&self, site: &Site) -> Linear {
        let of = format!("{}.heads.{}", self.of, site.dashed());
        Linear::new(&of, self.transformer.d_model, site.components)
    }

    /// The module of a part of a block.
    fn part(&self, block: usize, part: &str) -> String {
        format!("{}.blocks.{block}.{part}", self.of)
    }

    fn mlp_of(&self, number: usize, block: TransformerBlock) -> Vec<Linear> {
        let d = self.transformer.d_model;
        mlp_layers(&self.part(number, "ffn"), d, &[block.hidden], d)
    }

    fn gate_of(&self, number: usize, block: TransformerBlock) -> Linear {
        let of = self.part(number, "ffn.gate");
        Linear::new(&of, self.transformer.d_model, block.hidden)
    }

    /// The settings of each block with its number.
    fn blocks(&self) -> impl Iterator<Item = (usize, TransformerBlock)> {
        let all = 0..self.transformer.n_layer;
        let block = self.transformer.block;
        all.filter_map(move |number| Some((number, block?)))
    }

    /// Its tensors, with a head for each of `sites`.
    pub(super) fn tensors(&self, tensors: &mut Tensors, sites: &[&Site]) {
        let d = self.transformer.d_model;
        tensors.linear(self.first(), BEFORE_GELU);
        for (number, block) in self.blocks() {
            if block.learned_norm_scale {
                tensors.scale(&self.part(number, "norm_1"), d);
            }
            let kv = d / block.n_head * block.n_kv_head;
            tensors.attention(&self.part(number, "attn"), [d, kv]);
            if block.learned_norm_scale {
                tensors.scale(&self.part(number, "norm_2"), d);
            }
            if block.ffn == Ffn::Swiglu {
                tensors.linear(self.gate_of(number, block), BEFORE_GELU);
            }
            tensors.mlp(self.mlp_of(number, block), AT_END);
        }
        for site in sites {
            tensors.linear(self.head(site), AT_END);
        }
    }

    /// The last residual stream, from taps by name.
    fn stream(
        &self,
        b: &mut Builder,
        weights: Weights<'_>,
        taps: &[String],
        seen: &Seen<'_>,
    ) -> Result<Value> {
        let normed = taps.iter().map(|name| norm(b, seen.tap(name), None));
        let normed = normed.collect::<Result<Vec<_>>>()?;
        let inputs = b.concatenate(&normed)?;
        let x = self.first().apply(b, weights, inputs)?;
        on_positions(b, x, |b, mut x| {
            for (number, block) in self.blocks() {
                b.begin_region();
                let normed = self.norm(b, weights, (number, "norm_1", block), x)?;
                let of = self.part(number, "attn");
                let how = Attending {
                    heads: block.heads(),
                    rope_base: block.rope_base,
                    documents: match block.document_end {
                        Some(end) => Some(b.documents(seen.input, end)?),
                        None => None,
                    },
                };
                let mixed = attend(b, weights, &of, normed, how)?;
                x = b.add(x, mixed)?;
                let normed = self.norm(b, weights, (number, "norm_2", block), x)?;
                let changed = self.ffn(b, weights, (number, block), normed)?;
                x = b.add(x, changed)?;
            }
            Ok(x)
        })
    }

    fn norm(
        &self,
        b: &mut Builder,
        weights: Weights<'_>,
        (number, name, block): (usize, &str, TransformerBlock),
        x: Value,
    ) -> Result<Value> {
        let scale = block
            .learned_norm_scale
            .then(|| weights(b, &scale_name(&self.part(number, name))));
        norm(b, x, scale)
    }

    fn ffn(
        &self,
        b: &mut Builder,
        weights: Weights<'_>,
        (number, block): (usize, TransformerBlock),
        x: Value,
    ) -> Result<Value> {
        let layers = self.mlp_of(number, block);
        match (block.ffn, &layers[..]) {
            (Ffn::Swiglu, [first, last]) => {
                let gate = self.gate_of(number, block).apply(b, weights, x)?;
                let up = first.apply(b, weights, x)?;
                let hidden = b.swiglu(gate, up)?;
                last.apply(b, weights, hidden)
            }
            _ => mlp(b, weights, &layers, x),
        }
    }

    /// Logits f32 `[.., c]` of the sites of these numbers.
    pub(super) fn logits(
        &self,
        b: &mut Builder,
        weights: Weights<'_>,
        (taps, members): (&[String], &[usize]),
        seen: &Seen<'_>,
    ) -> Result<Vec<Value>> {
        let x = self.stream(b, weights, taps, seen)?;
        let heads = members.iter().map(|&index| self.head(seen[index].site));
        heads.map(|head| head.apply(b, weights, x)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Alone, Pool, Store};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::{
        BlockTaps, Chunks, ChunkwiseTransformer, ImportanceKind, InputTap,
    };
    use crate::decomposition::Decomposition;
    use crate::run_file::{Data, Run};

    const END: u32 = 3;

    /// Two blocks that see all positions, one of them behind the other.
    fn run(document_end: Option<u32>) -> Run {
        let mut run = preset("tiny-ss-llama", &Overrides::default()).unwrap().run;
        let block = TransformerBlock {
            n_head: 2,
            n_kv_head: 1,
            causal: false,
            rope_base: 1e4,
            hidden: 8,
            ffn: Ffn::Gelu,
            learned_norm_scale: false,
            document_end,
        };
        run.importance.kind = ImportanceKind::ChunkwiseTransformer(ChunkwiseTransformer {
            chunks: Chunks::ByBlocks {
                blocks_per_chunk: 1,
                input_tap: InputTap::Word(BlockTaps::AllBlockResids),
            },
            transformer: Transformer {
                d_model: 8,
                n_layer: 2,
                block: Some(block),
            },
        });
        run
    }

    /// Logits of the first sites on these tokens of one row, by position.
    fn logits(document_end: Option<u32>, tokens: &[u32]) -> Vec<Vec<u32>> {
        let mut run = run(document_end);
        run.eval.batch_size = 1;
        let mut store = Store::new();
        let made = Decomposition::new(&run, &mut store).unwrap();
        for slot in store.slots().collect::<Vec<_>>() {
            let wave = |(i, value): (usize, &mut f32)| *value = 0.3 * (i as f32 * 1.3).sin();
            store.change(slot, |values| values.iter_mut().enumerate().for_each(wave));
        }
        let program = made.figures_program(&store).unwrap();
        let mut program = Alone::new(&program, &Arc::new(Pool::single()).into()).unwrap();
        program.input_u32("input").copy_from_slice(tokens);
        program.run(&mut store).unwrap();
        let site = &made.sites[0];
        let logits = program.output(&format!("logits {}", site.path()), &store);
        let rows = logits.chunks_exact(site.components);
        rows.map(|row| row.iter().map(|x| x.to_bits()).collect())
            .collect()
    }

    // The target itself sees no later position, so the taps of the first document stay the same.
    #[test]
    fn logits_of_a_document_are_the_same_before_any_other() {
        let Data::Tokens { seq_len, .. } = run(None).data else {
            unreachable!("a language model");
        };
        let positions = u32::try_from(seq_len).unwrap();
        let first = positions / 2;
        let tokens = |other: u32| -> Vec<u32> {
            let token = |at: u32| match at.cmp(&first) {
                std::cmp::Ordering::Less => 5 + at % 7,
                std::cmp::Ordering::Equal => END,
                std::cmp::Ordering::Greater => 5 + (at + other) % 7,
            };
            (0..positions).map(token).collect()
        };
        let same = |document_end: Option<u32>| {
            let [some, others] = [0, 1].map(|other| logits(document_end, &tokens(other)));
            let same = some.iter().zip(&others).map(|(a, b)| a == b);
            same.collect::<Vec<bool>>()
        };
        let first = first as usize;
        let apart = same(Some(END));
        assert!(apart[..=first].iter().all(|&same| same), "{apart:?}");
        assert!(apart[first + 1..].iter().any(|&same| !same), "{apart:?}");
        // A token that does not occur ends no document.
        for joined in [None, Some(END + 1)] {
            assert!(same(joined)[..=first].iter().all(|&same| !same));
        }
    }

    #[test]
    fn a_token_beyond_the_vocabulary_ends_no_document() {
        let refused = Decomposition::new(&run(Some(1 << 20)), &mut Store::new());
        let line = refused.err().unwrap().to_string();
        assert!(
            line.starts_with("[importance] document_end: expected an id below the target's "),
            "{line}"
        );
        assert!(line.ends_with(", found 1048576"), "{line}");
    }
}
