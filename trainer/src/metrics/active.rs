//! L0: components that are active in a row, on average. `l0/<site>`; and `l0/<subset>`, of all
//! sites of an `[[eval.subset]]`.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean, Metric};
use crate::run_file::Subset;
use crate::task::Measured;

pub(super) const METRIC: Metric = Metric {
    means,
    derived: |means, run| derived(means, &run.eval.subsets),
};

fn means(_b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    let sites = on.decomposition.sites.iter().zip(&on.clean_pass.sites);
    let means = sites.map(|(site, values)| Mean {
        name: format!("l0/{}", site.path()),
        value: values.active,
        count: values.rows,
    });
    Ok(means.collect())
}

/// Sums over the sites of each subset.
fn derived(means: &[(String, f64)], subsets: &[Subset]) -> Measured {
    let sum = |subset: &Subset| {
        let sites = means.iter().filter_map(|(name, l0)| {
            let path = name.strip_prefix("eval/l0/")?;
            subset.has(path).then_some(l0)
        });
        (format!("eval/l0/{}", subset.name), sites.sum())
    };
    subsets.iter().map(sum).collect()
}
