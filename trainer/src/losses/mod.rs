//! What is minimised, or watched: each term of the run file as a scalar of the program.
//!
//! # Adding a loss
//!
//! - `configs/src/run.rs`: a variant of [`Term`] with its settings.
//! - `configs/src/losses.rs`: its `kind` in a run file, how its keys are read, and how it is routed.
//! - `configs/README.md`: a row for each key.
//! - `trainer/src/losses/`: what it computes from the clean pass and the masked passes. A reconstruction under another mask is one line
//!   of [`Decomposition::passes`]; anything else is a file here and a line of [`Decomposition::losses`].
//! - `trainer/src/run_plan.rs`: how many masked passes it makes.
//! - `trainer/tests/it/golden/unrecorded.rs`: a case that compares it and its gradients with candle's.

mod faithfulness;
mod hidden_acts;
mod importance_minimality;
mod pgd;
mod recon;

use spd_configs::Term;
use spd_engine::{Builder, Result, Store, Value};

pub use pgd::{Ascent, AttackedSite, SourceGradient};
pub use recon::{divergence, divergence_and_cross_entropy};

use crate::decomposition::{CleanPass, Decomposition, Draws, SampleId};

/// A term of the total loss in a program.
#[derive(Debug, Clone)]
pub struct Scalar {
    /// Name in metrics: `stochastic_recon_layerwise`.
    pub name: &'static str,
    /// Weight in the total.
    pub coeff: f64,
    /// Its value.
    pub value: Value,
}

/// Samples are numbered by term: training's from 0, those of the evaluation's terms from here, and the last one is that
/// of its usual masks. Run files with more are refused.
const FIRST_MEASURE: usize = 128;

/// The sample of the evaluation's usual masks.
pub(crate) const USUAL_MASKS: u8 = u8::MAX;

/// The draws of one term.
#[derive(Debug, Clone, Copy)]
struct TermDraws {
    from: Draws,
    /// Number of its first sample.
    first: usize,
}

impl TermDraws {
    /// The `k`-th mask sample of a term.
    fn mask_sample(self, term: &Term, k: usize) -> SampleId {
        self.sample(k, format!("{}.m{k}", term.name()))
    }

    fn sample(self, k: usize, name: String) -> SampleId {
        let number = u8::try_from(self.first + k).expect("a run has fewer than 128 samples a step");
        SampleId { number, name }
    }
}

impl Decomposition {
    /// All terms of the run, in order.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn losses(
        &self,
        b: &mut Builder,
        store: &Store,
        clean_pass: &CleanPass,
        draws: Draws,
    ) -> Result<Vec<Scalar>> {
        let terms = self.run.losses.iter().enumerate();
        terms
            .map(|(index, loss)| {
                let draws = TermDraws {
                    from: draws,
                    first: index * self.run.train.mask_samples,
                };
                let value = match &loss.term {
                    Term::Faithfulness => self.faithfulness(b, store)?,
                    Term::ImportanceMinimality { beta, .. } => {
                        self.importance_minimality(b, clean_pass, *beta)?
                    }
                    term => self.reconstruction(b, clean_pass, term, draws)?,
                };
                Ok(Scalar {
                    name: loss.term.name(),
                    coeff: loss.coeff,
                    value,
                })
            })
            .collect()
    }

    /// The terms that the run only measures, by name, in order.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn measures(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        draws: Draws,
    ) -> Result<Vec<(String, Value)>> {
        let measures = self.run.eval.losses.iter().enumerate();
        measures
            .map(|(index, measure)| {
                let draws = TermDraws {
                    from: draws,
                    first: FIRST_MEASURE + index * self.run.train.mask_samples,
                };
                let value = self.reconstruction(b, clean_pass, &measure.term, draws)?;
                Ok((measure.name.clone(), value))
            })
            .collect()
    }

    fn reconstruction(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        term: &Term,
        draws: TermDraws,
    ) -> Result<Value> {
        match term {
            Term::PgdRecon(pgd) => {
                let sample = draws.sample(0, term.name().to_owned());
                self.pgd_recon(b, clean_pass, pgd, (draws.from, &sample))
            }
            _ => self.recon(b, clean_pass, term, draws),
        }
    }
}

/// The mean of some scalars.
fn mean(b: &mut Builder, scalars: &[Value]) -> Result<Value> {
    let weight = 1.0 / scalars.len() as f64;
    let terms: Vec<(f64, Value)> = scalars.iter().map(|&scalar| (weight, scalar)).collect();
    b.weighted_sum(&terms)
}
