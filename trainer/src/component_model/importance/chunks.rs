//! Chunks of the sites of a run: which sites a network predicts, and the taps that it reads.

use std::collections::BTreeMap;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{PATTERNS, Size};

use super::all_sites::one_each;
use super::of_taps::{Chunk, Chunking};
use super::taps::{self, BlockTaps, InputTap, NAMES, refuse_input_tap};
use crate::run_file::pattern_matches;
use crate::sites::Site;

/// How sites are cut into chunks, and what each reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Chunks {
    /// By consecutive blocks of the target.
    ByBlocks {
        /// Blocks of a chunk.
        blocks_per_chunk: usize,
        /// Its taps.
        input_tap: InputTap,
    },
    /// By name.
    Named {
        /// Each with its sites and taps.
        chunks: Vec<NamedChunk>,
    },
}

/// A chunk by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NamedChunk {
    /// Patterns of its sites.
    pub sites: Vec<String>,
    /// Names of its taps.
    pub taps: Vec<String>,
}

impl NamedChunk {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let sites = table.need("sites", PATTERNS);
        let taps = table.need("taps", NAMES);
        all_read! { Self: sites, taps }
    }
}

impl Chunking for Chunks {
    const LEAST_BLOCKS: usize = 0;

    fn read(table: &mut Table<'_>) -> Option<Self> {
        let chunks = table.rows_or_none("chunks", NamedChunk::read);
        let blocks_per_chunk = table.maybe("blocks_per_chunk", Size::at_least(1));
        let input_tap = InputTap::read(table, BlockTaps::AllBlockResids);
        match (chunks?, blocks_per_chunk?) {
            (chunks, Some(blocks_per_chunk)) if chunks.is_empty() => Some(Self::ByBlocks {
                blocks_per_chunk,
                input_tap: input_tap?,
            }),
            (chunks, None) if chunks.is_empty() => {
                table.refuse_table("expected `blocks_per_chunk` or `chunks`, found neither")
            }
            (_, Some(_)) => table.refuse(
                "chunks",
                "expected either `chunks` or `blocks_per_chunk`, found both",
            ),
            (chunks, None) => {
                refuse_input_tap(table, "chunks name their taps");
                Some(Self::Named { chunks })
            }
        }
    }

    fn details(&self) -> String {
        match self {
            Self::ByBlocks {
                blocks_per_chunk,
                input_tap,
            } => format!(
                "of {blocks_per_chunk} blocks a chunk by {}",
                input_tap.word()
            ),
            Self::Named { chunks } => format!("of {} chunks", chunks.len()),
        }
    }

    fn of(&self, sites: &[&Site]) -> Result<Vec<Chunk>, String> {
        let target = taps::blocks(sites)?;
        let parts: Vec<(Vec<usize>, Vec<String>)> = match self {
            Self::ByBlocks {
                blocks_per_chunk,
                input_tap,
            } => {
                let groups = by_blocks(sites)?;
                let chunks = groups.chunks(*blocks_per_chunk);
                let part = |chunk: &[(usize, Vec<usize>)]| {
                    let blocks: Vec<usize> = chunk.iter().map(|(block, _)| *block).collect();
                    let members = chunk
                        .iter()
                        .flat_map(|(_, members)| members.iter().copied());
                    (members.collect(), input_tap.names(&blocks, target.of))
                };
                chunks.map(part).collect()
            }
            Self::Named { chunks } => {
                let parts = chunks.iter().map(|chunk| {
                    let of_chunk = |(_, site): &(usize, &&Site)| {
                        let mut patterns = chunk.sites.iter();
                        patterns.any(|pattern| pattern_matches(pattern, site.path()))
                    };
                    let members = sites.iter().enumerate().filter(of_chunk);
                    let members = members.map(|(index, _)| index).collect();
                    (members, chunk.taps.clone())
                });
                parts.collect()
            }
        };
        let members = parts.iter().enumerate();
        let members = members.map(|(number, (members, _))| (number.to_string(), members.clone()));
        one_each("chunk", sites, &members.collect::<Vec<_>>())?;
        let chunk = |(members, taps): (Vec<usize>, Vec<String>)| {
            let width = taps::width(&taps, target)?;
            Ok(Chunk {
                members,
                taps,
                width,
            })
        };
        let chunks: Vec<Chunk> = parts
            .into_iter()
            .map(chunk)
            .collect::<Result<_, String>>()?;
        equally_wide(&chunks)?;
        Ok(chunks)
    }

    fn module(number: usize) -> String {
        format!("_chunks.{number}")
    }
}

/// Blocks with a site in their order, and the numbers of their sites.
fn by_blocks(sites: &[&Site]) -> Result<Vec<(usize, Vec<usize>)>, String> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, site) in sites.iter().enumerate() {
        let Some(block) = site.layer.block else {
            return Err(format!(
                "each site is in the chunk of its block, and `{}` is in no block; name the sites of each chunk by `chunks`",
                site.path()
            ));
        };
        groups.entry(block.number).or_default().push(index);
    }
    Ok(groups.into_iter().collect())
}

