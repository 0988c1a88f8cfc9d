//! The ranks of a run. The first one holds the run's lock, rolls back, writes rows, figures and checkpoints, and decides whether to go
//! on; the others read, and do what it does.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::Context;
use spd_dataloader::Shard;
use spd_engine::{Ranks, SharedMemory};

use crate::fault::Fault;
use crate::heartbeat::Heartbeat;

/// The ranks of a run, and which of them this process is.
#[derive(Debug, Clone)]
pub struct World {
    rank: usize,
    size: usize,
    memory: Option<Arc<SharedMemory>>,
}

impl Default for World {
    fn default() -> Self {
        Self::planned(1)
    }
}

impl World {
    /// The world of rank `rank` of `size`, which share memory; `heartbeat` is told for whom this rank waits.
    ///
    /// # Errors
    ///
    /// When there is no memory to be shared.
    pub fn new(
        rank: usize,
        size: usize,
        file: OwnedFd,
        heartbeat: &Arc<Heartbeat>,
    ) -> Result<Self, Fault> {
        let heartbeat = Arc::clone(heartbeat);
        let waits = Box::new(move |waiting| heartbeat.waits(waiting));
        let memory = SharedMemory::open(file, rank, size, waits);
        let memory = memory.context("the memory that ranks share")?;
        Ok(Self {
            rank,
            size,
            memory: Some(Arc::new(memory)),
        })
    }

    /// The first of `size` ranks, to plan with.
    pub fn planned(size: usize) -> Self {
        Self {
            rank: 0,
            size,
            memory: None,
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this is the rank that writes.
    pub(crate) fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// This rank's part of a batch.
    pub(crate) fn shard(&self) -> Shard {
        let number = |n| u32::try_from(n).expect("few ranks");
        Shard {
            rank: number(self.rank),
            world: number(self.size),
        }
    }

    /// This rank's blocks of a batch that is cut into so many.
    pub(crate) fn blocks(&self, shards: usize) -> Range<usize> {
        let each = shards / self.size;
        self.rank * each..(self.rank + 1) * each
    }

    /// Where this rank meets the others, if there are any.
    pub(crate) fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        let memory = self.memory.as_ref()?;
        Some(Arc::clone(memory) as Arc<dyn Ranks>)
    }

    /// Whether all go on. The first rank asks `goes_on`; what others find in theirs is told to it, for the next time.
    pub(crate) fn agree(&self, goes_on: impl FnOnce() -> bool) -> bool {
        match &self.memory {
            Some(memory) => memory.agree(goes_on),
            None => goes_on(),
        }
    }

    /// Has the first rank do something, while the others wait. Whether all go on afterwards.
    ///
    /// # Errors
    ///
    /// What the first rank finds; it leaves then, and the others with it.
    pub(crate) fn first<E>(&self, work: impl FnOnce() -> Result<bool, E>) -> Result<bool, E> {
        let goes_on = if self.is_first() { work()? } else { true };
        Ok(self.agree(|| goes_on))
    }
}

/// Why a run in so many shards cannot be run by so many ranks, if so.
pub fn refuses_world(shards: usize, ranks: usize) -> Option<String> {
    let is_whole = shards.is_multiple_of(ranks);
    // A rank must have whole subtrees, so that sums have one order.
    if is_whole && (shards.is_power_of_two() || ranks == 1 || ranks == shards) {
        return None;
    }
    let may = (1..=shards).filter(|&ranks| {
        let is_whole = shards.is_multiple_of(ranks);
        is_whole && (shards.is_power_of_two() || ranks == 1 || ranks == shards)
    });
    let mut may: Vec<String> = may.map(|ranks| ranks.to_string()).collect();
    let most = may.pop()?;
    if may.is_empty() {
        return Some(format!(
            "its batches are one shard, for one rank; a run by {ranks} begins with train.shards = {ranks}, by --fresh or another --out"
        ));
    }
    Some(format!(
        "its batches are cut into {shards} shards, which {} or {most} ranks can share, and {ranks} cannot",
        may.join(", ")
    ))
}
