//! The reconstruction terms of `[[eval.loss]]`. `loss/<name>`.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean, Metric};

pub(super) const METRIC: Metric = Metric::of_means(means);

fn means(b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    let decomposition = on.decomposition;
    let terms = decomposition.measures(b, on.store, on.clean_pass, decomposition.draws)?;
    // Terms that are left out are built all the same, so that the draws of others stay, and are
    // never computed.
    let terms = terms.into_iter().zip(&decomposition.run.eval.losses);
    let terms = terms.filter(|(_, said)| on.is_slow || !said.slow);
    let means = terms.map(|((name, value), _)| Mean {
        name: format!("loss/{name}"),
        value,
        count: on.clean_pass.shape.examples(),
    });
    Ok(means.collect())
}
