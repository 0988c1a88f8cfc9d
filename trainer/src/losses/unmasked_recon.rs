//! `unmasked_recon`: do the components alone compute what the target does?

use serde::Serialize;
use spd_configs::reader::Table;

use super::recon::Reconstruction;
use crate::component_model::{Masking, Routing, Sites};

/// All masks 1, no delta.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct UnmaskedRecon;

impl Reconstruction for UnmaskedRecon {
    const MASKING: Masking = Masking::Ones;

    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }

    fn routing(&self) -> Routing {
        Routing::All
    }
}
