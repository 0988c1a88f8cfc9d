//! How well the last token alone predicts the next: the cross-entropy of a bigram model, what a
//! trained target must beat.
//!
//! `P(b | a) = (n_ab + 1/2) / (n_a + v/2)`, counted on the training rows and measured on held-out
//! ones, in nats. The half keeps pairs that were never seen from having no probability.

use spd_dataloader::{Batch, DataError, Feed, Shard, Source};

/// Vocabulary above which the table of counts would be too large.
const MOST_TOKENS: usize = 4096;

const PRIOR: f64 = 0.5;

/// Rows between two questions whether to go on.
const ROWS: u64 = 256;

/// Cross-entropy of a bigram model on all held-out rows; `None` where there are no tokens, or too
/// many different ones, or it was not to go on, which is asked now and then.
///
/// # Errors
///
/// When a row cannot be read.
pub fn bigram_cross_entropy(
    train: &Source,
    held_out: &Source,
    vocab: usize,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<f64>, DataError> {
    if vocab > MOST_TOKENS || train.samples().is_none() {
        return Ok(None);
    }
    let mut pairs = vec![0u32; vocab * vocab];
    let mut firsts = vec![0u32; vocab];
    let counted = each_pair(train, go_on, |a, b| {
        pairs[a * vocab + b] += 1;
        firsts[a] += 1;
    })?;
    let (mut total, mut count) = (0.0, 0u64);
    let measured = each_pair(held_out, go_on, |a, b| {
        let seen = f64::from(pairs[a * vocab + b]) + PRIOR;
        total -= (seen / (f64::from(firsts[a]) + PRIOR * vocab as f64)).ln();
        count += 1;
    })?;
    Ok((counted && measured && count > 0).then(|| total / count as f64))
}

/// Whether all were visited.
fn each_pair(
    source: &Source,
    go_on: &mut dyn FnMut() -> bool,
    mut visit: impl FnMut(usize, usize),
) -> Result<bool, DataError> {
    let feed = Feed {
        seed: 0,
        rows: 1,
        shard: Shard::ALONE,
    };
    let mut batch = Batch::default();
    for position in 0..source.samples().unwrap_or(0) {
        if position.is_multiple_of(ROWS) && !go_on() {
            return Ok(false);
        }
        source.fill(&feed, position, &mut batch)?;
        for pair in batch.tokens.windows(2) {
            visit(pair[0] as usize, pair[1] as usize);
        }
    }
    Ok(true)
}
