//! How much importance is there? The sparsity penalty of all sites, from the power sums of their gates: the sum over sites
//! and components of the mean over the site's rows. See [`ImportanceMinimality`] for the formula.

use spd_engine::ops::ImportanceMinimality;
use spd_engine::{Builder, Result, Value};

use crate::decomposition::{CleanPass, Decomposition};

impl Decomposition {
    /// The penalty, a scalar; the gradient flows to the importance functions.
    pub(super) fn importance_minimality(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        beta: f64,
    ) -> Result<Value> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a setting is rounded to f32"
        )]
        let beta = beta as f32;
        let terms: Vec<(f64, Value)> = clean_pass
            .sites
            .iter()
            .map(|site| {
                let op = ImportanceMinimality {
                    rows: site.rows,
                    beta,
                    ranks: 1,
                };
                Ok((1.0, b.importance_minimality(op, site.power_sums)?))
            })
            .collect::<Result<_>>()?;
        b.weighted_sum(&terms)
    }
}
