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

use super::chunks::Chunks;
use super::of_taps::OfTaps;

/// A transformer for each chunk of sites.
pub type ChunkwiseTransformer = OfTaps<Chunks>;
