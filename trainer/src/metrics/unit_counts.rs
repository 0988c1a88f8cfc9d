//! Units of a nonlinearity that a component acts through, on average over the components of a site:
//! `units/<site>`, as the loss `nonlinearity_locality` counts them with a threshold of 4, and
//! `effective_units/<site>`. With `n_u` the length of the component's vector in unit `u`, the
//! latter is
//!
//! ```text
//! m (sum_u n_u)^2 / sum_u n_u^2
//! ```
//!
//! which has no threshold: it is `m` times the number of units, if all have the same length.
//!
//! # Keys of `[eval]`
//!
//! - `unit_counts` | false | | whether to count the units of nonlinearities that components act
//!   through, as `eval/units/<site>` and `eval/effective_units/<site>`

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::Flag;
use spd_engine::{Builder, Result, Value};

use super::{Before, Evaluated, Mean, Metric};
use crate::losses::nonlinearity_locality::{count, shares, vectors};
use crate::networks::{Alignment, Units};

/// Units that components act through.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnitCounts {
    /// Whether they are counted. Left out of the file where it says what every older file means.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unit_counts: bool,
}

/// Times an equal share at which a unit counts half.
const THRESHOLD: f32 = 4.0;

impl Metric for UnitCounts {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let unit_counts = table.or("unit_counts", Flag, false)?;
        Some(Self { unit_counts })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        if !self.unit_counts {
            return Ok(means);
        }
        let threshold = b.constant(THRESHOLD, &[])?;
        let model = on.from.model;
        for (index, site) in model.sites.iter().enumerate() {
            let Some(Alignment { side, units }) = site.layer.aligned else {
                continue;
            };
            let values = model.site_values(b, on.from.store, index)?;
            let vectors = vectors(b, values, side)?;
            let each = 1.0 / site.components as f64;
            let counted = count(b, vectors, units, threshold)?;
            let effective = effective(b, vectors, units)?;
            for (name, sum) in [("units", counted), ("effective_units", effective)] {
                means.push(Mean {
                    name: format!("{name}/{}", site.path()),
                    value: b.weighted_sum(&[(each, sum)])?,
                    count: 1,
                });
            }
        }
        Ok(means)
    }
}

/// The effective number of units of each vector f32 `[c, d]`, summed over all of them: a scalar.
fn effective(b: &mut Builder, vectors: Value, units: Units) -> Result<Value> {
    let shares = shares(b, vectors, units.count)?;
    let lengths = b.elementwise(["length", "length_grad"], [shares], |[s]| s.sqrt())?;
    let ones = b.constant(1.0, &[units.count, 1])?;
    let sums = b.matmul(lengths, ones)?;
    // Shares add up to the number of units.
    let factor = units.uses as f64 / units.count as f64;
    b.elementwise_sum(["square", "square_grad"], factor, [sums], |[x]| x.square())
}
