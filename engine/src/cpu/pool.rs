//! Work in chunks whose borders depend only on shapes, so that 1 and 64 threads compute the same
//! bits.
//!
//! A kernel gives its rows, the rows of a chunk, and its outputs: [`Rows`] are cut with the rows,
//! [`PerChunk`] gives each chunk a place for partial sums, to be added up in order afterwards.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder, Yield};

/// The operating system refuses to start this many threads.
#[derive(Debug, thiserror::Error)]
#[error("{asked} threads were asked for, and could not all be started ({source}); try fewer")]
pub struct TooManyThreads {
    asked: usize,
    source: io::Error,
}

/// Threads of an executor.
#[derive(Debug)]
pub struct Pool {
    threads: Option<ThreadPool>,
    count: usize,
}

/// How long a thread looks for chunks and finds none: longer than one thread alone computes at a
/// time in a step of a small network.
const PATIENCE: Duration = Duration::from_millis(2);

/// A kernel output that can be cut between chunks.
pub(crate) trait Parts: Send + Sized {
    /// The part of the first `chunks` chunks, which hold `rows` rows, and the rest.
    fn split(self, chunks: usize, rows: usize) -> (Self, Self);
}

/// A matrix that is written row by row, with its number of columns.
pub(crate) struct Rows<'a, T = f32>(pub(crate) &'a mut [T], pub(crate) usize);

/// A slice of so many elements for each chunk.
pub(crate) struct PerChunk<'a>(pub(crate) &'a mut [f32], pub(crate) usize);

impl<T: Send> Parts for Rows<'_, T> {
    fn split(self, _chunks: usize, rows: usize) -> (Self, Self) {
        let (left, right) = self.0.split_at_mut(rows * self.1);
        (Self(left, self.1), Self(right, self.1))
    }
}

impl Parts for PerChunk<'_> {
    fn split(self, chunks: usize, _rows: usize) -> (Self, Self) {
        let (left, right) = self.0.split_at_mut(chunks * self.1);
        (Self(left, self.1), Self(right, self.1))
    }
}

impl<P: Parts> Parts for Option<P> {
    fn split(self, chunks: usize, rows: usize) -> (Self, Self) {
        match self {
            Some(parts) => {
                let (left, right) = parts.split(chunks, rows);
                (Some(left), Some(right))
            }
            None => (None, None),
        }
    }
}

impl<A: Parts, B: Parts> Parts for (A, B) {
    fn split(self, chunks: usize, rows: usize) -> (Self, Self) {
        let (a, c) = self.0.split(chunks, rows);
        let (b, d) = self.1.split(chunks, rows);
        ((a, b), (c, d))
    }
}

impl<A: Parts, B: Parts, C: Parts> Parts for (A, B, C) {
    fn split(self, chunks: usize, rows: usize) -> (Self, Self) {
        let ((a, b), (d, e)) = (self.0, self.1).split(chunks, rows);
        let (c, f) = self.2.split(chunks, rows);
        ((a, b, c), (d, e, f))
    }
}

impl Pool {
    /// A pool of `threads` threads; a single one is the caller's.
    ///
    /// # Errors
    ///
    /// When they cannot all be started.
    pub fn new(threads: usize) -> Result<Self, TooManyThreads> {
        Self::started_by(threads, |thread| {
            let named = std::thread::Builder::new().name(format!("spd-cpu-{}", thread.index()));
            named.spawn(|| thread.run()).map(drop)
        })
    }

    /// The caller's thread alone.
    pub fn single() -> Self {
        Self::planned(1)
    }

    /// A pool to plan programs for `threads` threads: it has none, and runs work on the caller's
    /// thread.
    pub fn planned(threads: usize) -> Self {
        Self {
            threads: None,
            count: threads.max(1),
        }
    }

    fn started_by(
        threads: usize,
        start: impl FnMut(ThreadBuilder) -> io::Result<()>,
    ) -> Result<Self, TooManyThreads> {
        let mut pool = Self::planned(threads);
        if threads > 1 {
            let builder = ThreadPoolBuilder::new().num_threads(threads);
            let built = builder.spawn_handler(start).build();
            pool.threads = Some(built.map_err(|fault| TooManyThreads {
                asked: threads,
                source: io::Error::other(fault),
            })?);
        }
        Ok(pool)
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.count
    }

    /// Runs `work` inside the pool, so that its chunks reach all threads at once; nested calls cost
    /// nothing.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Runs a series of kernels inside the pool, while its other threads look for their chunks and
    /// do not sleep: a thread takes longer to wake than a kernel of a small network takes. A thread
    /// that waits for the chunks of others does not sleep either.
    pub(crate) fn attended(&self, mut kernels: impl FnMut() + Send) {
        self.enter(|| {
            let (own, over) = (rayon::current_thread_index(), AtomicBool::new(false));
            let attendant = || {
                // The thread of the series comes here too while it waits, if no other has come.
                if rayon::current_thread_index() != own {
                    attend(&over);
                }
            };
            let others = self.threads.as_ref().map_or(0, |_| self.count - 1);
            beside(others, &attendant, &mut || {
                kernels();
                over.store(true, Ordering::Relaxed);
            });
        });
    }

    /// Calls `work` on each thread of the pool; without threads, on the caller's.
    #[cfg(test)]
    pub(crate) fn on_each_thread(&self, work: impl Fn() + Sync) {
        match &self.threads {
            Some(pool) => drop(pool.broadcast(|_| work())),
            None => work(),
        }
    }

