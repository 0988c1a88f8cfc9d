//! `[eval]`: what is measured on held-out batches.
//!
//! # Keys of `[eval]`
//!
//! - `every` | a tenth of the steps | `eval_freq` | 0: at the start and the end only
//! - `batches`, `batch_size` | 10, that of `[train]` | `n_eval_steps`, `eval_batch_size` | held-out
//!   rows
//! - `slow_every` | 0 | `slow_eval_freq` | steps between slow evaluations, which draw figures, have
//!   the importances of each site as a histogram in their row (`importance/<site>`), and measure
//!   the slow terms and `eval/hidden_acts/<mask>/<site>`, the squared error of what goes into each
//!   site; 0: at the start and the end only
//! - `components` | 24; toys: 0 | | components of each site, the most important ones, that slow
//!   evaluations show, each in 12 contexts, with what its removal changes where it is active; 0:
//!   none
//! - `alive_threshold` | 0 | `ci_alive_threshold` | importance above which a component is active,
//!   from 0 to 1
//! - `rounding_threshold` | 0 | `rounding_threshold` of `CEandKLLosses` | importance above which
//!   rounded masks keep a component, from 0 to 1

use serde::Serialize;
use spd_configs::{
    reader::Table,
    values::{Number, Size, Whole},
};

use crate::component_model::SAMPLES;
use crate::losses::{self, Measure};
use crate::run_file::{
    decomposition::Decomposition,
    known::{self, KnownImportance},
    subset::{self, Subset},
    target::Facts,
    train::Train,
};

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
    /// A component counts as active above this importance.
    pub alive_threshold: f64,
    /// Rounded masks are 1 above this importance.
    pub rounding_threshold: f64,
    /// Known solutions to compare importances with.
    pub known: Vec<KnownImportance>,
    /// Reconstruction terms that are measured beside the usual masks.
    #[serde(rename = "loss")]
    pub losses: Vec<Measure>,
    /// Sites that are measured together.
    #[serde(rename = "subset", skip_serializing_if = "Vec::is_empty")]
    pub subsets: Vec<Subset>,
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
    if let (
        Some(Train {
            shards: Some(shards),
            ..
        }),
        Some(rows),
    ) = (train, batch_size)
        && !rows.is_multiple_of(*shards)
    {
        let message = format!("expected a multiple of shards = {shards} in [train], found {rows}");
        table.refuse::<()>("batch_size", message);
    }
    let slow_every = table.or("slow_every", Whole::at_least(0), 0);
    let components = read_components(table, target);
    let alive_threshold = table.or("alive_threshold", Number::FRACTION, 0.0);
    let rounding_threshold = table.or("rounding_threshold", Number::FRACTION, 0.0);
    let known = table.rows_or_none("known", |known| known::read(known, target, decomposition));
    let mut seen = Vec::new();
    let losses = table.rows_or_none("loss", |loss| losses::read_measure(loss, &mut seen));
    if let (Some(losses), Some(train)) = (&losses, train)
        && losses.len() * train.mask_samples > SAMPLES
    {
        let message = format!(
            "expected at most {} with mask_samples = {}, found {}",
            SAMPLES / train.mask_samples,
            train.mask_samples,
            losses.len()
        );
        table.refuse::<()>("loss", message);
    }
    let mut names = Vec::new();
    let subsets = table.rows_or_none("subset", |subset| subset::read(subset, target, &mut names));
    if let (Some(name), Some([_, ..])) = (target.of_tokens(), known.as_deref()) {
        let message =
            format!("expected a tms or resid_mlp target, whose features are known, found {name}");
        table.refuse::<()>("known", message);
    }
    Some(Eval {
        every: every?,
        batches: batches?,
        batch_size: batch_size?,
        slow_every: slow_every?,
        components: components?,
        alive_threshold: alive_threshold?,
        rounding_threshold: rounding_threshold?,
        known: known?,
        losses: losses?,
        subsets: subsets?,
    })
}

/// Components of a site that are shown in contexts, unless a run says how many.
const SHOWN: usize = 24;

/// The most of them: more are not looked at, and each takes time and memory.
const MOST_SHOWN: usize = 1024;

fn read_components(table: &mut Table<'_>, target: &Facts) -> Option<usize> {
    let shown = if target.of_tokens().is_some() {
        SHOWN
    } else {
        0
    };
    let components = table.or("components", Size::between(0, MOST_SHOWN), shown);
    if let (Some(1..), Some(name)) = (components, target.of_features()) {
        let message = format!("expected 0 for a {name} target, found {}", components?);
        table.refuse::<()>("components", message);
    }
    components
}