/// Refuses chunks that read unequally many columns.
fn equally_wide(chunks: &[Chunk]) -> Result<(), String> {
    let [first, rest @ ..] = chunks else {
        return Ok(());
    };
    let other = rest.iter().find(|chunk| chunk.width != first.width);
    match other {
        None => Ok(()),
        Some(other) => Err(format!(
            "expected taps of one width for all chunks, found {} columns ({}) and {} ({})",
            first.width,
            first.taps.join(", "),
            other.width,
            other.taps.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::{ChunkwiseTransformer, ImportanceKind, Transformer};
    use crate::decomposition::Decomposition;

    const NO_LAYERS: Transformer = Transformer {
        d_model: 4,
        n_layer: 0,
        block: None,
    };

    /// A decomposition by these chunks, or its refusal.
    fn made(workload: &str, chunks: Chunks) -> Result<(Decomposition, Store), String> {
        let mut run = preset(workload, &Overrides::default()).unwrap().run;
        let transformer = NO_LAYERS;
        run.importance.kind = ImportanceKind::ChunkwiseTransformer(ChunkwiseTransformer {
            chunks,
            transformer,
        });
        let mut store = Store::new();
        match Decomposition::new(&run, &mut store) {
            Ok(made) => Ok((made, store)),
            Err(fault) => Err(fault.to_string()),
        }
    }

    fn refusal(workload: &str, chunks: Chunks) -> String {
        let line = made(workload, chunks).err().unwrap_or_default();
        line.trim_start_matches("[importance] kind: ").to_owned()
    }

    /// Patterns of sites, and names of taps.
    type Said<'a> = (&'a [&'a str], &'a [&'a str]);

    fn named(chunks: &[Said<'_>]) -> Chunks {
        let all = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let chunk = |(sites, taps): &Said<'_>| NamedChunk {
            sites: all(sites),
            taps: all(taps),
        };
        let chunks = chunks.iter().map(chunk).collect();
        Chunks::Named { chunks }
    }

    // Widths of 32 and 40 in two blocks.
    #[test]
    fn chunks_that_do_not_fit_are_refused() {
        let pre = &["resid_pre.0"][..];
        let cases: [(&[Said<'_>], &str); 6] = [
            (&[(&["*"], pre)], ""),
            (
                &[(&["h.0.*"], pre)],
                "each site is in one chunk, and `h.1.mlp.gate_proj` is in no chunk",
            ),
            (
                &[(&["*"], pre), (&["*.q_proj"], pre)],
                "each site is in one chunk, and `h.0.attn.q_proj` is in 0 and 1",
            ),
            (
                &[(&["*"], pre), (&["x.*"], pre)],
                "no site is in the chunk `1`",
            ),
            (
                &[(&["*"], &["resid_pre.2"])],
                "the target has no tap `resid_pre.2`; expected one of resid_pre, resid_mid, resid_post, attn_in, attn_out, mlp_in, \
                 mlp_hidden, with a block from 0 to 1, such as `resid_pre.0`",
            ),
            (
                &[(&["h.0.*"], pre), (&["h.1.*"], &["mlp_hidden.1"])],
                "expected taps of one width for all chunks, found 32 columns (resid_pre.0) and 40 (mlp_hidden.1)",
            ),
        ];
        for (chunks, line) in cases {
            assert_eq!(refusal("tiny-ss-llama", named(chunks)), line);
        }
        assert_eq!(
            refusal("tiny-tms", named(&[(&["*"], pre)])),
            "reads the residual stream between blocks of the target, and no site is in such a block; \"shared_mlp\" reads each \
             site by itself"
        );
    }

    fn by_blocks(blocks_per_chunk: usize, input_tap: InputTap) -> Chunks {
        Chunks::ByBlocks {
            blocks_per_chunk,
            input_tap,
        }
    }

    /// Columns that each chunk of the run reads.
    fn widths(chunks: Chunks) -> Vec<usize> {
        let (made, store) = made("tiny-ss-llama", chunks).unwrap();
        assert_eq!(made.sites.len(), 14);
        let width = |number: usize| {
            let slot = store.slot(&format!("_ci_fns._chunks.{number}.in_proj.W"))?;
            Some(store.ty(slot).dims[0])
        };
        (0..).map_while(width).collect()
    }

    // The residual stream has 32 columns, four heads have 32, and the MLP has 40.
    #[test]
    fn taps_of_blocks_are_those_of_each_word() {
        for (word, of_each, of_both) in [
            (BlockTaps::FirstBlockResid, 32, 32),
            (BlockTaps::AllBlockResids, 32, 64),
            (BlockTaps::AllResids, 64, 128),
            (BlockTaps::AllBlockTaps, 136, 272),
        ] {
            let tap = || InputTap::Word(word);
            assert_eq!(widths(by_blocks(1, tap())), [of_each; 2], "{word:?}");
            assert_eq!(widths(by_blocks(2, tap())), [of_both], "{word:?}");
            assert_eq!(widths(by_blocks(9, tap())), [of_both], "{word:?}");
        }
        let boundaries = |offsets: &[usize]| {
            let offsets = offsets.to_vec();
            let boundaries = taps::Boundaries { offsets };
            by_blocks(1, InputTap::Boundaries(boundaries))
        };
        // The last is what leaves the last block.
        assert_eq!(widths(boundaries(&[0, 1])), [64, 64]);
        assert!(
            refusal("tiny-ss-llama", boundaries(&[2]))
                .starts_with("the target has no tap `resid_pre.3`;"),
        );
    }
}
