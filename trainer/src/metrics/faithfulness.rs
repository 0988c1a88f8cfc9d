//! The mean squared weight delta, as in the loss of that name; never relative. `faithfulness`.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Metric};
use crate::losses;

/// The mean squared weight delta.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Faithfulness;

impl Metric for Faithfulness {
    fn read(_: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        Some(Self)
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let absolute = losses::Faithfulness::default();
        Ok(vec![Mean {
            name: "faithfulness".into(),
            value: absolute.of(b, on.from.model, on.from.store)?,
            count: 1,
        }])
    }
}
