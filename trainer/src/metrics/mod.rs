//! Metrics of held-out batches beside the losses.
//!
//! # Adding a metric
//!
//! A file here with its `Metric`: what adds its means on one batch to the program of the
//! evaluation, and what follows from them; and a line of `METRICS`. Metrics of toys alone are
//! measured on inputs of one feature each, in `toy`.

mod active;
mod bigram;
mod faithfulness;
pub mod known_importance;
mod masked_output;
mod mse_unrecovered;
pub(crate) mod summary;
mod terms;
pub(crate) mod toy;

use spd_engine::{Builder, Result, Store, Value};

use crate::run_file::Run;

pub use summary::number;

use crate::decomposition::{CleanPass, Decomposition};
use crate::task::Measured;

/// A metric.
pub(crate) struct Metric {
    /// Its means on one batch.
    pub(crate) means: fn(&mut Builder, &Evaluated<'_>) -> Result<Vec<Mean>>,
    /// Metrics derived from the means of all metrics over all batches, which have their names in
    /// rows.
    derived: fn(&[(String, f64)], &Run) -> Measured,
}

impl Metric {
    /// One whose means are all there is to it.
    const fn of_means(means: fn(&mut Builder, &Evaluated<'_>) -> Result<Vec<Mean>>) -> Self {
        Self {
            means,
            derived: |_, _| Vec::new(),
        }
    }
}

/// Every metric, in the order of a row.
pub(crate) const METRICS: &[Metric] = &[
    masked_output::METRIC,
    terms::METRIC,
    active::METRIC,
    faithfulness::METRIC,
    mse_unrecovered::METRIC,
];

/// Metrics derived from the means over all batches.
pub(crate) fn derived(means: &[(String, f64)], run: &Run) -> Measured {
    let metrics = METRICS.iter();
    metrics
        .flat_map(|metric| (metric.derived)(means, run))
        .collect()
}

/// One number of a metric on a batch.
#[derive(Debug, Clone)]
pub(crate) struct Mean {
    /// Its name in rows, behind `eval/`.
    pub(crate) name: String,
    /// A scalar: the mean on this batch.
    pub(crate) value: Value,
    /// Of how many things it is the mean: what it weighs among those of other batches.
    pub(crate) count: usize,
}

/// Inputs of a metric.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evaluated<'a> {
    pub(crate) decomposition: &'a Decomposition,
    pub(crate) store: &'a Store,
    pub(crate) clean_pass: &'a CleanPass,
    /// The next tokens u32 `[b, t]`, for a language model.
    pub(crate) labels: Option<Value>,
    /// Whether slow terms are measured too.
    pub(crate) is_slow: bool,
}
