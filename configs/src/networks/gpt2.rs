//! `kind = "gpt2"`, in Hugging Face's layout: a fused `c_attn`, Conv1D weights, a tied head; and `kind = "gpt2_simple"`, the
//! reference's: separate `q_proj`, `k_proj` and `v_proj`, and PyTorch's linear layers.

use serde::Serialize;

use super::{Found, Input, Reads, read_heads};
use crate::{reader::Table, values::Size};

/// Sizes of a GPT-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Gpt2 {
    /// Vocabulary size.
    pub vocab: usize,
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Attention heads; divides `d_model`.
    pub n_head: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
}

impl Gpt2 {
    /// What it reads.
    pub fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }
}

pub(super) fn read(table: &mut Table<'_>) -> Found<Gpt2> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = read_heads(table, d_model);
    let four_wide = d_model.map_or(1, |d_model| d_model.saturating_mul(4).min(Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), four_wide);
    let network = || {
        Some(Gpt2 {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            d_mlp: d_mlp?,
        })
    };
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}
