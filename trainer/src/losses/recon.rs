//! Reconstruction losses: the divergence between the
//! target's output and that of masked passes.
//!
//! | term         | masks                    | delta           | passes                       |
//! |--------------|--------------------------|-----------------|------------------------------|
//! | `unmasked`   | 1                        | no              | 1                            |
//! | `ci_masked`  | importance               | no              | 1, or one a site (layerwise) |
//! | `stochastic` | between importance and 1 | if the run says | mask samples, times sites    |
//!
//! A term is the mean over its passes. Layerwise, the other sites run on their own weights, so
//! everything before the site is the clean pass, and is not computed again. Subsets are routed
//! position by position.

use spd_configs::reader::Table;
use spd_engine::{Builder, Result, Value};

use super::{Auxiliaries, LossInputs, LossTerm, mean};
use crate::component_model::{MaskedPass, Masking, Routing, Sites};

/// A loss that compares masked passes with the clean pass.
pub(super) trait Reconstruction {
    /// The kind of its masks.
    const MASKING: Masking;

    /// Whether it compares outputs.
    const OF_OUTPUTS: bool = true;

    /// Reads its keys.
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self>
    where
        Self: Sized;

    /// Which sites are masked, and where.
    fn routing(&self) -> Routing;

    /// How far a pass is from the clean one, a scalar.
    fn distance(&self, b: &mut Builder, from: &LossInputs<'_>, pass: &MaskedPass) -> Result<Value> {
        from.distance(b, pass)
    }
}

/// How many samples of a masking are taken.
fn samples(masking: Masking, mask_samples: usize) -> usize {
    match masking {
        Masking::Stochastic => mask_samples,
        _ => 1,
    }
}

impl<R: Reconstruction> LossTerm for R {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        R::read(table, sites)
    }

    fn is_measurable() -> bool {
        true
    }

    fn auxiliaries(table: &mut Table<'_>) -> Option<Auxiliaries> {
        match R::OF_OUTPUTS {
            true => Auxiliaries::read(table, false),
            false => Some(Auxiliaries::default()),
        }
    }

    fn routing(&self) -> Option<Routing> {
        Some(Reconstruction::routing(self))
    }

    fn is_stochastic(&self) -> bool {
        R::MASKING == Masking::Stochastic
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let mut distances = Vec::new();
        for k in 0..samples(R::MASKING, from.mask_samples) {
            for pass in self.passes(b, from, k)? {
                distances.push(self.distance(b, from, &pass)?);
            }
        }
        mean(b, &distances)
    }

    /// One over all sites, or one a site.
    fn passes(&self, b: &mut Builder, from: &LossInputs<'_>, k: usize) -> Result<Vec<MaskedPass>> {
        let (model, clean_pass) = (from.model, from.clean_pass);
        let (routing, sample) = (
            Reconstruction::routing(self),
            from.sample(k, &format!("m{k}")),
        );
        let masked = model.masks(b, clean_pass, R::MASKING, routing, &sample)?;
        let groups = masked.chunks(routing.sites_of_a_pass(masked.len()));
        groups
            .map(|group| model.masked_pass(b, clean_pass, group))
            .collect()
    }

    fn pass_count(&self, sites: usize, mask_samples: usize) -> usize {
        let passes = sites / Reconstruction::routing(self).sites_of_a_pass(sites);
        samples(R::MASKING, mask_samples).saturating_mul(passes)
    }
}
