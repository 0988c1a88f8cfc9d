//! Windows of tokens: the samples of a language model.

use std::num::NonZero;
use std::sync::Arc;

use crate::{CheckedFiles, DataError, Dataset};

/// A dataset seen as windows of `seq_len` inputs and the label of the last one.
///
/// Window `i` of a file is its tokens `i * seq_len ..= (i + 1) * seq_len`: the last token of a window is
/// the first one of the next. No window crosses the end of a file, so what is left there, at most
/// `seq_len` tokens, is never read. Documents may begin and end inside a window.
#[derive(Debug, Clone)]
pub struct Windows {
    dataset: Arc<Dataset>,
    seq_len: usize,
    vocab: u32,
    /// Number of windows up to and with each file.
    ends: Vec<u64>,
    samples: NonZero<u64>,
}

impl Windows {
    /// Every window of a dataset.
    ///
    /// - `seq_len`: input tokens of a window, which has one token more
    /// - `vocab`: ids that the model has; each token is checked when it is read
    ///
    /// # Errors
    ///
    /// When no file has `seq_len + 1` tokens, or `seq_len` is 0.
    pub fn new(dataset: Arc<Dataset>, seq_len: usize, vocab: u32) -> Result<Self, DataError> {
        let mut samples = 0_u64;
        let mut ends = Vec::with_capacity(dataset.files().len());
        for file in dataset.files() {
            let windows = file
                .len()
                .saturating_sub(1)
                .checked_div(seq_len as u64)
                .ok_or_else(|| {
                    DataError::Request(
                        "windows of 0 tokens were asked for; seq_len is at least 1".to_owned(),
                    )
                })?;
            samples += windows;
            ends.push(samples);
        }
        let Some(samples) = NonZero::new(samples) else {
            let first = dataset.files().first();
            return Err(DataError::Request(format!(
                "{}: no window of {seq_len} tokens and a label fits a dataset of {} tokens; use a smaller \
                 seq_len or more text",
                first.map_or("dataset".to_owned(), |file| file
                    .path()
                    .display()
                    .to_string()),
                dataset.tokens()
            )));
        };
        Ok(Self {
            dataset,
            seq_len,
            vocab,
            ends,
            samples,
        })
    }

    /// Number of windows: the rows of an epoch.
    pub fn samples(&self) -> NonZero<u64> {
        self.samples
    }

    /// Tokens of a window, the label of the last input among them.
    pub fn width(&self) -> usize {
        self.seq_len + 1
    }

    /// Checks the dataset and its ids against the vocabulary.
    pub(crate) fn check(&self, known: &mut CheckedFiles) -> Result<(), DataError> {
        self.dataset.check(self.vocab, known)
    }

    /// Reads window `sample`, which is below [`Windows::samples`], into `out` of [`Windows::width`]. Returns the number of its file.
    pub(crate) fn read(
        &self,
        sample: u64,
        stored: &mut Vec<u8>,
        out: &mut [u32],
    ) -> Result<usize, DataError> {
        let (file, first) = self.place(sample);
        self.dataset.files()[file].copy(first, self.vocab, stored, out)?;
        Ok(file)
    }

    /// Asks the kernel to read a window ahead of time.
    pub(crate) fn will_need(&self, sample: u64) {
        let (file, first) = self.place(sample);
        self.dataset.files()[file].will_need(first, self.width());
    }

    /// Says whether files are still those that were opened.
    pub(crate) fn check_unchanged(&self, files: &[usize]) -> Result<(), DataError> {
        let files = files.iter().map(|&file| &self.dataset.files()[file]);
        files.map(|file| file.opened.check_unchanged()).collect()
    }

    /// The file of a window, and its first token there.
    fn place(&self, sample: u64) -> (usize, u64) {
        let file = self.ends.partition_point(|&end| end <= sample);
        let before = if file == 0 { 0 } else { self.ends[file - 1] };
        (file, (sample - before) * self.seq_len as u64)
    }
}
