//! Do the components alone compute what the target does?

use crate::run_file::{Routing, UnmaskedRecon};

use super::recon::Reconstruction;
use crate::decomposition::Masking;

impl Reconstruction for UnmaskedRecon {
    const MASKING: Masking = Masking::Ones;

    fn routing(&self) -> Routing {
        Routing::All
    }
}
