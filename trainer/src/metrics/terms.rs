//! The reconstruction terms of `[[eval.loss]]`. `loss/<name>`.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean};

pub(super) fn means(b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    let decomposition = on.decomposition;
    let terms = decomposition.measures(b, on.store, on.clean_pass, decomposition.draws)?;
    let means = terms.into_iter().map(|(name, value)| Mean {
        name: format!("loss/{name}"),
        value,
        count: on.clean_pass.shape.examples(),
    });
    Ok(means.collect())
}
