//! `importance_minimality`: how much importance is there? The sparsity penalty of all sites, from
//! the power sums of their gates: the sum over sites and components of the mean over the site's
//! rows. See [`ops::ImportanceMinimality`] for the formula; its frequency term is that of the loss
//! `frequency`, with the rows of the batch for its `reference_count`.
//!
//! # Keys of `[[loss]]`
//!
//! - importance_minimality: `p`; `p_final`, `anneal_start`, `anneal_end`, `beta` | ; `p`, 0, 1, 0 |
//!   `pnorm`; `p_anneal_final_p`, `p_anneal_start_frac`, `p_anneal_end_frac`, `beta` | exponent,
//!   its end, when it moves (fractions of the run), weight of the frequency term

use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Number, brief};
use spd_engine::ops::Penalty;
use spd_engine::{Builder, Result, Value, ops};

use super::{LossInputs, LossTerm, penalty};
use crate::component_model::Sites;
use crate::rounded::rounded;
use crate::run_file::reference::Made;

/// Sparsity of the importances.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ImportanceMinimality {
    /// Exponent at the start.
    pub p: f64,
    /// Exponent at the end of the annealing; `None` keeps `p`.
    pub p_final: Option<f64>,
    /// Fraction of the run at which annealing starts.
    pub anneal_start: f64,
    /// Fraction of the run at which annealing ends.
    pub anneal_end: f64,
    /// Weight of the frequency term.
    pub beta: f64,
}

/// Added to importances under the exponent.
const EPS: f64 = 1e-12;

impl LossTerm for ImportanceMinimality {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let p = table.need("p", Number::POSITIVE);
        let p_final = table.maybe("p_final", Number::POSITIVE);
        let anneal_start = table.or("anneal_start", Number::FRACTION, 0.0);
        let anneal_end = table.or("anneal_end", Number::FRACTION, 1.0);
        let beta = table.or("beta", Number::NOT_NEGATIVE, 0.0);
        let ends = ["anneal_start", "anneal_end"];
        table.in_order(ends, (anneal_start, anneal_end));
        all_read! { Self: p, p_final, anneal_start, anneal_end, beta }
    }

    fn from_reference(row: &mut Table<'_>, made: &mut Made) {
        let exponent = if row.has("pnorm_1") && !row.has("pnorm") {
            "pnorm_1"
        } else {
            "pnorm"
        };
        made.need(row, (exponent, "a number"), "p");
        row.raw("pnorm_1");
        row.raw("pnorm_2");
        made.carry(row, "beta", "beta");
        let eps = row.or("eps", Number::FINITE, EPS);
        if let Some(eps) = eps.filter(|eps| eps.to_bits() != EPS.to_bits()) {
            row.refuse::<()>(
                "eps",
                format!(
                    "expected 1e-12, which is the only one here, found {}",
                    brief(eps)
                ),
            );
        }
        // From the end on, the exponent never moves.
        let start = row.or("p_anneal_start_frac", Number::FRACTION, 1.0);
        let moves = start.is_none_or(|start| start < 1.0);
        if moves {
            made.carry(row, "p_anneal_final_p", "p_final");
            if row.has("p_anneal_final_p") {
                made.carry(row, "p_anneal_start_frac", "anneal_start");
                made.carry(row, "p_anneal_end_frac", "anneal_end");
            }
        }
        row.raw("p_anneal_final_p");
        row.raw("p_anneal_end_frac");
    }

    fn to_reference(&self, row: &mut Map<String, Json>) {
        row.insert("pnorm".into(), json!(self.p));
        row.insert("beta".into(), json!(self.beta));
        // There, an exponent without an end still has a course, of which nothing is left from 1 on.
        let start = match self.p_final {
            Some(last) => {
                row.insert("p_anneal_final_p".into(), json!(last));
                self.anneal_start
            }
            None => 1.0,
        };
        row.insert("p_anneal_start_frac".into(), json!(start));
        row.insert("p_anneal_end_frac".into(), json!(self.anneal_end));
    }

    fn penalty(&self) -> Option<(Penalty, &'static str)> {
        Some((Penalty::Power, "p"))
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let sums = penalty::sums(b, from)?;
        penalty::value(b, from, &sums, |rows| ops::ImportanceMinimality {
            beta: rounded(self.beta),
            ..ops::ImportanceMinimality::mean(rows)
        })
    }

    fn step_scalars(&self, _: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        let exponent = exponent(self, step as f64 / steps as f64);
        vec![("p".to_owned(), exponent)]
    }
}

/// The exponent after `fraction` of the run: `p` until `anneal_start`, then straight to `p_final`
/// at `anneal_end`.
pub fn exponent(penalty: &ImportanceMinimality, fraction: f64) -> f64 {
    let (p, start, end) = (penalty.p, penalty.anneal_start, penalty.anneal_end);
    match penalty.p_final {
        Some(last) if start < 1.0 && fraction >= start => {
            if fraction >= end {
                last
            } else {
                p + (last - p) * (fraction - start) / (end - start)
            }
        }
        _ => p,
    }
}
