//! A batch in blocks: the same trajectory for every number of ranks.
//!
//! A program may compute one of `n` equal blocks of a batch ([`Builder::in_blocks`]). Its sums over
//! samples are then sums within its block, and [`Builder::all_reduce`] adds the blocks along one
//! fixed tree ([`tree`]):
//!
//! ```text
//! blocks      0   1   2   3
//!              \ /     \ /
//!               +       +        a rank has a whole subtree, or one block, or all of them
//!                \     /
//!                   +
//! ```
//!
//! A rank with one block replays the program as it is, and its all-reduces are joined with those of
//! the other [`Ranks`]. A rank with several has the program cut at its all-reduces ([`Stages`]):
//! each stage is replayed once for each block, and its sums are added along the same tree. The bits
//! are the same either way.
//!
//! A tensor of the store may be [sharded](crate::Store::sharded) with the batch: a program reads
//! and writes the rows of its block.

mod shared_memory;
mod sockets;
mod stages;
#[cfg(test)]
mod tests;
pub mod tree;

use std::fmt;
use std::time::Duration;

use crate::op::{Builder, Home, Node, Result, refuse};
use crate::ops::{AllReduce, PerBlock};
use crate::reduction::Reduction;
use crate::value::Value;

pub use shared_memory::SharedMemory;
pub use sockets::{Lost, Sockets};
pub use stages::Stages;

/// The ranks of a run, each with as many blocks, which replay the same programs and all-reduce
/// their sums.
///
/// All ranks start the same sums in the same order. The bits of a sum are those of [`tree::sum`]
/// over the parts of all ranks.
pub trait Ranks: fmt::Debug + Send + Sync {
    /// Announces a program with this many sums, of `elements` elements together.
    fn expect(&self, sums: usize, elements: usize);

    /// Makes room for all announced programs, before the first runs.
    ///
    /// # Errors
    ///
    /// When there is no memory for them.
    fn make_room(&self) -> Result<(), crate::Fault>;

    /// Gives this rank's part of a sum, and returns at once.
    fn start(&self, sum: Sum, part: &[f32]);

    /// Waits for a sum that was started.
    fn wait(&self, sum: Sum, whole: &mut [f32]);

    /// Whether all ranks go on. The first rank decides, and the others receive its answer; if
    /// another wants to stop, the first learns it by its next question. All of them ask the same
    /// questions in the same order, and none after an answer of no.
    fn agree(&self, goes_on: bool) -> bool;

    /// Broadcasts bytes of the first rank to all, 1024 at most; all of them ask for as many, in the
    /// same order as for sums and questions.
    fn broadcast(&self, bytes: &mut [u8]);

    /// Tells the others that this rank needs nothing more from them, so that its end is no loss to
    /// them.
    fn leave(&self) {}
}

/// A wait for another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// It has lasted for a while; the rank that is waited for.
    For(usize),
    /// It is over; the time by which the other came later than this rank. The time in which a
    /// waiting rank is itself stopped does not count.
    Over(Duration),
}

/// Called for each wait for another rank.
pub type Waits = Box<dyn Fn(Waiting) + Send + Sync>;

/// The part that the time of all-reduces counts towards: giving parts and waiting for sums.
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
    /// Makes the program compute one of this many blocks of a batch.
    pub fn in_blocks(&mut self, blocks: usize) {
        self.blocks = blocks;
    }

    /// Sets the order in which GPUs add up blocks.
    pub fn reduce(&mut self, reduction: Reduction) {
        self.reduction = reduction;
    }

    /// Number of blocks of the batch.
    pub fn blocks(&self) -> usize {
        self.blocks.max(1)
    }

    /// A value shared by all blocks, as seen by one block: its gradient is summed over all blocks.
    ///
    /// # Errors
    ///
    /// When it is not in f32.
    pub fn per_block(&mut self, value: Value) -> Result<Value> {
        if self.blocks() == 1 {
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
        if self.blocks() == 1 {
            return Ok(value);
        }
        if self.maker(value).is_none() {
            return refuse!("all_reduce", "{} is no result of an op", self.ty(value));
        }
        let sum = self.op1(AllReduce, &[value])?;
        self.all_reduced.insert(sum);
        if let Some(node) = self.maker(sum) {
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
        if self.blocks() == 1 {
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

    /// For each value, whether it differs between blocks.
    pub fn vary(&self, values: &[Value]) -> Vec<bool> {
        let varies = self.varies();
        values.iter().map(|value| varies[value.index()]).collect()
    }

    /// Whether a value is a tensor of the store that is sharded with the batch.
    fn is_sharded(&self, value: Value) -> bool {
        let home = self.homes[value.index()];
        matches!(home, Home::Persistent(slot) if self.sharded.contains(&slot))
    }

    /// Whether an op writes tensors that are sharded with the batch, and no others.
    fn writes_rows(&self, node: &Node) -> bool {
        let written = &node.inputs[node.op.writes(node.inputs.len())];
        !written.is_empty() && written.iter().all(|&value| self.is_sharded(value))
    }

    fn varies(&self) -> Vec<bool> {
        let homes = (0..).map(Value).zip(&self.homes);
        let of_rows =
            |(value, home): (Value, &Home)| *home == Home::Input || self.is_sharded(value);
        let mut varies: Vec<bool> = homes.map(of_rows).collect();
        for node in &self.nodes {
            let mut operands = node.inputs.iter().chain(node.into.iter().flatten());
            let of_rows = node.op.draws_rows() || operands.any(|value| varies[value.index()]);
            for output in &node.outputs {
                varies[output.index()] = of_rows && !self.all_reduced.contains(output);
            }
        }
        varies
    }

    /// Checks that the outputs of a program of blocks, and the tensors it writes, are the same for
    /// all of them, but for tensors that are sharded with the batch.
    ///
    /// # Errors
    ///
    /// One line with the name of an output or tensor that differs.
    pub fn check_blocks(&self) -> Result<()> {
        if self.blocks() == 1 {
            return Ok(());
        }
        let varies = self.varies();
        for (name, value) in &self.outputs {
            if varies[value.index()] {
                return refuse!("all_reduce", "the output `{name}` differs between blocks");
            }
        }
        for node in &self.nodes {
            let writes = !node.op.writes(node.inputs.len()).is_empty() && !self.writes_rows(node);
            if let Some(value) = node.inputs.iter().find(|value| varies[value.index()])
                && writes
            {
                return refuse!(
                    "all_reduce",
                    "{} reads {}, which differs between blocks",
                    node.op.name(),
                    self.ty(*value)
                );
            }
        }
        Ok(())
    }

    /// The all-reduces of the program, as operand and result.
    pub(crate) fn all_reduces(&self) -> impl Iterator<Item = (Value, Value)> {
        self.all_reduced.iter().map(|&sum| {
            let node = self.maker(sum).expect("results of ops");
            (self.nodes[node].inputs[0], sum)
        })
    }
}
