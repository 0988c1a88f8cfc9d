//! `stochastic_recon`, `..._subset` and `..._layerwise`: does the target's output stay whatever
//! unimportant components are ablated?

use serde::Serialize;
use spd_configs::reader::Table;

use super::recon::Reconstruction;
use crate::component_model::{Masking, Routing, Sites};

/// Masks drawn between importance and 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StochasticRecon {
    /// Which sites go through components, and where.
    #[serde(flatten)]
    pub routing: Routing,
}

impl Reconstruction for StochasticRecon {
    const MASKING: Masking = Masking::Stochastic;

    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        Routing::read(table, sites).map(|routing| Self { routing })
    }

    fn routing(&self) -> Routing {
        self.routing
    }
}
