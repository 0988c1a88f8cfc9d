//! `global_transformer`: one transformer for all sites, from taps of the residual stream to the
//! logits of all components. See [`Transformer`]; its keys are those of `chunkwise_transformer`.
//!
//! # Keys of `[importance]`
//!
//! - global_transformer: `input_tap`, or `taps` | `"all_resids"` | | as of `chunkwise_transformer`,
//!   of all blocks with a site; or names of taps

use serde::Serialize;
use spd_configs::reader::Table;

use super::of_taps::{Chunk, Chunking, OfTaps};
use super::taps::{self, BlockTaps, InputTap, NAMES, refuse_input_tap};
use crate::sites::Site;

/// One transformer from taps to the components of all sites.
pub type GlobalTransformer = OfTaps<GlobalTaps>;

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

impl Chunking for GlobalTaps {
    const LEAST_BLOCKS: usize = 1;

    fn read(table: &mut Table<'_>) -> Option<Self> {
        let taps = table.maybe("taps", NAMES);
        let input_tap = InputTap::read(table, BlockTaps::AllResids);
        if let Some(taps) = taps? {
            refuse_input_tap(table, "`taps` names them");
            return Some(Self::Named { taps });
        }
        let input_tap = input_tap?;
        Some(Self::OfBlocks { input_tap })
    }

    fn details(&self) -> String {
        match self {
            Self::OfBlocks { input_tap } => format!("of {}", input_tap.word()),
            Self::Named { taps } => format!("of {} taps", taps.len()),
        }
    }

    fn of(&self, sites: &[&Site]) -> Result<Vec<Chunk>, String> {
        let target = taps::blocks(sites)?;
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
        Ok(vec![Chunk {
            members: (0..sites.len()).collect(),
            taps: names,
            width,
        }])
    }

    fn module(_: usize) -> String {
        "_global_ci_fn".to_owned()
    }
}
