//! `[eval]`: metrics of held-out batches beside the losses.
//!
//! # Adding a metric
//!
//! A file here with its struct, its keys, their defaults and their checks, and what it measures,
//! all by `Metric`: its means on one batch, in the program of the evaluation, and what follows from
//! the means over all batches; and a line of `metrics!`. Importances of toys on inputs of one
//! feature each are measured in `toy`.
//!
//! # Keys of `[eval]`
//!
//! - `every` | a tenth of the steps | `eval_freq` | 0: at the start and the end only
//! - `batches`, `batch_size` | 10, that of `[train]` | `n_eval_steps`, `eval_batch_size` | held-out
//!   rows
//! - `slow_every` | 0 | `slow_eval_freq` | steps between slow evaluations, which draw figures, have
//!   the importances of each site as a histogram in their row (`importance/<site>`), and measure
//!   the slow terms, `eval/hidden_acts/<mask>/<site>`, the squared error of what goes into each
//!   site, and `eval/l0_above_0.1/<site>`; 0: at the start and the end only. Every evaluation has
//!   the last two if nothing else is slow
//! - `components` | 24; toys: 0 | | components of each site, the most important ones, that slow
//!   evaluations show, each in 12 contexts, with what its removal changes where it is active; 0:
//!   none

mod active;
mod adversaries;
mod attention_patterns;
mod bigram;
mod faithfulness;
pub mod known_importance;
pub(crate) mod ladder;
mod masked_output;
mod mse_unrecovered;
mod site_outputs;
mod subset;
pub(crate) mod summary;
mod terms;
pub(crate) mod toy;
mod unit_counts;
pub(crate) mod well_tempered;

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Size, Whole},
};
use spd_engine::ops::MaskValues;
use spd_engine::{Builder, Result, Value};

pub use active::Active;
pub use adversaries::Adversaries;
pub use attention_patterns::{Against, AttentionPatterns};
pub use faithfulness::Faithfulness;
pub use known_importance::Known;
pub use ladder::{Ladder, Rungs};
pub use masked_output::MaskedOutput;
pub use mse_unrecovered::MseUnrecovered;
pub use site_outputs::SiteOutputs;
pub use subset::{Subset, Subsets};
pub use summary::number;
pub use terms::{Measure, Terms};
pub use unit_counts::UnitCounts;
pub use well_tempered::{WellTempered, WellTemperedSample};

use crate::component_model::{MaskSample, Masking, Routing, USUAL_MASKS};
use crate::losses::{Loss, LossInputs};
use crate::run_file::{Train, decomposition::Decomposition, target::Facts};

macro_rules! metrics {
    ($($name:ident: $Metric:ident,)*) => {
        /// Every metric with its keys, in the order of a row.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub struct Metrics {
            $(#[serde(flatten)] pub $name: $Metric,)*
        }

        impl Metrics {
            fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
                $(let $name = $Metric::read(table, before);)*
                Some(Self { $($name: $name?,)* })
            }

            fn all(&self) -> Vec<&dyn Metric> {
                vec![$(&self.$name as &dyn Metric,)*]
            }
        }
    };
}

metrics! {
    masked_output: MaskedOutput,
    subsets: Subsets,
    terms: Terms,
    active: Active,
    faithfulness: Faithfulness,
    mse_unrecovered: MseUnrecovered,
    known: Known,
    unit_counts: UnitCounts,
    site_outputs: SiteOutputs,
    attention_patterns: AttentionPatterns,
    adversaries: Adversaries,
    ladder: Ladder,
    well_tempered: WellTempered,
}

impl Metrics {
    /// The means of all metrics on one batch.
    pub(crate) fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let means = self.all().into_iter().map(|metric| metric.means(b, on));
        Ok(means.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Whether an evaluation that is not slow leaves something costly out.
    pub(crate) fn has_slow(&self) -> bool {
        self.terms.rows.iter().any(|term| term.slow)
            || self.site_outputs.site_outputs
            || self.adversaries.adversaries
            || self.attention_patterns.attention_patterns.is_some()
    }

    /// Metrics derived from the means over all batches.
    pub(crate) fn derived(&self, means: &[(String, f64)]) -> Measured {
        let metrics = self.all().into_iter();
        metrics.flat_map(|metric| metric.derived(means)).collect()
    }
}

/// A metric: its keys in a run file, and what it measures.
trait Metric {
    /// Reads its keys.
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self>
    where
        Self: Sized;

