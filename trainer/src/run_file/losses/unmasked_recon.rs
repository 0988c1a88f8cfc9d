//! `kind = "unmasked_recon"`: the summed components, without the delta.

use serde::Serialize;

use super::{Routing, Settings, Sites};
use spd_configs::reader::Table;

/// All masks 1, no delta.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct UnmaskedRecon;

impl Settings for UnmaskedRecon {
    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }

    fn routing(&self) -> Option<Routing> {
        Some(Routing::All)
    }
}
