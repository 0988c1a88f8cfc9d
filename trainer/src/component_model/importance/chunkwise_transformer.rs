//! `chunkwise_transformer`: a transformer for each chunk of the target's blocks, from taps of the
//! residual stream to the logits of the sites in the chunk. See [`Transformer`].
//!
//! Blocks with a site are cut into chunks of `blocks_per_chunk` in their order, the last may be
//! smaller; or each chunk names its sites and its taps. Each chunk has weights of its own, and all
//! of them read equally many columns.
//!
//! # Keys of `[importance]`
//!
//! - chunkwise_transformer: `blocks_per_chunk`, or `chunks` | | | blocks of a chunk; or rows
//!   `{ sites, taps }` of patterns and names, each site in one
//! - chunkwise_transformer: `input_tap` | `"all_block_resids"` | | with `blocks_per_chunk`, what is
//!   read: the residual stream before each block of the chunk; `"first_block_resid"`, before its
//!   first one; `"all_resids"`, that behind each attention too; `"all_block_taps"`, what goes into
//!   the matrices of each block; or `{ kind = "residual_boundaries", offsets }`, before the blocks
//!   of these numbers from the first on
//! - chunkwise_transformer, global_transformer: `d_model`, `n_layer` | | | width, and blocks, which
//!   may be none in the former
//! - chunkwise_transformer, global_transformer: `n_head`, `n_kv_head`, `causal`, `rope_base` | ;
//!   `n_head`, false, 10000 | | heads, of an even width; heads of keys and values; whether a
//!   position sees none after its own; base of the rotary angles
//! - chunkwise_transformer, global_transformer: `hidden`, `ffn`, `learned_norm_scale` | 4
//!   `d_model`, `"gelu"`, false | | width inside each block's feed-forward network; or `"swiglu"`;
//!   whether its norms have scales
//! - chunkwise_transformer, global_transformer: `document_end` | none | | the id that ends a
//!   document, for rows that cross documents: positions then see their own document only

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::{Builder, Result, Value};

use super::all_sites::{all, without_positions};
use super::chunks::{Chunk, Chunks};
use super::layers::{ImportanceTensor, Tensors, Weights};
use super::transformer::{Placed, Transformer};
use super::{ImportanceFunction, Seen};
use crate::sites::Site;

/// A transformer for each chunk of sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChunkwiseTransformer {
    /// The chunks.
    #[serde(flatten)]
    pub chunks: Chunks,
    /// The transformer of each.
    #[serde(flatten)]
    pub transformer: Transformer,
}

impl ChunkwiseTransformer {
    fn placed(&self, chunks: &[Chunk]) -> Vec<Placed<'_>> {
        let chunks = chunks.iter().enumerate();
        chunks
            .map(|(number, chunk)| Placed {
                of: format!("_chunks.{number}"),
                width: chunk.width,
                transformer: &self.transformer,
            })
            .collect()
    }
}

impl ImportanceFunction for ChunkwiseTransformer {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let chunks = Chunks::read(table);
        let transformer = Transformer::read(table, 0);
        Some(Self {
            chunks: chunks?,
            transformer: transformer?,
        })
    }

    fn details(&self) -> String {
        format!("{}, {}", self.chunks.details(), self.transformer.details())
    }

    fn is_over_all_sites() -> bool {
        true
    }

    fn takes_muon() -> bool {
        true
    }

    fn refuses(&self, sites: &[Site]) -> Option<String> {
        if let Some(reason) = without_positions(sites) {
            return Some(reason);
        }
        let sites: Vec<&Site> = sites.iter().collect();
        self.chunks.of(&sites).err()
    }

    fn document_end(&self) -> Option<u32> {
        self.transformer.block?.document_end
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        let all: Vec<&Site> = sites.iter().collect();
        let chunks = self.chunks.of(&all).expect("checked by `refuses`");
        for (chunk, placed) in chunks.iter().zip(self.placed(&chunks)) {
            let members: Vec<&Site> = chunk.members.iter().map(|&index| all[index]).collect();
            placed.tensors(&mut tensors, &members);
        }
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let sites: Vec<&Site> = seen.iter().map(|seen| seen.site).collect();
        let chunks = self.chunks.of(&sites).expect("checked by `refuses`");
        let mut logits = vec![None; seen.len()];
        for (chunk, placed) in chunks.iter().zip(self.placed(&chunks)) {
            let found = placed.logits(b, weights, (&chunk.taps, &chunk.members), seen)?;
            for (&index, found) in chunk.members.iter().zip(found) {
                logits[index] = Some(found);
            }
        }
        Ok(all(logits))
    }
}
