//! Attention of bf16 heads on tensor cores, of up to [`WIDEST`] columns; `kernel.cu` has the
//! kernels. A program takes them where queries, keys, values and, backward, the gradient of `y` are
//! bf16.
//!
//! The forward kernel reads keys and values once for each tile of 128 queries, and keeps scores,
//! weights and sums in registers. Backward computes the weights again, `p = 2^(s log2(e) - lse
//! log2(e))`, in two kernels that need no atomics: one has a tile of keys and adds up over queries,
//! one has a tile of queries and adds up over keys. Both together compute seven products, of the
//! five that are needed.
//!
//! # Precision
//!
//! All sums are f32. Scores and `dp` are sums of exact products of bf16 numbers. Weights `p` and
//! slopes `ds` are rounded to bf16 before the products that add them up, and so are queries and
//! keys after a rotation. A rounding is at most half of the last bit: `e = 2^-9` of a number, and
//! `e / sqrt(3)` in the root mean square. So, with `<x>` for the sum of magnitudes:
//!
//! ```text
//! |error of y|  <= e <p v>               |error of dv| <= e <p g>
//! |error of dq| <= scale e <ds k>        |error of dk| <= scale e <ds q>
//! ```
//!
//! With independent roundings, errors are some `e / sqrt(3 n)` of `n` terms of one size. Storage of
//! a result in bf16 adds `e` of it. A rotation changes a score by at most `2 e scale <q k>`, which
//! changes the weight by that share of itself, and `lse` by no more than the largest change of a
//! score.

use super::Attention;
use crate::cuda::lowering::Lowering;
use crate::value::DType;

/// f32s of shared memory for a bf16 tile: rows are padded by 16 bytes.
const fn room(lines: usize, columns: usize) -> usize {
    lines * (columns + 8) / 2
}

/// Most columns of a head.
const WIDEST: usize = 128;

/// Threads of a block.
pub(super) const THREADS: usize = 128;

/// Rows of a tile that passes by in the gradients.
const PASSING: usize = 32;

/// A launch: rows of a block, its threads, and f32s of shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks {
    pub(super) rows: usize,
    pub(super) threads: usize,
    pub(super) shared: usize,
}

/// The tiles of heads of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    /// Columns of a tile.
    width: usize,
}

impl Tiles {
    /// The tiles of an attention, if tensor cores can compute it: the operands that hold `q`, `k`
    /// and `v`, and the further one, are bf16.
    pub(super) fn of(op: &Attention, to: &Lowering<'_>, further: Option<usize>) -> Option<Self> {
        let sizes = op.sizes(&[to.ty(0)]);
        let size = sizes.size;
        let mut operands = op.indices().into_iter().chain(further);
        let scale = op.scale(size);
        let fits = operands.all(|index| to.ty(index).dtype == DType::Bf16)
            && size <= WIDEST
            // The largest score has the largest exponent.
            && scale.is_normal()
            && scale > 0.0
            && i32::try_from(sizes.batch * sizes.positions).is_ok();
        fits.then(|| Self {
            width: size.next_multiple_of(16),
        })
    }

    /// Blocks of so many rows, with `own` tiles of them, and tiles of which two pairs pass by.
    fn blocks(self, rows: usize, own: usize, passing: usize) -> Blocks {
        Blocks {
            rows,
            threads: THREADS,
            shared: own * room(rows, self.width) + 4 * room(passing, self.width),
        }
    }

    /// Blocks of queries.
    pub(super) fn forward(self) -> Blocks {
        self.blocks(128, 1, if self.width <= 96 { 64 } else { 48 })
    }

    /// Blocks of queries for their gradient.
    pub(super) fn of_queries(self) -> Blocks {
        self.blocks(if self.width <= 64 { 128 } else { 64 }, 2, PASSING)
    }

    /// Blocks of keys for the gradients of keys and values, with two numbers of each query that
    /// passes by.
    pub(super) fn of_keys(self) -> Blocks {
        let blocks = self.of_queries();
        Blocks {
            shared: blocks.shared + 2 * 2 * PASSING,
            ..blocks
        }
    }
}

#[cfg(test)]
mod tests;
