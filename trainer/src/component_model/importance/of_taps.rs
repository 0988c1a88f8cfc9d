//! Importance functions of [transformers](Transformer) that read taps, one for each chunk of sites.

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_engine::{Builder, Result, Value};

use super::all_sites::all;
use super::layers::{ImportanceTensor, Tensors, Weights};
use super::transformer::{Placed, Transformer};
use super::{ImportanceFunction, Seen};
use crate::sites::Site;

/// A chunk of the sites of a run.
pub(super) struct Chunk {
    /// Numbers of its sites.
    pub(super) members: Vec<usize>,
    /// Names of its taps, and their width side by side.
    pub(super) taps: Vec<String>,
    pub(super) width: usize,
}

/// How sites are cut into chunks, and what each reads.
pub(super) trait Chunking: Sized {
    /// Blocks that a transformer has at least.
    const LEAST_BLOCKS: usize;

    /// Reads its keys.
    fn read(table: &mut Table<'_>) -> Option<Self>;

    /// Its settings, as the plan shows them.
    fn details(&self) -> String;

    /// The chunks of the sites of a run, each site in one.
    ///
    /// # Errors
    ///
    /// One line about sites or taps that do not fit.
    fn of(&self, sites: &[&Site]) -> Result<Vec<Chunk>, String>;

    /// The module of the transformer of a chunk.
    fn module(number: usize) -> String;
}

/// A transformer for each chunk of sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OfTaps<C> {
    /// The chunks.
    #[serde(flatten)]
    pub chunks: C,
    /// The transformer of each.
    #[serde(flatten)]
    pub transformer: Transformer,
}

/// The chunks of the sites of a run, each with its transformer.
fn placed<'t, C: Chunking>(said: &'t OfTaps<C>, sites: &[&Site]) -> Vec<(Chunk, Placed<'t>)> {
    let chunks = said.chunks.of(sites).expect("checked by `refuses`");
    let chunks = chunks.into_iter().enumerate();
    chunks
        .map(|(number, chunk)| {
            let placed = Placed {
                of: C::module(number),
                width: chunk.width,
                transformer: &said.transformer,
            };
            (chunk, placed)
        })
        .collect()
}

impl<C: Chunking> ImportanceFunction for OfTaps<C> {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let chunks = C::read(table);
        let transformer = Transformer::read(table, C::LEAST_BLOCKS);
        all_read! { Self: chunks, transformer }
    }

    fn details(&self) -> String {
        format!("{}, {}", self.chunks.details(), self.transformer.details())
    }

    fn takes_muon() -> bool {
        true
    }

    fn refuses(&self, sites: &[Site]) -> Option<String> {
        let sites: Vec<&Site> = sites.iter().collect();
        self.chunks.of(&sites).err()
    }

    fn sees_later(&self) -> bool {
        self.transformer.block.is_some_and(|block| !block.causal)
    }

    fn document_end(&self) -> Option<u32> {
        self.transformer.block?.document_end
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        let all: Vec<&Site> = sites.iter().collect();
        for (chunk, transformer) in placed(self, &all) {
            let members: Vec<&Site> = chunk.members.iter().map(|&index| all[index]).collect();
            transformer.tensors(&mut tensors, &members);
        }
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let sites: Vec<&Site> = seen.iter().map(|seen| seen.site).collect();
        let mut logits = vec![None; seen.len()];
        for (chunk, transformer) in placed(self, &sites) {
            let found = transformer.logits(b, weights, (&chunk.taps, &chunk.members), seen)?;
            for (&index, found) in chunk.members.iter().zip(found) {
                logits[index] = Some(found);
            }
        }
        Ok(all(logits))
    }
}
