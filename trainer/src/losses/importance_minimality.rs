//! How much importance is there? The sparsity penalty of all sites, from the power sums of their gates: the sum over sites
//! and components of the mean over the site's rows. See [`ops::ImportanceMinimality`] for the formula.

use spd_engine::{Builder, Result, Value, ops};

use super::{LossInputs, LossTerm};
use crate::run_file::ImportanceMinimality;

impl LossTerm for ImportanceMinimality {
    /// The gradient flows to the importance functions.
    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a setting is rounded to f32"
        )]
        let beta = self.beta as f32;
        let sites = &from.clean_pass.sites;
        let sums: Vec<Value> = sites.iter().map(|site| site.power_sums).collect();
        let sums = all_reduce_rows(b, &sums)?;
        let terms = sites.iter().zip(sums).map(|(site, power_sums)| {
            let op = ops::ImportanceMinimality {
                rows: site.rows * b.blocks(),
                beta,
            };
            Ok((1.0, b.importance_minimality(op, power_sums)?))
        });
        let terms = terms.collect::<Result<Vec<_>>>()?;
        b.weighted_sum(&terms)
    }

    fn step_scalars(&self, fraction: f64) -> Vec<(&'static str, f64)> {
        vec![("p", exponent(self, fraction))]
    }
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

/// The exponent after `fraction` of the run: `p` until `anneal_start`, then straight to `p_final` at `anneal_end`.
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
