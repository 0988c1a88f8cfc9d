//! The mean squared weight delta, as in the loss of that name. `faithfulness`.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Metric};

/// The mean squared weight delta.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Faithfulness;

impl Metric for Faithfulness {
    fn read(_: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        Some(Self)
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        Ok(vec![Mean {
            name: "faithfulness".into(),
            value: on.from.model.faithfulness(b, on.from.store)?,
            count: 1,
        }])
    }
}
