//! `ci_masked_recon`, `..._subset` and `..._layerwise`: do the important components alone compute
//! what the target does?

use serde::Serialize;
use spd_configs::reader::Table;

use super::recon::Reconstruction;
use crate::component_model::{Masking, Routing, Sites};

/// Masks equal to the importances, no delta.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CiMaskedRecon {
    /// Which sites go through components, and where.
    #[serde(flatten)]
    pub routing: Routing,
}

impl Reconstruction for CiMaskedRecon {
    const MASKING: Masking = Masking::Importance;

    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        Routing::read(table, sites).map(|routing| Self { routing })
    }

    fn routing(&self) -> Routing {
        self.routing
    }
}
