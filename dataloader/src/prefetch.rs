//! Batches ahead of time: a thread, a bounded channel, recycled buffers.

use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use crate::{Batch, DataError, Feed, Source};

/// Fills batches on a thread of its own, in order, up to a depth ahead.
///
/// With every batch given back by [`Loader::recycle`] before the next is taken, `depth + 2` buffers
/// circulate and nothing is allocated after they exist. Dropping the loader ends its thread, after at
/// most the batch it is filling.
#[derive(Debug)]
pub struct Loader {
    filled: Receiver<Result<Batch, DataError>>,
    spent: Sender<Batch>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Starts filling the batches at `position`, `position + feed.rows`, and so on.
    ///
    /// - `depth`: batches ready before they are asked for, at least 1
    ///
    /// # Errors
    ///
    /// When the feed makes no sense, `depth` is 0, or no thread can be started. What is wrong with the
    /// data is said by [`Loader::next`].
    pub fn spawn(
        source: Source,
        feed: Feed,
        position: u64,
        depth: usize,
    ) -> Result<Self, DataError> {
        feed.own_rows()?;
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(DataError::Request(format!(
                "a prefetch depth of {depth} was asked for, must be 1 to {MAX_DEPTH}"
            )));
        }
        let (filled_in, filled) = crossbeam_channel::bounded(depth);
        let (spent, spent_out) = crossbeam_channel::bounded(depth + 2);
        let thread = thread::Builder::new()
            .name("data".to_owned())
            .spawn(move || fill_ahead(&source, &feed, position, &filled_in, &spent_out))
            .map_err(DataError::Thread)?;
        Ok(Self {
            filled,
            spent,
            thread: Some(thread),
        })
    }

    /// The next batch; waits for it when it is not ready.
    ///
    /// # Errors
    ///
    /// What [`Source::fill`] says; there is no batch after an error, only [`DataError::Stopped`].
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator has no error that ends it"
    )]
    pub fn next(&mut self) -> Result<Batch, DataError> {
        self.filled.recv().unwrap_or(Err(DataError::Stopped))
    }

    /// Gives the memory of a batch back, to be filled again.
    pub fn recycle(&mut self, batch: Batch) {
        // When the thread has ended, or more come back than went out, the memory is freed here.
        drop(self.spent.try_send(batch));
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver the thread's next send fails, also one that is waiting now.
        self.filled = crossbeam_channel::never();
        if let Some(thread) = self.thread.take() {
            // A panic there has printed itself, and `next` has said that the loader stopped.
            drop(thread.join());
        }
    }
}

/// More would only hold memory; it also keeps the channel's own allocation small.
const MAX_DEPTH: usize = 1024;

fn fill_ahead(
    source: &Source,
    feed: &Feed,
    mut position: u64,
    filled: &Sender<Result<Batch, DataError>>,
    spent: &Receiver<Batch>,
) {
    loop {
        let mut batch = spent.try_recv().unwrap_or_default();
        let result = source.fill(feed, position, &mut batch).map(|()| batch);
        let failed = result.is_err();
        if filled.send(result).is_err() || failed {
            return;
        }
        // `fill` has refused positions at which this would overflow.
        position += feed.rows as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shard;
    use std::collections::BTreeSet;
    use std::time::{Duration, Instant};

    const FEED: Feed = Feed {
        seed: 3,
        rows: 4,
        shard: Shard::ALONE,
    };

    fn source() -> Source {
        Source::features(6, 0.5, 0.0, 1.0).unwrap()
    }

    #[test]
    fn batches_come_in_order_whatever_the_depth() {
        for depth in 1..=4 {
            let mut loader = Loader::spawn(source(), FEED, 100, depth).unwrap();
            let mut expected = Batch::default();
            for number in 0..20 {
                source()
                    .fill(&FEED, 100 + 4 * number, &mut expected)
                    .unwrap();
                let batch = loader.next().unwrap();
                assert_eq!(batch, expected, "depth {depth}");
                loader.recycle(batch);
            }
        }
    }

    #[test]
    fn recycled_buffers_are_all_there_is() {
        for depth in 1..=4 {
            let mut loader = Loader::spawn(source(), FEED, 0, depth).unwrap();
            let mut buffers = BTreeSet::new();
            for _ in 0..300 {
                let batch = loader.next().unwrap();
                buffers.insert(batch.features.as_ptr() as usize);
                assert_eq!(batch.features.capacity(), 24);
                loader.recycle(batch);
            }
            assert!(
                buffers.len() <= depth + 2,
                "depth {depth}: {} buffers",
                buffers.len()
            );
        }
    }

    #[test]
    fn a_dropped_loader_ends_its_thread() {
        for taken in [0, 3] {
            let mut loader = Loader::spawn(source(), FEED, 0, 2).unwrap();
            for _ in 0..taken {
                loader.next().unwrap();
            }
            let start = Instant::now();
            drop(loader);
            assert!(
                start.elapsed() < Duration::from_secs(2),
                "drop waits for the thread to end"
            );
        }
    }

    #[test]
    fn an_error_is_said_once_and_then_the_loader_has_stopped() {
        let mut loader = Loader::spawn(source(), FEED, u64::MAX - 4, 1).unwrap();
        loader.next().unwrap();
        assert!(matches!(loader.next(), Err(DataError::Request(_))));
        assert_eq!(
            loader.next().unwrap_err().to_string(),
            "the data loader has stopped, after an error it has reported; start another one"
        );
    }

    #[test]
    fn a_depth_of_nothing_is_refused() {
        assert_eq!(
            Loader::spawn(source(), FEED, 0, 0).unwrap_err().to_string(),
            "a prefetch depth of 0 was asked for, must be 1 to 1024"
        );
    }
}
