//! Windows of tokens: the samples of a language model.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use crate::tokens::TokenFile;
use crate::{CheckedFiles, DataError, Dataset};

/// The rows that are made of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Input tokens of a window, which has one more token.
    pub seq_len: usize,
    /// Vocabulary of the model. Each token is checked when it is read.
    pub vocab: u32,
    /// Whether windows cross documents.
    pub documents: Documents,
}

/// The relation of windows to documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Documents {
    /// Documents may begin and end inside of a window.
    Joined,
    /// A window lies in one document, by the ends that the format lists.
    Apart,
    /// A window lies in one document, each of which ends with this id.
    EndWith(u32),
}

/// A dataset seen as windows of `seq_len` inputs and the label of the last one.
///
/// Window `i` of a stretch of tokens is its tokens `i * seq_len ..= (i + 1) * seq_len`: the last
/// token of a window is the first one of the next. A stretch is a file, or a document in it if
/// documents are kept apart. No window crosses its end, so the rest of it, at most `seq_len`
/// tokens, is never read.
#[derive(Debug, Clone)]
pub struct Windows {
    dataset: Arc<Dataset>,
    rows: Rows,
    stretches: Arc<[Stretch]>,
    /// The windows that are samples here, of all windows of the dataset.
    part: Range<u64>,
    samples: NonZero<u64>,
}

/// Tokens that hold whole windows. Stretches without a window are not kept.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Number of windows in the stretches before it.
    before: u64,
    /// Its first token in its file.
    first: u64,
    file: usize,
}

impl Windows {
    /// Every window of a dataset.
    ///
    /// # Errors
    ///
    /// When no window fits, `seq_len` is 0, or the ends of documents are unknown.
    pub fn new(dataset: Arc<Dataset>, rows: Rows) -> Result<Self, DataError> {
        if rows.seq_len == 0 {
            return Err(DataError::Request(
                "windows of 0 tokens were asked for; seq_len is at least 1".to_owned(),
            ));
        }
        let (mut stretches, mut windows) = (Vec::new(), 0_u64);
        for (number, file) in dataset.files().iter().enumerate() {
            let mut first = 0;
            let mut add = |end: u64| {
                let inside = (end - first).saturating_sub(1) / rows.seq_len as u64;
                if inside > 0 {
                    stretches.push(Stretch {
                        before: windows,
                        first,
                        file: number,
                    });
                    windows += inside;
                }
                first = end;
            };
            match rows.documents {
                Documents::Joined => {}
                Documents::Apart if file.documents().is_none() => {
                    return Err(DataError::damaged(
                        file.path(),
                        "does not list where documents end; say which id ends them: [data] document_end = ID",
                    ));
                }
                Documents::Apart => file.each_document_end(&mut add)?,
                Documents::EndWith(id) => file.each_end_by(id, &mut add)?,
            }
            // The rest after the last end continues in the next file, or is the whole file.
            add(file.len());
        }
        let Some(samples) = NonZero::new(windows) else {
            let what = match rows.documents {
                Documents::Joined => "dataset",
                Documents::Apart | Documents::EndWith(_) => "document of a dataset",
            };
            return Err(DataError::Request(format!(
                "{}: no window of {} tokens and a label fits a {what} of {} tokens; use a smaller seq_len or \
                 more text",
                dataset.place(),
                rows.seq_len,
                dataset.tokens()
            )));
        };
        Ok(Self {
            dataset,
            rows,
            stretches: stretches.into(),
            part: 0..windows,
            samples,
        })
    }

    /// Splits off the last `held_out` of the windows; returns both parts. If documents are kept
    /// apart, the cut moves to the end of the document that it lies in, or to its beginning if that
    /// is the last one.
    ///
    /// The label of the last window before the cut is the first input of the one after it.
    ///
    /// # Errors
    ///
    /// When a part would have no window.
    pub fn split(&self, held_out: f64) -> Result<[Self; 2], DataError> {
        let windows = self.samples.get();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to the windows"
        )]
        let held_back = (windows as f64 * held_out).round().max(0.0) as u64;
        let mut cut = self.part.end - held_back.min(windows);
        if self.rows.documents != Documents::Joined {
            let next = self
                .stretches
                .partition_point(|stretch| stretch.before < cut);
            let begin_of_last = self.stretches.last().map_or(0, |stretch| stretch.before);
            let moved = self
                .stretches
                .get(next)
                .map_or(begin_of_last, |stretch| stretch.before);
            // A single document is cut inside.
            if moved > self.part.start {
                cut = moved;
            }
        }
        let part = |part: Range<u64>, what| match NonZero::new(part.end - part.start) {
            Some(samples) => Ok(Self {
                part,
                samples,
                ..self.clone()
            }),
            None => Err(DataError::Request(format!(
                "{}: held_out = {held_out} of {windows} rows of {} tokens leaves none to {what}; use another \
                 part, a smaller seq_len or more text",
                self.dataset.place(),
                self.rows.seq_len
            ))),
        };
        Ok([
            part(self.part.start..cut, "train on")?,
            part(cut..self.part.end, "evaluate on")?,
        ])
    }

    /// Number of windows: the rows of an epoch.
    pub fn samples(&self) -> NonZero<u64> {
        self.samples
    }

    /// Tokens of a window, including the label of the last input.
    pub fn width(&self) -> usize {
        self.rows.seq_len + 1
    }

    /// The dataset of the windows.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// The number of window `sample` among all windows of the dataset.
    pub fn number(&self, sample: u64) -> u64 {
        self.part.start + sample
    }

    /// The number of the first token of window `sample`, which is below [`Windows::samples`].
    /// Tokens are counted from the first token of the first file.
    pub fn first_token(&self, sample: u64) -> u64 {
        let (file, first) = self.place(sample);
        let before = self.dataset.files()[..file].iter();
        before.map(TokenFile::len).sum::<u64>() + first
    }

    /// Checks the dataset, and its ids against the vocabulary.
    pub(crate) fn check(&self, known: &mut CheckedFiles) -> Result<(), DataError> {
        self.dataset.check(self.rows.vocab, known)
    }

    /// Reads window `sample`, which is below [`Windows::samples`], into `out` of
    /// [`Windows::width`]. Returns the number of its file.
    pub(crate) fn read(
        &self,
        sample: u64,
        stored: &mut Vec<u8>,
        out: &mut [u32],
    ) -> Result<usize, DataError> {
        let (file, first) = self.place(sample);
        self.dataset.files()[file].copy(first, self.rows.vocab, stored, out)?;
        Ok(file)
    }

    /// Requests a window from the kernel.
    pub(crate) fn will_need(&self, sample: u64) {
        let (file, first) = self.place(sample);
        self.dataset.files()[file].will_need(first, self.width());
    }

    /// Checks that files have not changed since they were opened.
    pub(crate) fn check_unchanged(&self, files: &[usize]) -> Result<(), DataError> {
        let mut files = files.iter().map(|&file| &self.dataset.files()[file]);
        files.try_for_each(|file| file.opened.check_unchanged())
    }

    /// The file of a window, and its first token there.
    fn place(&self, sample: u64) -> (usize, u64) {
        let window = self.number(sample);
        let after = self
            .stretches
            .partition_point(|stretch| stretch.before <= window);
        let stretch = self.stretches[after - 1];
        let inside = window - stretch.before;
        (
            stretch.file,
            stretch.first + inside * self.rows.seq_len as u64,
        )
    }
}
