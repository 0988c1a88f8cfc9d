//! Taps of importance functions: which values of the target's blocks a network reads.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{List, NUMBERED, OneOf, Text};
use spd_configs::words;

use crate::networks::{Block, Tap, TapKind};
use crate::sites::Site;

/// The taps of a group of blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum InputTap {
    /// By a word.
    Word(BlockTaps),
    /// The residual stream at some boundaries between blocks.
    Boundaries(Boundaries),
}

words! {
    /// Taps of a group of blocks.
    pub enum BlockTaps {
        /// The residual stream that enters the first of them.
        FirstBlockResid = "first_block_resid",
        /// The residual stream that enters each of them.
        AllBlockResids = "all_block_resids",
        /// Of each of them what goes into its matrices: inputs and results of attention and MLP.
        AllBlockTaps = "all_block_taps",
        /// The residual stream that enters each of them, and that behind its attention.
        AllResids = "all_resids",
    }
}

/// The residual stream before some blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename = "residual_boundaries")]
pub struct Boundaries {
    /// Numbers of blocks from the first of the group on.
    pub offsets: Vec<usize>,
}

const BOUNDARIES: &str = "residual_boundaries";

impl Boundaries {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let kind = table.need("kind", OneOf(&[(BOUNDARIES, ())]));
        let offsets = table.need("offsets", NUMBERED);
        kind?;
        let offsets = offsets?;
        if offsets.is_empty() {
            return table.refuse("offsets", "expected at least one boundary, found []");
        }
        Some(Self { offsets })
    }
}

impl InputTap {
    /// Reads the key `input_tap`.
    pub(super) fn read(table: &mut Table<'_>, usual: BlockTaps) -> Option<Self> {
        if table.has_table("input_tap") {
            let boundaries = table.table("input_tap", Boundaries::read);
            return boundaries.map(Self::Boundaries);
        }
        let word = table.or("input_tap", BlockTaps::WORDS, usual);
        word.map(Self::Word)
    }

    /// Its word.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Word(word) => word.word(),
            Self::Boundaries(_) => BOUNDARIES,
        }
    }

    /// The names of the taps of some blocks.
    ///
    /// - `blocks`: their numbers, in order
    /// - `all`: blocks of the network
    pub(super) fn names(&self, blocks: &[usize], all: usize) -> Vec<String> {
        let first = blocks.first().copied().unwrap_or(0);
        let each = |kinds: &[TapKind]| {
            let taps = blocks
                .iter()
                .flat_map(|&block| kinds.iter().map(move |&kind| Tap { kind, block }.name()));
            taps.collect()
        };
        match self {
            Self::Word(BlockTaps::FirstBlockResid) => vec![boundary(first, all)],
            Self::Word(BlockTaps::AllBlockResids) => each(&[TapKind::ResidPre]),
            Self::Word(BlockTaps::AllResids) => each(&[TapKind::ResidPre, TapKind::ResidMid]),
            Self::Word(BlockTaps::AllBlockTaps) => each(&[
                TapKind::AttnIn,
                TapKind::AttnOut,
                TapKind::MlpIn,
                TapKind::MlpHidden,
            ]),
            Self::Boundaries(Boundaries { offsets }) => {
                let offsets = offsets.iter();
                offsets
                    .map(|offset| boundary(first.saturating_add(*offset), all))
                    .collect()
            }
        }
    }
}

/// Refuses the key `input_tap` where taps are named.
pub(super) fn refuse_input_tap(table: &mut Table<'_>, because: &str) {
    if table.has("input_tap") {
        let message = format!("expected it to be left out, as {because}");
        table.refuse::<()>("input_tap", message);
    }
}

/// The residual stream before a block; behind the last one, what leaves it.
fn boundary(block: usize, all: usize) -> String {
    let tap = match block == all && all > 0 {
        true => Tap {
            kind: TapKind::ResidPost,
            block: all - 1,
        },
        false => Tap {
            kind: TapKind::ResidPre,
            block,
        },
    };
    tap.name()
}

/// Names of taps, at least one.
pub(super) const NAMES: List<Text> = List::new(
    Text::ANY,
    1,
    "a list of taps, such as [\"resid_pre.0\", \"resid_mid.0\"]",
);

/// The blocks of the target, as a site in one of them says.
///
/// # Errors
///
/// One line where no site is in one.
pub(super) fn blocks(sites: &[&Site]) -> Result<Block, String> {
    let block = sites.iter().find_map(|site| site.layer.block);
    block.ok_or_else(|| {
        "reads the residual stream between blocks of the target, and no site is in such a block; \
         \"shared_mlp\" reads each site by itself"
            .to_owned()
    })
}

/// The width of the taps of these names, side by side.
///
/// # Errors
///
/// One line about a name that the target does not have.
pub(super) fn width(names: &[String], blocks: Block) -> Result<usize, String> {
    let width = |name: &String| {
        let tap = Tap::of(name).filter(|tap| tap.block < blocks.of);
        tap.map(|tap| blocks.width(tap.kind)).ok_or_else(|| {
            let kinds: Vec<&str> = TapKind::WORDS.0.iter().map(|(word, _)| *word).collect();
            format!(
                "the target has no tap `{name}`; expected one of {}, with a block from 0 to {}, such as `resid_pre.0`",
                kinds.join(", "),
                blocks.of - 1
            )
        })
    };
    names.iter().map(width).sum()
}
