//! Batches ahead of time: threads, bounded channels, recycled buffers.
//!
//! Thread `t` of `n` fills every `n`-th batch, from the `t`-th on, into its own channel. The loader
//! takes batches from the channels in turn, so their order is fixed and no thread waits for
//! another.

use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use crate::reader::Reader;
use crate::{Batch, DataError, Feed, Source};

/// Depth and threads of prefetching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Batches that are ready ahead of time, 1 to 1024; rounded up to a multiple of `threads`.
    pub batches: usize,
    /// Threads that fill batches, 1 to 64. Their number changes no batch.
    pub threads: usize,
}

/// Fills batches in order on threads of its own.
///
/// If every batch is returned by [`Loader::recycle`] before the next is taken, `batches + threads +
/// 1` buffers circulate and nothing more is allocated. Dropping the loader ends its threads, after
/// at most the batches that they are filling.
#[derive(Debug)]
pub struct Loader {
    /// The channel of each thread.
    filled: Vec<Receiver<Result<Batch, DataError>>>,
    spent: Sender<Batch>,
    threads: Vec<JoinHandle<()>>,
    /// The thread of the next batch; `None` after an error.
    next: Option<usize>,
}

impl Loader {
    /// Starts filling the batches at `position`, `position + feed.rows`, and so on.
    ///
    /// # Errors
    ///
    /// When the feed or `ahead` is invalid, or no thread can be started. Errors of the data come
    /// from [`Loader::next`].
    pub fn spawn(
        source: Source,
        feed: Feed,
        position: u64,
        ahead: Ahead,
    ) -> Result<Self, DataError> {
        feed.own_rows()?;
        let Ahead { batches, threads } = ahead;
        if !(1..=MOST_BATCHES).contains(&batches) {
            return Err(DataError::Request(format!(
                "a prefetch depth of {batches} was asked for, must be 1 to {MOST_BATCHES}"
            )));
        }
        if !(1..=MOST_THREADS).contains(&threads) {
            return Err(DataError::Request(format!(
                "{threads} prefetch threads were asked for, must be 1 to {MOST_THREADS}"
            )));
        }
        let depth = batches.div_ceil(threads);
        let (spent, spent_out) = crossbeam_channel::bounded((depth + 1) * threads + 1);
        let mut loader = Self {
            filled: Vec::new(),
            spent,
            threads: Vec::new(),
            next: Some(0),
        };
        for thread in 0..threads {
            let (filled_in, filled) = crossbeam_channel::bounded(depth);
            let (source, spent) = (source.clone(), spent_out.clone());
            let every = (thread as u64, threads as u64);
            let spawned = thread::Builder::new()
                .name("data".to_owned())
                .spawn(move || fill_ahead((&source, feed), position, every, &filled_in, &spent))
                .map_err(DataError::Thread)?;
            loader.filled.push(filled);
            loader.threads.push(spawned);
        }
        Ok(loader)
    }

    /// The next batch; waits until it is ready.
    ///
    /// # Errors
    ///
    /// As [`Source::fill`]. After an error every call returns [`DataError::Stopped`].
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator has no error that ends it"
    )]
    pub fn next(&mut self) -> Result<Batch, DataError> {
        let turn = self.next.take().ok_or(DataError::Stopped)?;
        let batch = self.filled[turn]
            .recv()
            .unwrap_or(Err(DataError::Stopped))?;
        self.next = Some((turn + 1) % self.filled.len());
        Ok(batch)
    }

    /// Returns the memory of a batch, to be filled again.
    pub fn recycle(&mut self, batch: Batch) {
        // If the threads have ended, or the channel is full, the memory is freed here.
        drop(self.spent.try_send(batch));
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver the next send of a thread fails, also a send that is waiting now.
        self.filled.clear();
        for thread in self.threads.drain(..) {
            // A panic of a thread has printed itself, and `next` has returned `Stopped`.
            drop(thread.join());
        }
    }
}

/// More would only hold memory. The limit also keeps the allocation of the channels small.
const MOST_BATCHES: usize = 1024;
const MOST_THREADS: usize = 64;
/// Batches of a thread that are requested from the kernel before they are filled, so that as many
/// reads wait for the disk side by side.
const ASKED_AHEAD: u64 = 4;

