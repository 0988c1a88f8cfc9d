//! `remembered`, a loss of tests whose state is sharded with the batch: the distance of each row's
//! importances from their average over steps. A row is one of the batch: each site has as many.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::ops::Expr;
use spd_engine::{Builder, Result, Value};

use super::{Extent, LossInputs, LossTerm, Sharing, StateTensor};
use crate::component_model::Sites;
use crate::networks::Start;
use crate::sites::Site;

/// Importances, compared with their average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Remembered;

impl LossTerm for Remembered {
    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        None
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let sites = from.clean_pass.sites.iter().zip(&from.model.sites);
        let distances = sites.map(|(clean, site)| {
            let average = from.state(b, &site.dashed());
            let names = ["remembered", "remembered_grad"];
            let (factor, values) = (1.0 / clean.rows as f64, [clean.importance, average]);
            let square = |[g, e]: [Expr; 2]| (&g - &e) * (g - e);
            Ok((1.0, b.elementwise_sum(names, factor, values, square)?))
        });
        let distances = distances.collect::<Result<Vec<_>>>()?;
        b.weighted_sum(&distances)
    }

    fn state(&self, sites: &[Site], _: &Extent) -> Vec<StateTensor> {
        let tensor = |site: &Site| StateTensor {
            name: site.dashed(),
            sharing: Sharing::Sharded,
            dims: vec![site.components],
            start: Start::Uniform(1.0),
        };
        sites.iter().map(tensor).collect()
    }

    fn update(&self, b: &mut Builder, from: &LossInputs<'_>, guards: &[Value]) -> Result<()> {
        for (clean, site) in from.clean_pass.sites.iter().zip(&from.model.sites) {
            let average = from.state(b, &site.dashed());
            b.keep_average(average, clean.importance, 0.25, guards)?;
        }
        Ok(())
    }
}
