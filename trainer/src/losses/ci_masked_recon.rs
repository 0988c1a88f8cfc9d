//! Do the important components alone compute what the target does?

use crate::run_file::{CiMaskedRecon, Routing};

use super::recon::Reconstruction;
use crate::decomposition::Masking;

impl Reconstruction for CiMaskedRecon {
    const MASKING: Masking = Masking::Importance;

    fn routing(&self) -> Routing {
        self.routing
    }
}
