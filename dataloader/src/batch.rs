//! A batch: the rows at a position, a function of seed and position.

use std::ops::Range;

use crate::{CheckedFiles, DataError, Features, Windows};

/// The origin of rows.
#[derive(Debug, Clone)]
pub enum Source {
    /// Windows of a token dataset, in the order that [`Order`](crate::Order) gives them.
    Tokens(Windows),
    /// Generated features, without end and without epochs.
    Features(Features),
}

/// The rows that a run takes at every position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feed {
    /// Keys the order of samples, or the draws of features.
    pub seed: u64,
    /// Rows of a batch, over all ranks.
    pub rows: usize,
    /// The rows that this rank holds.
    pub shard: Shard,
}

/// One rank's part of each batch: rows `rank * rows / world .. (rank + 1) * rows / world`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// The rank, from 0.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
}

impl Shard {
    /// A run of one rank.
    pub const ALONE: Self = Self { rank: 0, world: 1 };
}

/// The rows of one rank at one position. Either `tokens` or `features` is empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Ids, `[rows, seq_len + 1]`: inputs are all but the last of a row, labels all but the first.
    pub tokens: Vec<u32>,
    /// Values, `[rows, features]`.
    pub features: Vec<f32>,
    /// Data position of the batch, which is the position of its first row over all ranks. The next
    /// batch is at `position` plus the rows of the [`Feed`].
    pub position: u64,
    /// Number of row 0 in the batch over all ranks. It keys the draws of a row.
    pub first_row: usize,
    /// Rows of this rank.
    pub rows: usize,
}

impl Source {
    /// Number of different rows; `None` for generated rows, which have no end.
    pub fn samples(&self) -> Option<u64> {
        match self {
            Self::Tokens(windows) => Some(windows.samples().get()),
            Self::Features(_) => None,
        }
    }

    /// Checks all the data of the source, so that a damaged file is found before anything starts;
    /// see [`Dataset::check`](crate::Dataset::check).
    ///
    /// # Errors
    ///
    /// When a shard is damaged or a token is outside of the vocabulary.
    pub fn check(&self, known: &mut CheckedFiles) -> Result<(), DataError> {
        match self {
            Self::Tokens(windows) => windows.check(known),
            Self::Features(_) => Ok(()),
        }
    }
}

impl Feed {
    /// The rows of this rank, numbered within the batch.
    pub(crate) fn own_rows(&self) -> Result<Range<usize>, DataError> {
        let Shard { rank, world } = self.shard;
        if rank >= world {
            return Err(DataError::Request(format!(
                "rank {rank} was asked for in a world of {world}; ranks count from 0"
            )));
        }
        if self.rows < world as usize {
            return Err(DataError::Request(format!(
                "a batch of {} rows leaves some of {world} ranks without a row; use a larger batch or \
                 fewer ranks",
                self.rows
            )));
        }
        // At most `rows`: the quotient fits.
        let start = |rank: u32| (self.rows as u128 * u128::from(rank) / u128::from(world)) as usize;
        Ok(start(rank)..start(rank + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(rows: usize, rank: u32, world: u32) -> Feed {
        Feed {
            seed: 0,
            rows,
            shard: Shard { rank, world },
        }
    }

    #[test]
    fn ranks_share_rows_without_gap_or_overlap() {
        for (rows, world) in [(8, 2), (7, 3), (5, 5), (100, 7)] {
            let mut next = 0;
            for rank in 0..world {
                let own = feed(rows, rank, world).own_rows().unwrap();
                assert_eq!(own.start, next);
                assert!(!own.is_empty());
                next = own.end;
            }
            assert_eq!(next, rows);
        }
    }

    #[test]
    fn invalid_feeds_are_refused_by_name() {
        let text = |feed: Feed| feed.own_rows().unwrap_err().to_string();
        assert_eq!(
            text(feed(8, 2, 2)),
            "rank 2 was asked for in a world of 2; ranks count from 0"
        );
        assert_eq!(
            text(feed(3, 0, 4)),
            "a batch of 3 rows leaves some of 4 ranks without a row; use a larger batch or fewer ranks"
        );
        let source = Source::Features(Features::new(1 << 20, 0.5, 0.0, 1.0).unwrap());
        let fill = |rows, position| {
            source
                .fill(&feed(rows, 0, 1), position, &mut Batch::default())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            fill(1 << 50, 0),
            "a batch of 1125899906842624 rows of 1048576 values does not fit in memory; use fewer rows"
        );
        assert_eq!(
            fill(1, u64::MAX),
            "data position 18446744073709551615 plus 1 rows is beyond 64 bits; was the checkpoint damaged?"
        );
    }
}
