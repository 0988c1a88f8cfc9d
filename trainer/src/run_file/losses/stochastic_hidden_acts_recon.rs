//! `kind = "stochastic_hidden_acts_recon"`: what goes into the sites, under masks that are drawn.

use serde::Serialize;

use super::{Routing, Settings, Sites};
use spd_configs::reader::Table;

/// Masks drawn between importance and 1, everywhere; what goes into each site is compared, not what comes out of
/// the network.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StochasticHiddenActsRecon;

impl Settings for StochasticHiddenActsRecon {
    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }

    fn routing(&self) -> Option<Routing> {
        Some(Routing::All)
    }

    fn is_stochastic(&self) -> bool {
        true
    }
}
