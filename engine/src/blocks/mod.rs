//! A batch in blocks: one trajectory, whatever the number of ranks.
//!
//! A program may be one of `n` equal blocks of a batch ([`Builder::in_blocks`]). What it sums over samples is then a sum within its block,
//! and [`Builder::all_reduce`] adds the blocks along one fixed tree ([`tree`]):
//!
//! ```text
//! blocks      0   1   2   3
//!              \ /     \ /
//!               +       +        rank 0 has a whole subtree, or one block, or all of them
//!                \     /
//!                   +
//! ```
//!
//! A rank that has one block replays the program as it is, and its all-reduces meet those of the other [`Ranks`]. A rank that has
//! several has the program cut at its all-reduces ([`Stages`]): each stage is replayed once a block, and what it sums is added along
//! the same tree. The bits are the same either way.

mod shared_memory;
mod sockets;
mod stages;
#[cfg(test)]
mod tests;
pub mod tree;

use std::fmt;
use std::time::Duration;

use crate::graph::{Graph, Home};
use crate::op::{BuildError, Builder, Result};
use crate::ops::{AllReduce, PerBlock};
use crate::reduction::Reduction;
use crate::value::Value;

pub use shared_memory::SharedMemory;
pub use sockets::{Lost, Sockets};
pub use stages::Stages;

/// The ranks of a run, each with as many blocks, which replay the same programs: where their sums meet.
///
/// All ranks start the same sums in the same order. The bits of a sum are those of [`tree::sum`] over the parts of all ranks.
pub trait Ranks: fmt::Debug + Send + Sync {
    /// Tells of a program with so many sums, of `elements` elements together.
    fn expect(&self, sums: usize, elements: usize);

    /// Makes room for all programs that were told of, before the first is run.
    ///
    /// # Errors
    ///
    /// When there is no memory for them.
    fn make_room(&self) -> std::result::Result<(), crate::Fault>;

    /// Gives this rank's part of a sum; others may add theirs while this rank goes on.
    fn start(&self, sum: Sum, part: &[f32]);

    /// Waits for a sum that was started.
    fn wait(&self, sum: Sum, whole: &mut [f32]);

    /// Whether all ranks go on. The first one says so, and the others hear it; that another does not want to is told to the first, for
    /// its next question. All of them ask the same questions in the same order, and none once they do not go on.
    fn agree(&self, goes_on: bool) -> bool;

    /// Gives bytes of the first rank to all, 1024 at most; all of them ask for as many, in the same order as for whatever else.
    fn broadcast(&self, bytes: &mut [u8]);

    /// Tells the others that this rank needs nothing more of them: its end is none of theirs.
    fn leave(&self) {}
}

/// A wait for another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// It has lasted for a while, for this rank.
    For(usize),
    /// It is over, and the other came so long after this rank: a rank that is stopped while it waits is not waited for.
    Over(Duration),
}

/// Told of each wait for another rank.
pub type Waits = Box<dyn Fn(Waiting) + Send + Sync>;

/// What the time of all-reduces counts as: what it takes to give a part, and to wait for the sum.
pub const ALL_REDUCE: &str = "all_reduce";

/// A sum of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Its number among those of the program.
    pub number: usize,
    /// Elements of the sums before it.
    pub offset: usize,
}

impl Builder {
    /// Lets the program be one of so many blocks of a batch.
    pub fn in_blocks(&mut self, blocks: usize) {
        self.blocks = blocks;
    }

    /// Has GPUs add up blocks in this order.
    pub fn reduce(&mut self, reduction: Reduction) {
        self.reduction = reduction;
    }

    /// In how many blocks the batch is.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A value that is the same for all blocks, for what a block computes of it: its gradient is summed over all blocks.
    ///
    /// # Errors
    ///
    /// When it is not in f32.
    pub fn per_block(&mut self, value: Value) -> Result<Value> {
        if self.blocks == 1 {
            return Ok(value);
        }
        let view = self.op1(PerBlock, &[value])?;
        let home = self.homes[value.index()];
        if matches!(home, Home::Persistent(_)) {
            // The same memory: nothing is computed.
            self.homes[view.index()] = home;
        }
        Ok(view)
    }

    /// The sum of a value over all blocks. The gradient flows to each block.
    ///
    /// # Errors
    ///
    /// When it is not a result in f32.
    pub fn all_reduce(&mut self, value: Value) -> Result<Value> {
        if self.blocks == 1 {
            return Ok(value);
        }
        if !matches!(self.homes[value.index()], Home::Node(_)) {
            let reason = format!("{} is no result of an op", self.ty(value));
            return Err(BuildError::new("all_reduce", reason));
        }
        let sum = self.op1(AllReduce, &[value])?;
        self.all_reduced.insert(sum);
        if let Home::Node(node) = self.homes[sum.index()] {
            self.nodes[node].part = ALL_REDUCE;
        }
        Ok(sum)
    }

    /// Sums of scalars over all blocks, by one all-reduce.
    ///
    /// # Errors
    ///
    /// When one is no scalar.
    pub fn all_reduce_scalars(&mut self, scalars: &[Value]) -> Result<Vec<Value>> {
        if self.blocks == 1 {
            return Ok(scalars.to_vec());
        }
        let rows = scalars.iter().map(|&scalar| self.reshape(scalar, &[1]));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let joined = self.concatenate(&rows)?;
        let sum = self.all_reduce(joined)?;
        let at = |at| {
            let element = self.slice(sum, at..at + 1)?;
            self.reshape(element, &[])
        };
        (0..scalars.len()).map(at).collect()
    }

    /// Of some values whether each differs from block to block.
    pub fn vary(&self, values: &[Value]) -> Vec<bool> {
        let varies = self.varies();
        values.iter().map(|value| varies[value.index()]).collect()
    }

    fn varies(&self) -> Vec<bool> {
        let mut varies: Vec<bool> = self.homes.iter().map(|home| *home == Home::Input).collect();
        for node in &self.nodes {
            let mut operands = node.inputs.iter().chain(node.into.iter().flatten());
            let of_rows = node.op.draws_rows() || operands.any(|value| varies[value.index()]);
            for output in &node.outputs {
                varies[output.index()] = of_rows && !self.all_reduced.contains(output);
            }
        }
        varies
    }

    /// Checks that what a program of blocks gives, and what it writes, is the same for all of them.
    ///
    /// # Errors
    ///
    /// One line that names what is not.
    pub fn check_blocks(&self) -> Result<()> {
        if self.blocks == 1 {
            return Ok(());
        }
        let varies = self.varies();
        for (name, value) in &self.outputs {
            if varies[value.index()] {
                let reason = format!("the output `{name}` differs from block to block");
                return Err(BuildError::new("all_reduce", reason));
            }
        }
        for node in &self.nodes {
            let writes = !node.op.writes(node.inputs.len()).is_empty();
            if let Some(value) = node.inputs.iter().find(|value| varies[value.index()])
                && writes
            {
                let reason = format!(
                    "{} reads {}, which differs from block to block",
                    node.op.name(),
                    self.ty(*value)
                );
                return Err(BuildError::new("all_reduce", reason));
            }
        }
        Ok(())
    }
}

impl<P> Graph<P> {
    /// The all-reduces of the program: what each reads, and makes.
    pub(crate) fn all_reduces(&self) -> impl Iterator<Item = (Value, Value)> {
        self.all_reduced
            .iter()
            .map(|&sum| match self.homes[sum.index()] {
                Home::Node(node) => (self.nodes[node].inputs[0], sum),
                Home::Persistent(_) | Home::Input => unreachable!("results of ops"),
            })
    }
}