    /// Its means on one batch.
    fn means(&self, _: &mut Builder, _on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        Ok(Vec::new())
    }

    /// Metrics derived from the means of all metrics over all batches, which have their names in
    /// rows.
    fn derived(&self, _means: &[(String, f64)]) -> Measured {
        Vec::new()
    }
}

/// Named numbers.
pub(crate) type Measured = Vec<(String, f64)>;

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
    /// Inputs of a loss.
    pub(crate) from: LossInputs<'a>,
    /// The losses of training.
    pub(crate) losses: &'a [Loss],
    /// The next tokens u32 `[b, t]`, for a language model.
    pub(crate) labels: Option<Value>,
    /// Whether slow terms are measured too.
    pub(crate) is_slow: bool,
}

impl Evaluated<'_> {
    /// A mean over the examples of the batch.
    fn mean(&self, name: String, value: Value) -> Mean {
        let count = self.from.clean_pass.shape.examples();
        Mean { name, value, count }
    }

    /// Masks of all sites, those of the sample that the usual masks share.
    fn masks(&self, b: &mut Builder, masking: Masking) -> Result<Vec<(usize, MaskValues)>> {
        let sample = MaskSample {
            draws: self.from.draws,
            number: USUAL_MASKS,
            name: "eval".into(),
        };
        let clean_pass = self.from.clean_pass;
        let model = self.from.model;
        model.masks(b, clean_pass, masking, Routing::All, &sample)
    }
}

/// Evaluation on held-out batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Eval {
    /// Steps between evaluations; 0 evaluates at the start and the end only.
    pub every: u64,
    /// Batches per evaluation.
    pub batches: u64,
    /// Rows per batch.
    pub batch_size: usize,
    /// Steps between slow evaluations, which draw figures and measure slow terms too; 0 for the
    /// ends only.
    pub slow_every: u64,
    /// Components of a site that slow evaluations show in contexts, the most important ones; 0 for
    /// none, and for toys.
    pub components: usize,
    /// The metrics.
    #[serde(flatten)]
    pub metrics: Metrics,
}

/// The tables before `[eval]`, as far as they could be read, which its keys are checked against.
struct Before<'a> {
    target: &'a Facts,
    decomposition: Option<&'a Decomposition>,
    train: Option<&'a Train>,
}

pub(crate) fn read(
    table: &mut Table<'_>,
    target: &Facts,
    decomposition: Option<&Decomposition>,
    train: Option<&Train>,
) -> Option<Eval> {
    let tenth = train.map_or(0, |train| (train.steps + 5) / 10);
    let every = table.or("every", Whole::at_least(0), tenth);
    let batches = table.or("batches", Whole::at_least(1), 10);
    let train_rows = train.map_or(1, |train| train.batch_size);
    let batch_size = table.or("batch_size", Size::at_least(1), train_rows);
    if let (Some(shards), Some(rows)) = (train.and_then(|train| train.shards), batch_size)
        && !rows.is_multiple_of(shards)
    {
        let message = format!("expected a multiple of shards = {shards} in [train], found {rows}");
        table.refuse::<()>("batch_size", message);
    }
    let slow_every = table.or("slow_every", Whole::at_least(0), 0);
    let components = read_components(table, target);
    let before = Before {
        target,
        decomposition,
        train,
    };
    let metrics = Metrics::read(table, &before);
    all_read! { Eval: every, batches, batch_size, slow_every, components, metrics }
}

/// Components of a site that are shown in contexts, unless a run says how many.
const SHOWN: usize = 24;

/// The most of them: more are not looked at, and each takes time and memory.
const MOST_SHOWN: usize = 1024;

fn read_components(table: &mut Table<'_>, target: &Facts) -> Option<usize> {
    let shown = target.of_tokens().map_or(0, |_| SHOWN);
    let components = table.or("components", Size::between(0, MOST_SHOWN), shown);
    if let (Some(1..), Some(name)) = (components, target.of_features()) {
        let message = format!("expected 0 for a {name} target, found {}", components?);
        table.refuse::<()>("components", message);
    }
    components
}
