//! Time of a program by op and by part, and its memory beside the arena.

use std::time::Duration;

use super::super::bf16::{PANELS, Panel};
use super::Executor;
use super::prepared_op::PreparedOp;
use crate::precision::Precision;
use crate::profile::OpProfile;
use crate::store::Slot;

impl Executor {
    /// Starts (or restarts) the clock of every op.
    pub fn start_profile(&mut self) {
        self.profile = Some(vec![Duration::ZERO; self.ops.len()]);
    }

    /// Stops the clock of the ops, and returns the time of each [part](crate::Builder::part) of the
    /// program since [`Executor::start_profile`], in the order in which they first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, Duration)> {
        let mut parts: Vec<(&'static str, Duration)> = Vec::new();
        let times = self.profile.take().unwrap_or_default();
        for (op, time) in self.ops.iter().zip(times) {
            match parts.iter_mut().find(|(part, _)| *part == op.part) {
                Some((_, sum)) => *sum += time,
                None => parts.push((op.part, time)),
            }
        }
        parts
    }

    /// Most bytes that a thread holds beside the arena, for its packed parts of products.
    pub fn packed_bytes(&self) -> usize {
        let of_op = |op: &PreparedOp| match op.precision {
            Precision::F32 | Precision::Tf32 => {
                op.op.packed_bytes(&op.types.iter().collect::<Vec<_>>())
            }
            Precision::Bf16 => PANELS,
        };
        self.ops.iter().map(of_op).max().unwrap_or(0)
    }

    /// For each bf16 product with a frozen right factor: the matrix, whether the product reads it
    /// transposed, and the bytes of its packed form outside the arena. The first replay packs it,
    /// once for all products and all programs that share the arena.
    pub fn packed_factors(&self) -> impl Iterator<Item = ((Slot, bool), usize)> {
        self.ops.iter().flat_map(|op| {
            op.packed.iter().map(|factor| {
                let ty = &op.types[factor.input];
                // The same for a matrix and its transpose.
                let bytes = Panel::bytes(ty.rows(), ty.columns());
                ((factor.slot, factor.transposed), bytes)
            })
        })
    }

    /// Time and work of each op since [`Executor::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        let times = self.profile.clone().unwrap_or_default();
        self.ops
            .iter()
            .zip(times)
            .map(|(op, time)| OpProfile {
                time,
                ..op.work.clone()
            })
            .collect()
    }
}
