//! L0: components of each site that are active in a row, on average. `l0/<site>`.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean};

pub(super) fn means(_b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    let sites = on.decomposition.sites.iter().zip(&on.clean_pass.sites);
    let means = sites.map(|(site, values)| Mean {
        name: format!("l0/{}", site.path()),
        value: values.active,
        count: values.rows,
    });
    Ok(means.collect())
}
