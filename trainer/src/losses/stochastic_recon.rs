//! Does the target's output stay whatever unimportant components are ablated?

use crate::run_file::{Routing, StochasticRecon};

use super::recon::Reconstruction;
use crate::decomposition::Masking;

impl Reconstruction for StochasticRecon {
    const MASKING: Masking = Masking::Stochastic;

    fn routing(&self) -> Routing {
        self.routing
    }
}
