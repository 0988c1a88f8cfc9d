//! The text of a harvest: rows of its datasets by number, and tokens as text.

use std::io;

use spd_dataloader::{Batch, Feed, Order, Source, TokenTexts, Windows};
use spd_harvest::Datasets;

use crate::data::{eval_feed, training_feed};
use crate::fault::Fault;

/// The datasets.
pub(super) struct Texts {
    of: Vec<OfDataset>,
    tokens: TokenTexts,
}

struct OfDataset {
    windows: Windows,
    feed: Feed,
}

impl Texts {
    /// Of datasets: whether each is the training data of the run, and its rows.
    pub(super) fn of(seed: u64, datasets: Vec<(bool, Source)>) -> Result<Self, Fault> {
        let mut of = Vec::with_capacity(datasets.len());
        for (is_of_training, source) in datasets {
            let Source::Tokens(windows) = source else {
                return Err(Fault::BadInput("[data] kind: not of tokens".into()));
            };
            let feed = if is_of_training {
                training_feed
            } else {
                eval_feed
            };
            of.push(OfDataset {
                windows,
                feed: feed(seed, 1),
            });
        }
        let tokens = of[0].windows.dataset().token_texts()?;
        Ok(Self { of, tokens })
    }

    /// The source of batches of so many rows.
    pub(super) fn source(&self, source: usize, rows: usize) -> (Source, Feed) {
        let OfDataset { windows, feed } = &self.of[source];
        (Source::Tokens(windows.clone()), Feed { rows, ..*feed })
    }
}

impl Datasets for Texts {
    fn row(&mut self, source: u16, row: u64) -> io::Result<(u64, Vec<u32>)> {
        let gone = || io::Error::other(format!("no row {row} of dataset {source}"));
        let OfDataset { windows, feed } = self.of.get(usize::from(source)).ok_or_else(gone)?;
        if row >= windows.samples().get() {
            return Err(gone());
        }
        let sample = Order::new(feed.seed, windows.samples()).at(row);
        let first = windows.first_token(sample);
        let (source, feed) = self.source(source.into(), 1);
        let mut batch = Batch::default();
        let filled = source.fill(&feed, row, &mut batch);
        filled.map_err(|error| io::Error::other(error.to_string()))?;
        // The last token is a label.
        batch.tokens.pop();
        Ok((first, batch.tokens))
    }

    fn text(&mut self, token: u32) -> String {
        self.tokens.text(token).to_owned()
    }
}
