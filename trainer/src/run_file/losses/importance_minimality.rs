//! `kind = "importance_minimality"`: the sparsity penalty.

use serde::Serialize;

use super::{Settings, Sites};
use spd_configs::{
    reader::Table,
    values::{Number, brief},
};

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

impl Settings for ImportanceMinimality {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let p = table.need("p", Number::POSITIVE);
        let p_final = table.maybe("p_final", Number::POSITIVE);
        let anneal_start = table.or("anneal_start", Number::FRACTION, 0.0);
        let anneal_end = table.or("anneal_end", Number::FRACTION, 1.0);
        let beta = table.or("beta", Number::NOT_NEGATIVE, 0.0);
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
        })
    }

    fn reads_power_sums(&self) -> bool {
        true
    }
}
