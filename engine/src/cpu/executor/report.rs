//! Memory of a program beside the arena.

use super::super::bf16::{PANELS, Panel};
use super::Executor;
use super::prepared_op::PreparedOp;
use crate::precision::Precision;
use crate::store::Slot;

impl Executor {
    /// Most bytes that a thread holds beside the arena, for its packed parts of products.
    pub fn packed_bytes(&self) -> usize {
        let of_op = |op: &PreparedOp| match op.operands.precision {
            Precision::F32 | Precision::Tf32 => op
                .op
                .packed_bytes(&op.operands.types.iter().collect::<Vec<_>>()),
            Precision::Bf16 => PANELS,
        };
        self.ops.iter().map(of_op).max().unwrap_or(0)
    }

    /// For each bf16 product with a frozen right factor: the matrix, whether the product reads it
    /// transposed, and the bytes of its packed form outside the arena. The first replay packs it,
    /// once for all products and all programs that share the arena.
    pub fn packed_factors(&self) -> impl Iterator<Item = ((Slot, bool), usize)> {
        self.ops.iter().flat_map(|op| {
            op.operands.packed.iter().map(|factor| {
                let ty = &op.operands.types[factor.input];
                // The same for a matrix and its transpose.
                let bytes = Panel::bytes(ty.rows(), ty.columns());
                ((factor.slot, factor.transposed), bytes)
            })
        })
    }
}
