//! `global_transformer`: one transformer for all sites, from taps of the residual stream to the
//! logits of all components. See [`Transformer`]; its keys are those of `chunkwise_transformer`.
//!
//! # Keys of `[importance]`
//!
//! - global_transformer: `input_tap`, or `taps` | `"all_resids"` | | as of `chunkwise_transformer`,
//!   of all blocks with a site; or names of taps

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::{Builder, Result, Value};

use super::all_sites::without_positions;
use super::layers::{ImportanceTensor, Tensors, Weights};
use super::taps::{self, BlockTaps, InputTap, Names, refuse_input_tap};
use super::transformer::{Placed, Transformer};
use super::{ImportanceFunction, Seen};
use crate::sites::Site;

/// One transformer from taps to the components of all sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalTransformer {
    /// Its taps.
    #[serde(flatten)]
    pub taps: GlobalTaps,
    /// The transformer.
    #[serde(flatten)]
    pub transformer: Transformer,
}

/// The taps of a [`GlobalTransformer`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum GlobalTaps {
    /// Of all blocks with a site.
    OfBlocks {
        /// The taps of the blocks.
        input_tap: InputTap,
    },
    /// By name.
    Named {
        /// Their names.
        taps: Vec<String>,
    },
}

impl GlobalTaps {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let taps = table.maybe("taps", Names);
        let input_tap = InputTap::read(table, BlockTaps::AllResids);
        if let Some(taps) = taps? {
            refuse_input_tap(table, "`taps` names them");
            return Some(Self::Named { taps });
        }
        let input_tap = input_tap?;
        Some(Self::OfBlocks { input_tap })
    }

    /// Names of the taps, and their width side by side.
    ///
    /// # Errors
    ///
    /// One line, if the target does not have them.
    fn of(&self, sites: &[&Site]) -> std::result::Result<(Vec<String>, usize), String> {
        let Some(target) = taps::blocks(sites.iter().copied()) else {
            return Err(taps::NO_BLOCKS.to_owned());
        };
        let names = match self {
            Self::Named { taps } => taps.clone(),
            Self::OfBlocks { input_tap } => {
                let blocks = sites.iter().filter_map(|site| site.layer.block);
                let mut blocks: Vec<usize> = blocks.map(|block| block.number).collect();
                blocks.sort_unstable();
                blocks.dedup();
                input_tap.names(&blocks, target.of)
            }
        };
        let width = taps::width(&names, target)?;
        Ok((names, width))
    }
}

impl GlobalTransformer {
    fn placed(&self, width: usize) -> Placed<'_> {
        Placed {
            of: "_global_ci_fn".to_owned(),
            width,
            transformer: &self.transformer,
        }
    }
}

impl ImportanceFunction for GlobalTransformer {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let taps = GlobalTaps::read(table);
        let transformer = Transformer::read(table, 1);
        Some(Self {
            taps: taps?,
            transformer: transformer?,
        })
    }

    fn details(&self) -> String {
        let taps = match &self.taps {
            GlobalTaps::OfBlocks { input_tap } => input_tap.word().to_owned(),
            GlobalTaps::Named { taps } => format!("{} taps", taps.len()),
        };
        format!("of {taps}, {}", self.transformer.details())
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
        self.taps.of(&sites).err()
    }

    fn document_end(&self) -> Option<u32> {
        self.transformer.block?.document_end
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        let sites: Vec<&Site> = sites.iter().collect();
        let (_, width) = self.taps.of(&sites).expect("checked by `refuses`");
        self.placed(width).tensors(&mut tensors, &sites);
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let sites: Vec<&Site> = seen.iter().map(|seen| seen.site).collect();
        let (taps, width) = self.taps.of(&sites).expect("checked by `refuses`");
        let members: Vec<usize> = (0..sites.len()).collect();
        let placed = self.placed(width);
        placed.logits(b, weights, (&taps, &members), seen)
    }
}
