//! `kind = "llama_simple"`, the reference's small Llama: RMSNorm, rotary positions, shared key heads, a SwiGLU MLP, a tied head, no
//! bias anywhere; and `kind = "llama_simple_mlp"`: the same with one matrix up, a tanh GELU and one matrix down.

use serde::Serialize;

use super::{Found, Input, Reads, read_heads};
use crate::{reader::Table, values::Size};

/// Sizes of a Llama.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Llama {
    /// Vocabulary size.
    pub vocab: usize,
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Query heads; divides `d_model` into heads of an even width.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_kv_head: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
}

impl Llama {
    /// What it reads.
    pub fn input(&self) -> Input {
        Input::Tokens {
            vocab: self.vocab,
            n_ctx: self.n_ctx,
        }
    }
}

/// The three matrices of its MLP hold as much as two of width `4 d_model`.
pub(super) fn read_gated(table: &mut Table<'_>) -> Found<Llama> {
    read(table, |d_model| d_model.saturating_mul(8) / 3)
}

pub(super) fn read_plain(table: &mut Table<'_>) -> Found<Llama> {
    read(table, |d_model| d_model.saturating_mul(4))
}

fn read(table: &mut Table<'_>, natural_width: impl Fn(usize) -> usize) -> Found<Llama> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = read_heads(table, d_model);
    let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
    let width = d_model.map_or(1, |d_model| natural_width(d_model).clamp(1, Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), width);
    if let (Some(d_model), Some(n_head)) = (d_model, n_head)
        && d_model % n_head == 0
        && d_model / n_head % 2 != 0
    {
        let message = format!(
            "expected heads of an even width, whose columns rotary positions turn in pairs, found d_model / n_head = {}",
            d_model / n_head
        );
        table.refuse::<()>("n_head", message);
    }
    if let (Some(n_head), Some(n_kv_head)) = (n_head, n_kv_head)
        && n_head % n_kv_head != 0
    {
        let message = format!("expected a divisor of n_head = {n_head}, found {n_kv_head}");
        table.refuse::<()>("n_kv_head", message);
    }
    let network = || {
        Some(Llama {
            vocab: vocab?,
            n_ctx: n_ctx?,
            d_model: d_model?,
            n_layer: n_layer?,
            n_head: n_head?,
            n_kv_head: n_kv_head?,
            d_mlp: d_mlp?,
        })
    };
    Found {
        reads: Reads::Tokens { n_ctx },
        network: network(),
    }
}
