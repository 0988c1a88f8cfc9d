//! Does the network still say the same when components are ablated? Reconstruction losses: the divergence between the
//! target's output and that of masked passes.
//!
//! | term            | masks                       | delta           | passes                                   |
//! |-----------------|-----------------------------|-----------------|------------------------------------------|
//! | `unmasked`      | 1                           | no              | 1                                        |
//! | `ci_masked`     | importance                  | no              | 1, or one a site (layerwise)             |
//! | `stochastic`    | between importance and 1    | if the run says | mask samples, times sites (layerwise)    |
//!
//! A term is the mean over its passes. Layerwise, the other sites run on their own weights, so everything before the
//! site is the clean pass, and is not computed again. Subsets are routed position by position.

use spd_configs::{OutputLoss, Routing, Term};
use spd_engine::{Builder, Result, Value};

use super::hidden_acts::input_distance;
use super::{TermDraws, mean};
use crate::decomposition::{
    CleanPass, Decomposition, Draws, MaskedPass, Masking, SampleId, mask_values,
};

/// Divergence between the target's output and another, a scalar: the mean over positions of `KL(target || other)`, or the
/// mean over elements of the squared error. The gradient flows to the other.
///
/// # Errors
///
/// When the shapes differ.
pub fn divergence(b: &mut Builder, kind: OutputLoss, target: Value, other: Value) -> Result<Value> {
    match kind {
        OutputLoss::Mse => b.mse(other, target),
        OutputLoss::Kl => {
            let target_lse = b.log_sum_exp(target)?;
            b.kl_divergence(target, target_lse, other)
        }
    }
}

/// The divergence of tokens' logits as in [`divergence`], and their cross-entropy with labels u32 `[rows, positions]`, two
/// scalars: logits that both are asked of are made once at most.
///
/// # Errors
///
/// When the shapes differ.
pub fn divergence_and_cross_entropy(
    b: &mut Builder,
    target: Value,
    other: Value,
    labels: Value,
) -> Result<[Value; 2]> {
    let target_lse = b.log_sum_exp(target)?;
    b.kl_divergence_and_cross_entropy([target, target_lse, other], labels)
}

impl Decomposition {
    pub(super) fn recon(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        term: &Term,
        draws: TermDraws,
    ) -> Result<Value> {
        let samples = if term.is_stochastic() {
            self.run.train.mask_samples
        } else {
            1
        };
        let mut distances = Vec::new();
        for k in 0..samples {
            let sample = draws.mask_sample(term, k);
            for pass in self.passes(b, clean_pass, term, (draws.from, &sample))? {
                distances.push(match term {
                    Term::StochasticHiddenActsRecon => input_distance(b, clean_pass, &pass.inputs)?,
                    _ => self.output_distance(b, clean_pass, pass.output)?,
                });
            }
        }
        mean(b, &distances)
    }

    /// Divergence of an output from the target's.
    pub(super) fn output_distance(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        output: Value,
    ) -> Result<Value> {
        divergence(b, self.run.train.output_loss, clean_pass.output, output)
    }

    /// The passes of one mask sample of a term: one over all sites, or one a site.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    ///
    /// # Panics
    ///
    /// When the term has no masks, or an adversary chooses them.
    pub fn passes(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        term: &Term,
        (draws, sample): (Draws, &SampleId),
    ) -> Result<Vec<MaskedPass>> {
        let (masking, routing) = match *term {
            Term::UnmaskedRecon => (Masking::Ones, Routing::All),
            Term::CiMaskedRecon { routing } => (Masking::Importance, routing),
            Term::StochasticRecon { routing } => (Masking::Stochastic, routing),
            Term::StochasticHiddenActsRecon => (Masking::Stochastic, Routing::All),
            _ => unreachable!("a reconstruction whose masks are no adversary's"),
        };
        let routes = draws.routes(b, clean_pass, sample, (&self.sites, routing))?;
        let how = (
            masking,
            self.run.importance.sampling,
            self.run.decomposition.delta,
        );
        let mut masked = Vec::with_capacity(self.sites.len());
        for (index, site) in self.sites.iter().enumerate() {
            let site = (index, site);
            let values = mask_values(b, clean_pass, site, how, (draws, sample), routes[index])?;
            masked.push((index, values));
        }
        let together = match routing {
            Routing::Layerwise => 1,
            Routing::All | Routing::UniformK | Routing::Probability(_) => masked.len(),
        };
        let groups = masked.chunks(together);
        groups
            .map(|group| self.masked_pass(b, clean_pass, group))
            .collect()
    }
}
