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

use crate::decomposition::{Decomposition, Draws, Front, Masking, SampleId, mask_values};

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

impl Decomposition {
    pub(super) fn recon(
        &self,
        b: &mut Builder,
        front: &Front,
        (index, term): (usize, &Term),
        draws: Draws,
    ) -> Result<Value> {
        let (masking, routing) = match *term {
            Term::UnmaskedRecon => (Masking::Ones, Routing::All),
            Term::CiMaskedRecon { routing } => (Masking::Importance, routing),
            Term::StochasticRecon { routing } => (Masking::Stochastic, routing),
            Term::Faithfulness | Term::ImportanceMinimality { .. } => {
                unreachable!("a reconstruction term")
            }
        };
        let samples = if masking == Masking::Stochastic {
            self.run.train.mask_samples
        } else {
            1
        };
        let mut passes = Vec::new();
        for k in 0..samples {
            let number =
                u8::try_from(index * samples + k).expect("a run has fewer than 200 mask samples");
            let sample = SampleId {
                number,
                name: format!("{}.m{k}", term.name()),
            };
            self.sample(b, front, (masking, routing), (draws, &sample), &mut passes)?;
        }
        let weight = 1.0 / passes.len() as f64;
        let terms: Vec<(f64, Value)> = passes.into_iter().map(|pass| (weight, pass)).collect();
        b.weighted_sum(&terms)
    }

    /// The passes of one mask sample: one over all sites, or one a site.
    fn sample(
        &self,
        b: &mut Builder,
        front: &Front,
        (masking, routing): (Masking, Routing),
        (draws, sample): (Draws, &SampleId),
        passes: &mut Vec<Value>,
    ) -> Result<()> {
        let routes = match routing {
            Routing::UniformK => draws
                .routes(b, front, sample, &self.sites)?
                .into_iter()
                .map(Some)
                .collect(),
            Routing::All | Routing::Layerwise => vec![None; self.sites.len()],
        };
        let mut masked = Vec::with_capacity(self.sites.len());
        for (index, site) in self.sites.iter().enumerate() {
            let how = (
                masking,
                self.run.importance.sampling,
                self.run.decomposition.delta,
            );
            masked.push((
                index,
                mask_values(b, front, (index, site), how, (draws, sample), routes[index])?,
            ));
        }
        let groups: Vec<&[_]> = match routing {
            Routing::Layerwise => masked.chunks(1).collect(),
            Routing::All | Routing::UniformK => vec![&masked[..]],
        };
        for group in groups {
            let output = self.masked_output(b, front, group)?;
            passes.push(divergence(
                b,
                self.run.train.output_loss,
                front.output,
                output,
            )?);
        }
        Ok(())
    }
}
