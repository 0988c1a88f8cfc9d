//! The ranks of a run. The first one holds the run's lock, rolls back, writes rows, figures and
//! checkpoints, and decides whether to go on; the others read, and do what it does.

use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::Context;
use spd_dataloader::Shard;
use spd_engine::blocks::{Lost, Sum, Waits};
use spd_engine::cuda::{Device, libraries};
use spd_engine::{Ranks, SharedMemory, Sockets};

use crate::fault::{Fault, Interrupt};
use crate::heartbeat::Heartbeat;

/// The ranks of a run, and which of them this process is.
#[derive(Debug, Clone)]
pub struct World {
    rank: usize,
    size: usize,
    /// Whether they are on one machine, and share memory.
    is_near: bool,
    ranks: Option<Arc<dyn Ranks>>,
}

impl Default for World {
    fn default() -> Self {
        Self::planned(1, 1)
    }
}

impl World {
    /// The world of rank `rank` of `size`, which share memory; `heartbeat` is told for whom this
    /// rank waits.
    ///
    /// # Errors
    ///
    /// When there is no memory to be shared.
    pub fn in_memory(
        rank: usize,
        size: usize,
        file: OwnedFd,
        heartbeat: &Arc<Heartbeat>,
    ) -> Result<Self, Fault> {
        let memory = SharedMemory::open(file, rank, size, waits(heartbeat));
        let memory = memory.context("the memory that ranks share")?;
        Ok(Self {
            rank,
            size,
            is_near: true,
            ranks: Some(Arc::new(memory)),
        })
    }

    /// The world of rank `rank`, which has a connection with each of the others; `lost` is called
    /// for a lost rank.
    ///
    /// # Errors
    ///
    /// When there is no thread for them.
    pub fn over_connections(
        rank: usize,
        connections: Vec<Option<TcpStream>>,
        heartbeat: &Arc<Heartbeat>,
        lost: Lost,
    ) -> Result<Self, Fault> {
        let size = connections.len();
        let sockets = Sockets::new(rank, connections, waits(heartbeat), lost);
        let sockets = sockets.context("the connections with other ranks")?;
        Ok(Self {
            rank,
            size,
            is_near: false,
            ranks: Some(Arc::new(sockets)),
        })
    }

    /// The first of `size` ranks of as many nodes, to plan with.
    pub fn planned(size: usize, nodes: usize) -> Self {
        Self {
            rank: 0,
            size,
            is_near: nodes == 1,
            ranks: None,
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

    /// The connection with other ranks, if there are any.
    pub(crate) fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        self.ranks.clone()
    }

    /// Announces sums of so many elements by [`sum`](Self::sum).
    pub(crate) fn expect(&self, elements: usize) {
        if let Some(ranks) = self.ranks.as_ref().filter(|_| elements > 0) {
            ranks.expect(1, elements);
        }
    }

    /// Adds up values over all ranks.
    pub(crate) fn sum(&self, values: &mut [f32]) {
        if let Some(ranks) = &self.ranks {
            let all = Sum {
                number: 0,
                offset: 0,
            };
            ranks.start(all, values);
            ranks.wait(all, values);
        }
    }

    /// Bytes that a rank needs for its sums with others, of programs with so many elements of them.
    pub(crate) fn bytes_of_sums(&self, elements: usize) -> usize {
        match (self.size, self.is_near) {
            (1, _) => 0,
            (size, true) => SharedMemory::bytes(size, elements) / size,
            (_, false) => Sockets::bytes(elements),
        }
    }

    /// Has a GPU of this rank join those of the others, if there are any.
    ///
    /// # Errors
    ///
    /// When NCCL is missing or refuses, or not all of them come.
    pub(crate) fn join(&self, device: &Device, heartbeat: &Heartbeat) -> Result<(), Fault> {
        let Some(ranks) = self.ranks() else {
            return Ok(());
        };
        heartbeat.enter("joining");
        Ok(device.join(&*ranks, self.rank, self.size)?)
    }

    /// Stops all ranks where the first does not go on. The wish of another is told to the first,
    /// for the next time.
    pub(crate) fn agree(&self, goes_on: bool) -> Result<(), Interrupt> {
        let ranks = self.ranks.as_ref();
        Interrupt::when(!ranks.map_or(goes_on, |ranks| ranks.agree(goes_on)))
    }

    /// Tells the others that this rank is done: its end is none of theirs.
    pub fn leave(&self) {
        self.ranks.iter().for_each(|ranks| ranks.leave());
    }

    /// Has the first rank do something, while the others wait.
    ///
    /// # Errors
    ///
    /// A fault of the first rank, at which all leave; a stop of all where it was stopped.
    pub(crate) fn first(
        &self,
        work: impl FnOnce() -> Result<(), Interrupt>,
    ) -> Result<(), Interrupt> {
        self.told(if self.is_first() { work() } else { Ok(()) })
    }

    /// Has the first rank do something before the others do it.
    ///
    /// # Errors
    ///
    /// A fault of any rank, at which all leave; a stop of all where the first was stopped.
    pub(crate) fn in_turn<T>(
        &self,
        work: impl FnOnce() -> Result<T, Interrupt>,
    ) -> Result<T, Interrupt> {
        if self.is_first() {
            return self.told(work());
        }
        self.agree(true)?;
        work()
    }

    /// Tells the others how the first rank's work ended, unless in a fault, with which it leaves.
    fn told<T>(&self, ended: Result<T, Interrupt>) -> Result<T, Interrupt> {
        if !matches!(ended, Err(Interrupt::Fault(_))) {
            self.agree(ended.is_ok())?;
        }
        ended
    }
}

/// Tells a heartbeat for whom its rank waits.
fn waits(heartbeat: &Arc<Heartbeat>) -> Waits {
    let heartbeat = Arc::clone(heartbeat);
    Box::new(move |waiting| heartbeat.waits(waiting))
}

/// The processors of this node's ranks, each of which has one of its first `gpus` GPUs, or none:
/// ranks that are computed by something else round differently.
pub fn computed_by(gpus: usize) -> String {
    if gpus == 0 {
        return spd_engine::instructions();
    }
    let found = libraries::gpus().unwrap_or_default().into_iter();
    let mut names: Vec<String> = found.take(gpus).map(|gpu| gpu.name).collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return "emulated GPUs".to_owned();
    }
    names.join(" and ")
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_first_rank_is_done_before_the_others_begin() {
        let file = SharedMemory::file().unwrap();
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            for rank in 0..3 {
                let (file, done) = (file.try_clone().unwrap(), &done);
                scope.spawn(move || {
                    let world = World::in_memory(rank, 3, file, &Arc::default()).unwrap();
                    let work = || {
                        if rank == 0 {
                            thread::sleep(Duration::from_millis(50));
                        }
                        Ok(done.fetch_add(1, Ordering::SeqCst))
                    };
                    let before = world.in_turn(work).unwrap();
                    assert_eq!(before == 0, rank == 0);
                });
            }
        });
    }
}
