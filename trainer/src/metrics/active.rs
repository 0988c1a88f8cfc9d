//! L0: components that are active in a row of a site, on average. `l0/<site>`. Heads are rows where
//! each head meets the matrix, and none counts as a position of its own.
//!
//! Slow evaluations: `l0_above_0.01/<site>` and `l0_above_0.1/<site>`, whatever the threshold of
//! L0 is. Many importances are small and not 0 if they are far apart.
//!
//! # Keys of `[eval]`
//!
//! - `alive_threshold` | 0 | `ci_alive_threshold` | importance above which a component is active,
//!   from 0 to 1

use serde::Serialize;
use spd_configs::{reader::Table, values::Number};
use spd_engine::ops::Expr;
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Metric};

/// Active components.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Active {
    /// A component counts as active above this importance.
    pub alive_threshold: f64,
}

/// Thresholds of slow evaluations.
const ABOVE: [(&str, f32); 2] = [("l0_above_0.01", 0.01), ("l0_above_0.1", 0.1)];

impl Metric for Active {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let alive_threshold = table.or("alive_threshold", Number::FRACTION, 0.0)?;
        Some(Self { alive_threshold })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        for (site, values) in on.from.model.sites.iter().zip(&on.from.clean_pass.sites) {
            let mut add = |name: &str, value| {
                means.push(Mean {
                    name: format!("{name}/{}", site.path()),
                    value,
                    count: values.rows,
                });
            };
            add("l0", values.active);
            for (name, threshold) in ABOVE.into_iter().filter(|_| on.is_slow) {
                let counts = ["count_above", "count_above_grad"];
                let (each, importances) = (1.0 / values.rows as f64, [values.importance]);
                let one = |[importance]: [Expr; 1]| {
                    Expr::from(1.0).where_positive(&(importance - threshold))
                };
                add(name, b.elementwise_sum(counts, each, importances, one)?);
            }
        }
        Ok(means)
    }
}
