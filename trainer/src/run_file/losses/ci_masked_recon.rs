//! `kind = "ci_masked_recon"`, `..._subset` and `..._layerwise`: masks equal to the importances.

use serde::Serialize;

use super::{Routing, Settings, Sites};
use spd_configs::reader::Table;

/// Masks equal to the importances, no delta.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CiMaskedRecon {
    /// Which sites go through components, and where.
    #[serde(flatten)]
    pub routing: Routing,
}

impl Settings for CiMaskedRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        Routing::read(table, sites).map(|routing| Self { routing })
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }
}
