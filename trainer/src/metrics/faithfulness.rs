//! The mean squared weight delta, as in the loss of that name. `faithfulness`.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean, Metric};

pub(super) const METRIC: Metric = Metric::of_means(means);

fn means(b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    Ok(vec![Mean {
        name: "faithfulness".into(),
        value: on.decomposition.faithfulness(b, on.store)?,
        count: 1,
    }])
}
