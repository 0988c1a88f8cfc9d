//! How well the last token alone predicts the next: the cross-entropy of a bigram model, what a
//! trained target must beat.
//!
//! `P(b | a) = (n_ab + 1/2) / (n_a + v/2)`, counted on the training rows and measured on held-out
//! ones, in nats. The half keeps pairs that were never seen from having no probability.

use spd_dataloader::{Batch, Feed, Shard, Source};

use crate::data::Sources;
use crate::fault::Interrupt;
use crate::task::CheckStop;

/// Vocabulary above which the table of counts would be too large.
const MOST_TOKENS: usize = 4096;

const PRIOR: f64 = 0.5;

/// Rows between two looks for a stop.
const ROWS: u64 = 256;

/// Cross-entropy of a bigram model on all held-out rows; `None` where there are no tokens, or too
/// many different ones.
///
/// # Errors
///
/// When a row cannot be read, or on a stop.
pub(crate) fn bigram_cross_entropy(
    Sources { train, eval, .. }: &Sources,
    vocab: usize,
    check_stop: &mut CheckStop<'_>,
) -> Result<Option<f64>, Interrupt> {
    if vocab > MOST_TOKENS || train.samples().is_none() {
        return Ok(None);
    }
    let mut pairs = vec![0u32; vocab * vocab];
    let mut firsts = vec![0u32; vocab];
    each_pair(train, check_stop, |a, b| {
        pairs[a * vocab + b] += 1;
        firsts[a] += 1;
    })?;
    let (mut total, mut count) = (0.0, 0u64);
    each_pair(eval, check_stop, |a, b| {
        let seen = f64::from(pairs[a * vocab + b]) + PRIOR;
        total -= (seen / (f64::from(firsts[a]) + PRIOR * vocab as f64)).ln();
        count += 1;
    })?;
    Ok((count > 0).then(|| total / count as f64))
}

/// Visits each pair of tokens that follow each other in a row.
fn each_pair(
    source: &Source,
    check_stop: &mut CheckStop<'_>,
    mut visit: impl FnMut(usize, usize),
) -> Result<(), Interrupt> {
    let feed = Feed {
        seed: 0,
        rows: 1,
        shard: Shard::ALONE,
    };
    let mut batch = Batch::default();
    for position in 0..source.samples().unwrap_or(0) {
        if position.is_multiple_of(ROWS) {
            check_stop()?;
        }
        source.fill(&feed, position, &mut batch)?;
        for pair in batch.tokens.windows(2) {
            visit(pair[0] as usize, pair[1] as usize);
        }
    }
    Ok(())
}
