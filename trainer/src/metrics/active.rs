//! L0: components that are active in a row of a site, on average. `l0/<site>`. Heads are rows where
//! each head meets the matrix, and none counts as a position of its own.
//!
//! # Keys of `[eval]`
//!
//! - `alive_threshold` | 0 | `ci_alive_threshold` | importance above which a component is active,
//!   from 0 to 1

use serde::Serialize;
use spd_configs::{reader::Table, values::Number};
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Metric};

/// Active components.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Active {
    /// A component counts as active above this importance.
    pub alive_threshold: f64,
}

impl Metric for Active {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let alive_threshold = table.or("alive_threshold", Number::FRACTION, 0.0)?;
        Some(Self { alive_threshold })
    }

    fn means(&self, _: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let sites = on.from.model.sites.iter().zip(&on.from.clean_pass.sites);
        let means = sites.map(|(site, values)| Mean {
            name: format!("l0/{}", site.path()),
            value: values.active,
            count: values.rows,
        });
        Ok(means.collect())
    }
}
