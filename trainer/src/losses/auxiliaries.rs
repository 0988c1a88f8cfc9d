//! `auxiliaries` of a reconstruction: values inside of its masked passes that are compared with
//! those of the clean one, beside the output.
//!
//! ```text
//! L = distance of the output + sum over auxiliaries of coeff * mean over comparisons of distances
//! ```
//!
//! | `distance`                   | of a capture `x` from `y`, that of the clean pass             |
//! |------------------------------|---------------------------------------------------------------|
//! | `relative_squared_error`     | `sum (x - y)^2 / sum y^2` over all of it, in the whole batch  |
//! | `categorical_kl_from_logits` | divergence of `softmax x` from `softmax y`, mean over rows    |
//!
//! A capture is a value in a block ([`Tap`](crate::networks::Tap)), such as `resid_post.0`, or what
//! a layer writes, such as `out.h.0.mlp.c_fc`. An adversary climbs the distance of the output
//! alone, unless its objective is the whole term.
//!
//! # Keys of `[[loss]]`
//!
//! - all of ..._recon but stochastic_hidden_acts_recon: `auxiliaries` | none | | rows `{ name,
//!   coeff, comparisons }` of values inside of the pass that count too, each with comparisons
//!   `{ capture, distance }`, of which the mean is taken: `capture` is a value in a block such as
//!   `"resid_post.0"`, or what a layer writes, as in `"out.h.0.mlp.c_fc"`; `distance` is
//!   `"relative_squared_error"` or `"categorical_kl_from_logits"`
//! - pgd_recon..., persistent_pgd_recon..., merged_recon: `adversary_objective` | `"e2e"` | | what
//!   the adversary climbs: the distance of the output; or `"term"`, the loss with its auxiliaries

use std::fmt;

use serde::Serialize;
use spd_configs::values::{Number, Text, is_default};
use spd_configs::{all_read, reader::Table, words};
use spd_engine::ops::{Expr, Weight};
use spd_engine::{Builder, Result, Value};

use super::divergence::divergence;
use super::mean;
use crate::component_model::{CleanPass, MaskedPass};
use crate::run_file::OutputLoss;
use crate::run_file::schedule::{self, Schedule};

/// The auxiliaries of a loss, and what its adversary climbs.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Auxiliaries {
    /// In the order of the file.
    #[serde(rename = "auxiliaries", skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Auxiliary>,
    /// The objective of the adversary.
    #[serde(rename = "adversary_objective", skip_serializing_if = "is_default")]
    pub objective: AdversaryObjective,
}

/// The name of the output's distance among the parts of a loss.
pub(super) const OUTPUT: &str = "output";

/// None at all.
pub(crate) fn no_auxiliaries() -> &'static Auxiliaries {
    static NONE: Auxiliaries = Auxiliaries {
        rows: Vec::new(),
        objective: AdversaryObjective::E2e,
    };
    &NONE
}

/// An auxiliary of a loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Auxiliary {
    /// Its name.
    pub name: String,
    /// Its weight beside the output.
    pub coeff: Schedule,
    /// The comparisons of which it is the mean.
    pub comparisons: Vec<Comparison>,
}

/// A value of a masked pass that is compared with that of the clean one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The name of the value.
    pub capture: String,
    /// How far it is.
    pub distance: Distance,
}

words! {
    /// Distance between values.
    pub enum Distance {
        /// The squared error over the squares.
        RelativeSquaredError = "relative_squared_error",
        /// The divergence of the distributions whose logits they are.
        CategoricalKlFromLogits = "categorical_kl_from_logits",
    }
}

words! {
    /// The objective of an adversary.
    #[derive(Default)]
    pub enum AdversaryObjective {
        /// The distance of the output.
        #[default]
        E2e = "e2e",
        /// The loss with its auxiliaries.
        Term = "term",
    }
}

impl Auxiliaries {
    /// Reads its keys.
    ///
    /// - `is_attacked`: whether the loss has an adversary
    pub(super) fn read(table: &mut Table<'_>, is_attacked: bool) -> Option<Self> {
        let mut seen = Vec::new();
        let rows = table.rows_or_none("auxiliaries", |row| Auxiliary::read(row, &mut seen));
        let objective = match is_attacked {
            true => table.or(
                "adversary_objective",
                AdversaryObjective::WORDS,
                AdversaryObjective::E2e,
            ),
            false => Some(AdversaryObjective::E2e),
        };
        if let (Some([]), Some(AdversaryObjective::Term)) = (rows.as_deref(), objective) {
            table.refuse::<()>(
                "adversary_objective",
                "expected auxiliaries with it, found none: without them both objectives are one",
            );
        }
        all_read! { Self: rows, objective }
    }

