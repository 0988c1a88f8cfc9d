//! One rank's way through a source, with the state that is kept from one batch to the next.

use std::ops::Range;

use crate::order::Epoch;
use crate::{Batch, DataError, Feed, Order, Source, Windows};

/// Makes the batches of a feed. It keeps the keys of the current epoch, and memory for stored rows.
#[derive(Debug)]
pub(crate) struct Reader<'s> {
    source: &'s Source,
    feed: Feed,
    /// The rows of each batch that this rank holds.
    rows: Range<usize>,
    epoch: Option<Epoch>,
    stored: Vec<u8>,
    /// Numbers of the files of a batch's rows.
    files: Vec<usize>,
}

impl<'s> Reader<'s> {
    pub(crate) fn new(source: &'s Source, feed: Feed) -> Result<Self, DataError> {
        Ok(Self {
            source,
            feed,
            rows: feed.own_rows()?,
            epoch: None,
            stored: Vec::new(),
            files: Vec::new(),
        })
    }

    /// See [`Source::fill`].
    pub(crate) fn fill(&mut self, position: u64, batch: &mut Batch) -> Result<(), DataError> {
        let Some(positions) = self.positions(position) else {
            return Err(DataError::Request(format!(
                "data position {position} plus {} rows is beyond 64 bits; was the checkpoint damaged?",
                self.feed.rows
            )));
        };
        (batch.position, batch.first_row, batch.rows) =
            (position, self.rows.start, self.rows.len());
        match self.source {
            Source::Tokens(windows) => {
                batch.features.clear();
                resize(&mut batch.tokens, self.rows.len(), windows.width())?;
                self.files.clear();
                for (at, row) in positions.zip(batch.tokens.chunks_exact_mut(windows.width())) {
                    let sample = self.sample(windows, at);
                    let file = windows.read(sample, &mut self.stored, row)?;
                    self.files.push(file);
                }
                self.files.sort_unstable();
                self.files.dedup();
                // Last, so that changes during the reads are noticed too.
                windows.check_unchanged(&self.files)
            }
            Source::Features(features) => {
                batch.tokens.clear();
                resize(&mut batch.features, self.rows.len(), features.width())?;
                for (at, row) in positions.zip(batch.features.chunks_exact_mut(features.width())) {
                    features.make(self.feed.seed, at, row);
                }
                Ok(())
            }
        }
    }

    /// Requests the rows of the batch at `position` from the kernel. It is filled later.
    pub(crate) fn will_need(&mut self, position: u64) {
        if let (Source::Tokens(windows), Some(positions)) = (self.source, self.positions(position))
        {
            for at in positions {
                windows.will_need(self.sample(windows, at));
            }
        }
    }

    /// Positions of this rank's rows of the batch at `position`; `None` if the next batch would be
    /// beyond 64 bits.
    fn positions(&self, position: u64) -> Option<Range<u64>> {
        position.checked_add(self.feed.rows as u64)?;
        Some(position + self.rows.start as u64..position + self.rows.end as u64)
    }

    fn sample(&mut self, windows: &Windows, position: u64) -> u64 {
        let samples = windows.samples();
        let epoch = Order::new(self.feed.seed, samples).epoch_at(position, self.epoch);
        self.epoch = Some(epoch);
        epoch.at(position % samples)
    }
}

impl Source {
    /// Makes the batch at `position`, reusing the memory of `batch`.
    ///
    /// The same arguments give the same batch. The parts of all ranks together are the batch of a
    /// single rank.
    ///
    /// # Errors
    ///
    /// When a token is not in the vocabulary, a file was written to or cut, or the feed is invalid.
    /// `batch` then holds junk.
    pub fn fill(&self, feed: &Feed, position: u64, batch: &mut Batch) -> Result<(), DataError> {
        Reader::new(self, *feed)?.fill(position, batch)
    }
}

/// Sizes a buffer, without a panic if it does not fit in memory.
fn resize<T: Copy + Default>(
    buffer: &mut Vec<T>,
    rows: usize,
    width: usize,
) -> Result<(), DataError> {
    let fits = rows.checked_mul(width).filter(|&len| {
        buffer
            .try_reserve_exact(len.saturating_sub(buffer.len()))
            .is_ok()
    });
    let Some(len) = fits else {
        return Err(DataError::Request(format!(
            "a batch of {rows} rows of {width} values does not fit in memory; use fewer rows"
        )));
    };
    buffer.resize(len, T::default());
    Ok(())
}
