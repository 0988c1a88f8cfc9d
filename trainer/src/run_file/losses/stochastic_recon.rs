//! `kind = "stochastic_recon"`, `..._subset` and `..._layerwise`: masks that are drawn.

use serde::Serialize;

use super::{Routing, Settings, Sites};
use spd_configs::reader::Table;

/// Masks drawn between importance and 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StochasticRecon {
    /// Which sites go through components, and where.
    #[serde(flatten)]
    pub routing: Routing,
}

impl Settings for StochasticRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        Routing::read(table, sites).map(|routing| Self { routing })
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }

    fn is_stochastic(&self) -> bool {
        true
    }
}