/// Fills every `threads`-th batch, from the `first`-th on.
fn fill_ahead(
    (source, feed): (&Source, Feed),
    position: u64,
    (first, threads): (u64, u64),
    filled: &Sender<Result<Batch, DataError>>,
    spent: &Receiver<Batch>,
) {
    let (stride, mut reader) = match Reader::new(source, feed) {
        Ok(reader) => (feed.rows as u64 * threads, reader),
        Err(error) => return drop(filled.send(Err(error))),
    };
    // At the end of 64 bits `fill` returns an error.
    let mut position = position.saturating_add(feed.rows as u64 * first);
    let ahead = |position: u64, batches: u64| position.saturating_add(stride * batches);
    for number in 1..ASKED_AHEAD {
        reader.will_need(ahead(position, number));
    }
    loop {
        reader.will_need(ahead(position, ASKED_AHEAD));
        let mut batch = spent.try_recv().unwrap_or_default();
        let result = reader.fill(position, &mut batch).map(|()| batch);
        let failed = result.is_err();
        if filled.send(result).is_err() || failed {
            return;
        }
        position = ahead(position, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Features, Shard};
    use std::time::{Duration, Instant};

    const FEED: Feed = Feed {
        seed: 3,
        rows: 4,
        shard: Shard::ALONE,
    };

    fn source() -> Source {
        Source::Features(Features::new(6, 0.5, 0.0, 1.0).unwrap())
    }

    fn ahead(batches: usize, threads: usize) -> Ahead {
        Ahead { batches, threads }
    }

    #[test]
    fn batches_come_in_order_whatever_the_depth_and_the_threads() {
        for (depth, threads) in [(1, 1), (2, 1), (4, 1), (1, 2), (3, 2), (5, 8), (64, 8)] {
            let mut loader = Loader::spawn(source(), FEED, 100, ahead(depth, threads)).unwrap();
            let mut expected = Batch::default();
            for number in 0..20 {
                source()
                    .fill(&FEED, 100 + 4 * number, &mut expected)
                    .unwrap();
                let batch = loader.next().unwrap();
                assert_eq!(batch, expected, "depth {depth}, {threads} threads");
                loader.recycle(batch);
            }
        }
    }

    #[test]
    fn number_of_buffers_is_bounded() {
        for (depth, threads) in [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 4)] {
            let mut loader = Loader::spawn(source(), FEED, 0, ahead(depth, threads)).unwrap();
            let mut new = 0;
            for _ in 0..300 {
                let mut batch = loader.next().unwrap();
                // Addresses would not do: the allocator gives freed memory again.
                new += usize::from(batch.features.capacity() == 24);
                batch.features.reserve_exact(1000);
                loader.recycle(batch);
            }
            assert!(
                new <= depth + threads + 1,
                "depth {depth}, {threads} threads: {new} buffers"
            );
        }
    }

    #[test]
    fn a_dropped_loader_ends_its_threads() {
        for (taken, threads) in [(0, 1), (3, 1), (0, 8), (3, 8)] {
            let mut loader = Loader::spawn(source(), FEED, 0, ahead(2, threads)).unwrap();
            for _ in 0..taken {
                loader.next().unwrap();
            }
            let start = Instant::now();
            drop(loader);
            assert!(
                start.elapsed() < Duration::from_secs(2),
                "drop waits for the threads to end"
            );
        }
    }

    #[test]
    fn error_is_returned_once_in_order_then_the_loader_has_stopped() {
        for threads in 1..=3 {
            let mut loader =
                Loader::spawn(source(), FEED, u64::MAX - 8, ahead(1, threads)).unwrap();
            loader.next().unwrap();
            loader.next().unwrap();
            assert!(matches!(loader.next(), Err(DataError::Request(_))));
            assert_eq!(
                loader.next().unwrap_err().to_string(),
                "the data loader has stopped, after an error it has reported; start another one"
            );
        }
    }

    #[test]
    fn a_depth_of_nothing_is_refused() {
        let refusal = |ahead| {
            let refused = Loader::spawn(source(), FEED, 0, ahead);
            refused.unwrap_err().to_string()
        };
        assert_eq!(
            refusal(ahead(0, 1)),
            "a prefetch depth of 0 was asked for, must be 1 to 1024"
        );
        assert_eq!(
            refusal(ahead(4, 0)),
            "0 prefetch threads were asked for, must be 1 to 64"
        );
    }
}
