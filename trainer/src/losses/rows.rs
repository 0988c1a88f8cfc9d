//! `[[loss]]` and `[[eval.loss]]`: a loss and what a run does with it.
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
use spd_configs::values::{Flag, Number, OneOf, Text};

use super::{KINDS, Kind, Term};

/// One term of the total loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Row")]
pub struct Loss {
    /// Weight in the total.
    pub coeff: f64,
    /// The loss.
    pub term: Term,
}

/// A term that is measured on held-out batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Row")]
pub struct Measure {
    /// Its name in metrics, `eval/loss/<name>`.
    pub name: String,
    /// Whether it is measured in slow evaluations alone.
    pub slow: bool,
    /// The loss.
    pub term: Term,
}

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<&'static str>) -> Option<Loss> {
    let kind = table.need_kind("kind", OneOf(KINDS));
    let coeff = table.need("coeff", Number::FINITE);
    let term = kind?.read(table);
    let name = OneOf(KINDS).word(kind?);
    if seen.contains(&name) {
        table.refuse::<()>(
            "kind",
            format!("found \"{name}\" twice; add up the coefficients"),
        );
    }
    seen.push(name);
    Some(Loss {
        coeff: coeff?,
        term: term?,
    })
}

/// Reads the terms of the evaluation in turn; `seen` holds the names of those before.
pub(crate) fn read_measure(table: &mut Table<'_>, seen: &mut Vec<String>) -> Option<Measure> {
    let measurable = KINDS.iter().filter(|(_, kind)| kind.is_measurable());
    let measurable: Vec<(&str, Kind)> = measurable.copied().collect();
    let kind = table.need_kind("kind", OneOf(&measurable));
    let name = table.maybe("name", Text::RUN_NAME);
    let slow = table.or("slow", Flag, false);
    let term = kind?.read(table);
    let name = name?.unwrap_or_else(|| OneOf(KINDS).word(kind.expect("is there")).to_owned());
    if seen.contains(&name) {
        let key = if table.has("name") { "name" } else { "kind" };
        table.refuse::<()>(
            key,
            format!("found {name:?} twice; tell them apart by `name`"),
        );
    }
    seen.push(name.clone());
    Some(Measure {
        name,
        slow: slow?,
        term: term?,
    })
}

/// A `[[loss]]` or `[[eval.loss]]` as it is written.
#[derive(Serialize)]
struct Row {
    kind: &'static str,
    name: Option<String>,
    slow: Option<bool>,
    coeff: Option<f64>,
    #[serde(flatten)]
    term: Term,
}

impl From<Loss> for Row {
    fn from(Loss { coeff, term }: Loss) -> Self {
        Self {
            kind: term.name(),
            name: None,
            slow: None,
            coeff: Some(coeff),
            term,
        }
    }
}

impl From<Measure> for Row {
    fn from(Measure { name, slow, term }: Measure) -> Self {
        Self {
            kind: term.name(),
            name: Some(name),
            slow: slow.then_some(true),
            coeff: None,
            term,
        }
    }
}