    /// All values that are compared, by name.
    pub(crate) fn captures(&self) -> impl Iterator<Item = &str> {
        let comparisons = self.rows.iter().flat_map(|row| &row.comparisons);
        comparisons.map(|comparison| &*comparison.capture)
    }

    /// A distance of the output, and the others beside it.
    pub(super) fn beside(
        &self,
        b: &mut Builder,
        (loss, output): (&str, Value),
        clean_pass: &CleanPass,
        pass: &MaskedPass,
    ) -> Result<Value> {
        if self.rows.is_empty() {
            return Ok(output);
        }
        let mut terms = vec![(Weight::Known(1.0), output)];
        let values = self.values(b, clean_pass, pass)?;
        for (row, value) in self.rows.iter().zip(values) {
            let coeff = match row.coeff {
                Schedule::Constant(coeff) => Weight::Known(coeff),
                _ => Weight::Step(b.step_scalar(&row.coeff_name(loss))),
            };
            terms.push((coeff, value));
        }
        b.weighted_sum(&terms)
    }

    /// The value of each in a pass.
    pub(super) fn values(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        pass: &MaskedPass,
    ) -> Result<Vec<Value>> {
        let rows = self.rows.iter().map(|row| {
            let comparisons = row.comparisons.iter();
            let distances = comparisons.map(|comparison| comparison.value(b, clean_pass, pass));
            let distances = distances.collect::<Result<Vec<_>>>()?;
            mean(b, &distances)
        });
        rows.collect()
    }

    /// The step scalars of its weights.
    pub(super) fn step_scalars(&self, loss: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        let moving = |row: &&Auxiliary| !matches!(row.coeff, Schedule::Constant(_));
        let rows = self.rows.iter().filter(moving);
        rows.map(|row| (row.coeff_name(loss), row.coeff.at(step, steps)))
            .collect()
    }
}

/// As the plan shows them, behind the loss.
impl fmt::Display for Auxiliaries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        let rows = self.rows.iter();
        let rows = rows.map(|row| format!("{} {}", row.coeff, row.name));
        write!(f, " with {}", rows.collect::<Vec<_>>().join(", "))
    }
}

impl Auxiliary {
    /// - `seen`: the names of those before it
    fn read(row: &mut Table<'_>, seen: &mut Vec<String>) -> Option<Self> {
        let name = row.need("name", Text::RUN_NAME);
        let coeff = schedule::read(row, "coeff", Number::FINITE);
        let comparisons = row.rows("comparisons", |comparison| {
            let capture = comparison.need("capture", Text::ANY);
            let distance = comparison.need("distance", Distance::WORDS);
            all_read! { Comparison: capture, distance }
        });
        let name = name?;
        if name == OUTPUT {
            row.refuse::<()>(
                "name",
                "expected another name than that of the output's distance",
            );
        }
        row.once("name", &name, seen, "; add its comparisons");
        Some(Self {
            name,
            coeff: coeff?,
            comparisons: comparisons?,
        })
    }

    fn coeff_name(&self, loss: &str) -> String {
        format!("coeff/{loss}/{}", self.name)
    }
}

impl Comparison {
    /// Its share of the distance of a batch, a scalar: that of a block is a part of a mean over
    /// blocks.
    fn value(&self, b: &mut Builder, clean_pass: &CleanPass, pass: &MaskedPass) -> Result<Value> {
        let [y, x] = [&clean_pass.captures, &pass.captures].map(|captures| captures[&self.capture]);
        match self.distance {
            Distance::CategoricalKlFromLogits => divergence(b, OutputLoss::Kl, y, x),
            Distance::RelativeSquaredError => {
                let names = ["squared_error", "squared_error_grad"];
                let blocks = b.blocks() as f64;
                let square = |[y, x]: [Expr; 2]| (&x - &y) * (x - y);
                let errors = b.elementwise_sum(names, blocks, [y, x], square)?;
                let squares = b.sum_squares(y)?;
                let squares = b.all_reduce(squares)?;
                let names = ["relative_error", "relative_error_grad"];
                b.elementwise(names, [errors, squares], |[errors, squares]| {
                    errors / squares
                })
            }
        }
    }
}
