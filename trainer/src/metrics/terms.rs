//! The reconstruction terms of `[[eval.loss]]`. `loss/<name>`.
//!
//! # Keys of `[[eval.loss]]`
//!
//! - `kind`, and the keys of the loss | none | `eval_metric_configs`: `classname`, ... | a
//!   reconstruction as in `[[loss]]`, without `coeff`, that is only measured, such as a stronger
//!   adversary
//! - `name`, `slow` | its `kind`, false | | its name in metrics, `eval/loss/<name>`; whether slow
//!   evaluations alone measure it

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, OneOf, Text};
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Metric};
use crate::component_model::SAMPLES;
use crate::losses::{KINDS, Kind, Term};

/// The terms that are measured beside the usual masks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Terms {
    /// In the order of the file.
    #[serde(rename = "loss")]
    pub rows: Vec<Measure>,
}

/// A term that is measured on held-out batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measure {
    /// The loss.
    #[serde(flatten)]
    pub term: Term,
    /// Its name in metrics, `eval/loss/<name>`.
    pub name: String,
    /// Whether it is measured in slow evaluations alone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub slow: bool,
}

impl Metric for Terms {
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
        let mut seen = Vec::new();
        let rows = table.rows_or_none("loss", |loss| read(loss, &mut seen));
        if let (Some(rows), Some(train)) = (&rows, before.train)
            && rows.len() * train.mask_samples > SAMPLES
        {
            let message = format!(
                "expected at most {} with mask_samples = {}, found {}",
                SAMPLES / train.mask_samples,
                train.mask_samples,
                rows.len()
            );
            table.refuse::<()>("loss", message);
        }
        Some(Self { rows: rows? })
    }

    /// Terms that are left out are built all the same, so that the draws of others stay, and are
    /// never computed.
    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let terms = self.rows.iter().map(|measure| &measure.term);
        let values = on.from.measures(b, terms)?;
        let terms = self.rows.iter().zip(values);
        let terms = terms.filter(|(said, _)| on.is_slow || !said.slow);
        let means = terms.map(|(said, value)| on.mean(format!("loss/{}", said.name), value));
        Ok(means.collect())
    }
}

/// - `seen`: the names of those before it
fn read(table: &mut Table<'_>, seen: &mut Vec<String>) -> Option<Measure> {
    let measurable = KINDS.0.iter().filter(|(_, kind)| kind.is_measurable());
    let measurable: Vec<(&str, Kind)> = measurable.copied().collect();
    let kind = table.need_kind("kind", OneOf(&measurable));
    let name = table.maybe("name", Text::RUN_NAME);
    let slow = table.or("slow", Flag, false);
    let term = kind?.read(table);
    let name = name?.unwrap_or_else(|| KINDS.word(kind.expect("is there")).to_owned());
    let key = if table.has("name") { "name" } else { "kind" };
    table.once(key, &name, seen, "; tell them apart by `name`");
    Some(Measure {
        term: term?,
        name,
        slow: slow?,
    })
}
