//! `importance_minimality`: how much importance is there? The sparsity penalty of all sites, from
//! the power sums of their gates: the sum over sites and components of the mean over the site's
//! rows. See [`ops::ImportanceMinimality`] for the formula.
//!
//! With a half-life, the frequency term reads `f^`, an exponential average of the sums over steps
//! that starts unbiased, in place of the sums `s` of the batch: `Phi(f^)` with the gradient
//! `Phi'(f^)` as if `f^` were `s`. The first step is as without it. The averages are the state of
//! the loss, the same on all ranks.
//!
//! # Keys of `[[loss]]`
//!
//! - importance_minimality: `p`; `p_final`, `anneal_start`, `anneal_end`, `beta` | ; `p`, 0, 1, 0 |
//!   `pnorm`; `p_anneal_final_p`, `p_anneal_start_frac`, `p_anneal_end_frac`, `beta` | exponent,
//!   its end, when it moves (fractions of the run), weight of the frequency term
//! - importance_minimality: `frequency_halflife` | the sums of each batch | | steps after which a
//!   batch counts half in the frequency term, which then reads an exponential average of the sums
//!   over steps

use std::f64::consts::LN_2;

use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::{Number, brief};
use spd_engine::{Builder, Result, Value, ops};

use super::{LossInputs, LossTerm, Sharing, StateTensor};
use crate::component_model::Sites;
use crate::networks::Start;
use crate::run_file::reference::Made;
use crate::sites::Site;

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
    /// Steps after which an observation counts half in the frequency term, which then reads an
    /// exponential average of the sums over steps instead of those of the batch; `None` for the
    /// batch alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_halflife: Option<f64>,
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
        let frequency_halflife = table.maybe("frequency_halflife", Number::POSITIVE);
        if let (Some(Some(_)), Some(beta)) = (frequency_halflife, beta)
            && beta <= 0.0
        {
            let message = "expected `beta` above 0 with it, which weighs the frequency term";
            table.refuse::<()>("frequency_halflife", message);
        }
        if let (Some(start), Some(end)) = (anneal_start, anneal_end)
            && start >= end
        {
            let key = if table.has("anneal_end") {
                "anneal_end"
            } else {
                "anneal_start"
            };
            let message = format!(
                "expected anneal_start below anneal_end, found {} and {}",
                brief(start),
                brief(end)
            );
            table.refuse::<()>(key, message);
        }
        Some(Self {
            p: p?,
            p_final: p_final?,
            anneal_start: anneal_start?,
            anneal_end: anneal_end?,
            beta: beta?,
            frequency_halflife: frequency_halflife?,
        })
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

    fn left_out(&self) -> Option<&'static str> {
        self.frequency_halflife.map(|_| "frequency_halflife")
    }

    /// It belongs to training.
    fn is_measurable() -> bool {
        false
    }

    fn reads_power_sums(&self) -> bool {
        true
    }

    /// The gradient flows to the importance functions.
    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let sums = all_power_sums(b, from)?;
        let sites = from.clean_pass.sites.iter().zip(&from.model.sites);
        let terms = sites.zip(sums).map(|((clean, site), sums)| {
            let rows = clean.rows * b.blocks();
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a setting is rounded to f32"
            )]
            let beta = self.beta as f32;
            let op = ops::ImportanceMinimality { rows, beta };
            let Some(weight) = self.weight() else {
                return Ok(vec![(1.0, b.importance_minimality(op, sums)?)]);
            };
            let average = from.state(b, &state_name(site));
            let correction = b.step_scalar(CORRECTION);
            let smooth = b.average(average, sums, weight, correction)?;
            let penalty = b.importance_minimality(op, smooth)?;
            // The penalty has the average in both of its factors: the first is to be of this batch.
            let names = ["unsmooth", "unsmooth_grad"];
            let factor = 1.0 / rows as f64;
            let unsmooth = b.elementwise_sum(names, factor, [sums, smooth], |[s, e]| s - e)?;
            Ok(vec![(1.0, penalty), (1.0, unsmooth)])
        });
        let terms = terms.collect::<Result<Vec<_>>>()?;
        b.weighted_sum(&terms.concat())
    }

    fn step_scalars(&self, fraction: f64, steps: u64) -> Vec<(&'static str, f64)> {
        let mut scalars = vec![("p", exponent(self, fraction))];
        if let Some(halflife) = self.frequency_halflife {
            let halves = (steps + 1) as f64 / halflife;
            scalars.push((CORRECTION, -(-LN_2 * halves).exp_m1()));
        }
        scalars
    }

    /// An average of the power sums of each site.
    fn state(&self, sites: &[Site]) -> Vec<StateTensor> {
        let sites = sites.iter().filter(|_| self.frequency_halflife.is_some());
        let tensor = |site: &Site| StateTensor {
            name: state_name(site),
            sharing: Sharing::Replicated,
            dims: vec![site.components],
            start: Start::Zeros,
        };
        sites.map(tensor).collect()
    }

    fn update(&self, b: &mut Builder, from: &LossInputs<'_>, guards: &[Value]) -> Result<()> {
        let Some(weight) = self.weight() else {
            return Ok(());
        };
        let sums = all_power_sums(b, from)?;
        for (site, sums) in from.model.sites.iter().zip(sums) {
            let average = from.state(b, &state_name(site));
            b.keep_average(average, sums, weight, guards)?;
        }
        Ok(())
    }
}

/// The step scalar that takes the start from zero out of averages.
const CORRECTION: &str = "frequency_correction";

fn state_name(site: &Site) -> String {
    format!("frequency.{}", site.dashed())
}

impl ImportanceMinimality {
    /// The weight of the newest observation in the average over steps, where there is one.
    fn weight(&self) -> Option<f32> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a setting is rounded to f32"
        )]
        let weight = |halflife: f64| -(-LN_2 / halflife).exp_m1() as f32;
        self.frequency_halflife.map(weight)
    }
}

/// The power sums of each site over the whole batch.
fn all_power_sums(b: &mut Builder, from: &LossInputs<'_>) -> Result<Vec<Value>> {
    let sites = from.clean_pass.sites.iter();
    let sums: Vec<Value> = sites.map(|site| site.power_sums).collect();
    all_reduce_rows(b, &sums)
}

/// Sums of rows, f32 `[c]` each, over all blocks, by one all-reduce.
fn all_reduce_rows(b: &mut Builder, rows: &[Value]) -> Result<Vec<Value>> {
    if b.blocks() == 1 {
        return Ok(rows.to_vec());
    }
    let joined = b.concatenate(rows)?;
    let sum = b.all_reduce(joined)?;
    let mut end = 0;
    let slice = |&row: &Value| {
        let start = end;
        end += b.ty(row).len();
        b.slice(sum, start..end)
    };
    rows.iter().map(slice).collect()
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