    /// Calls `work(rows, parts)` for each chunk of `chunk_rows` rows (the last may be shorter).
    pub(crate) fn run<P: Parts>(
        &self,
        rows: usize,
        chunk_rows: usize,
        parts: P,
        work: impl Fn(Range<usize>, P) + Sync,
    ) {
        let first_row = |chunk: usize| rows.min(chunk * chunk_rows);
        if rows > 0 {
            self.split(&first_row, 0..chunks(rows, chunk_rows), parts, &work);
        }
    }

    fn split<P: Parts>(
        &self,
        first_row: &(impl Fn(usize) -> usize + Sync),
        chunks: Range<usize>,
        parts: P,
        work: &(impl Fn(Range<usize>, P) + Sync),
    ) {
        if chunks.len() == 1 {
            return work(first_row(chunks.start)..first_row(chunks.end), parts);
        }
        let middle = chunks.start + chunks.len() / 2;
        let rows = first_row(middle) - first_row(chunks.start);
        let (left, right) = parts.split(middle - chunks.start, rows);
        let left = || self.split(first_row, chunks.start..middle, left, work);
        let right = || self.split(first_row, middle..chunks.end, right, work);
        if self.threads.is_some() {
            let over = AtomicBool::new(false);
            let left = || {
                left();
                attend(&over);
            };
            let right = || {
                right();
                over.store(true, Ordering::Relaxed);
            };
            rayon::join(left, right);
        } else {
            left();
            right();
        }
    }
}

/// Runs `work` beside `others` calls of `attendant`, which other threads take up.
fn beside(others: usize, attendant: &(impl Fn() + Sync), work: &mut (dyn FnMut() + Send)) {
    if others == 0 {
        work();
    } else {
        rayon::join(|| beside(others - 1, attendant, work), attendant);
    }
}

/// Runs chunks of other threads until all work is `over`, or there were none for [`PATIENCE`].
fn attend(over: &AtomicBool) {
    let mut idle = None;
    while !over.load(Ordering::Relaxed) {
        if let Some(Yield::Executed) = rayon::yield_now() {
            idle = None;
        } else if idle.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return;
        } else {
            std::thread::yield_now();
        }
    }
}

/// Number of chunks of `rows` rows.
pub(crate) fn chunks(rows: usize, chunk_rows: usize) -> usize {
    rows.div_ceil(chunk_rows)
}

/// Rows of a chunk with scratch of its own, of which there are 64 at most.
pub(crate) fn rows_with_scratch(rows: usize) -> usize {
    rows.div_ceil(64).max(1)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn threads_that_cannot_be_started_are_an_error() {
        let mut left = 3;
        let found = Pool::started_by(8, |thread| {
            if left == 0 {
                return Err(io::Error::from_raw_os_error(11));
            }
            left -= 1;
            std::thread::Builder::new().spawn(|| thread.run()).map(drop)
        });
        assert_eq!(
            found.map(|pool| pool.threads()).map_err(|fault| fault.to_string()),
            Err("8 threads were asked for, and could not all be started (Resource temporarily unavailable (os error 11)); try fewer".to_owned())
        );
    }

    #[test]
    fn other_threads_attend_a_series_from_its_start() {
        let calls = AtomicUsize::new(0);
        let attendant = || {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        Pool::new(3).unwrap().enter(|| {
            beside(2, &attendant, &mut || {
                // This thread runs no job of rayon's meanwhile: another one has to come.
                while calls.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
            });
        });
        assert_eq!(calls.into_inner(), 2);
    }

    #[test]
    fn a_series_of_kernels_writes_every_row() {
        let mut out = vec![0.0; 100];
        let pool = Pool::new(3).unwrap();
        pool.attended(|| {
            for _ in 0..10 {
                pool.run(100, 1, Rows(&mut out, 1), |range, out| {
                    out.0[0] += range.start as f32
                });
            }
        });
        let expected: Vec<f32> = (0..100).map(|row| 10.0 * row as f32).collect();
        assert_eq!(out, expected);
    }

    #[test]
    fn a_thread_that_finds_no_chunk_looks_no_longer() {
        attend(&AtomicBool::new(false));
    }

    #[test]
    #[should_panic(expected = "in a kernel")]
    fn a_panic_ends_a_series() {
        Pool::new(2).unwrap().attended(|| panic!("in a kernel"));
    }

    #[test]
    fn a_planning_pool_starts_no_threads() {
        let pool = Pool::planned(100_000);
        let here = std::thread::current().id();
        assert_eq!(pool.threads(), 100_000);
        assert_eq!(pool.enter(|| std::thread::current().id()), here);
        pool.attended(|| assert_eq!(std::thread::current().id(), here));
    }

    #[test]
    fn every_row_is_written_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for (rows, chunk_rows) in [(1, 1), (7, 3), (64, 8), (65, 8), (3, 100)] {
                let mut out = vec![0.0; rows * 2];
                let mut firsts = vec![-1.0; chunks(rows, chunk_rows)];
                pool.enter(|| {
                    let parts = (Rows(&mut out, 2), PerChunk(&mut firsts, 1));
                    pool.run(rows, chunk_rows, parts, |range, (out, first)| {
                        assert_eq!(out.0.len(), 2 * range.len());
                        for (row, pair) in range.clone().zip(out.0.chunks_mut(2)) {
                            pair.fill(pair[0] + row as f32);
                        }
                        first.0[0] = range.start as f32;
                    });
                });
                let expected: Vec<f32> = (0..rows).flat_map(|row| [row as f32; 2]).collect();
                assert_eq!(out, expected);
                let expected: Vec<f32> = (0..firsts.len())
                    .map(|chunk| (chunk * chunk_rows) as f32)
                    .collect();
                assert_eq!(firsts, expected);
            }
        }
    }
}
