//! What is minimised, or watched: each term of the run file as a scalar of the program.
//!
//! # Adding a loss
//!
//! - `trainer/src/run_file/losses/`: a file with its struct, its keys, their defaults and their checks, and a line of `losses!`.
//! - `configs/README.md`: a row for each key.
//! - `trainer/src/losses/`: a file that implements [`LossTerm`] for the struct, and a line of [`loss_term`].
//! - `trainer/tests/it/golden/`: the loss in candle, in `candle.rs`, and a case of `unrecorded.rs` that compares the two.

mod ci_masked_recon;
mod faithfulness;
mod importance_minimality;
mod pgd_recon;
mod recon;
mod stochastic_hidden_acts_recon;
mod stochastic_recon;
mod unmasked_recon;

use spd_engine::{Builder, Result, Store, Value};

use crate::run_file::Term;

pub use importance_minimality::exponent;
pub use pgd_recon::{Ascent, AttackedSite, SourceGradient, ascents};
pub use recon::{divergence, divergence_and_cross_entropy};
pub(crate) use stochastic_hidden_acts_recon::hidden_acts_errors;

use crate::decomposition::{CleanPass, Decomposition, Draws, MaskSample, MaskedPass};

/// A loss in a program.
pub trait LossTerm {
    /// Its value, a scalar.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value>;

    /// The masked passes that its value compares with the clean one, those of its `k`-th mask sample.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn passes(
        &self,
        _: &mut Builder,
        _from: &LossInputs<'_>,
        _k: usize,
    ) -> Result<Vec<MaskedPass>> {
        Ok(Vec::new())
    }

    /// How often its value passes through a target of so many sites.
    fn pass_count(&self, _sites: usize, _mask_samples: usize) -> usize {
        0
    }

    /// The step scalars that its value reads, after this fraction of the run.
    fn step_scalars(&self, _fraction: f64) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// A loss by its settings.
pub fn loss_term(term: &Term) -> &dyn LossTerm {
    match term {
        Term::Faithfulness(loss) => loss,
        Term::ImportanceMinimality(loss) => loss,
        Term::UnmaskedRecon(loss) => loss,
        Term::CiMaskedRecon(loss) => loss,
        Term::StochasticRecon(loss) => loss,
        Term::StochasticHiddenActsRecon(loss) => loss,
        Term::PgdRecon(loss) => loss,
    }
}

/// What a loss is computed from.
#[derive(Debug, Clone, Copy)]
pub struct LossInputs<'p> {
    /// The decomposition.
    pub decomposition: &'p Decomposition,
    /// Where its parameters lie.
    pub store: &'p Store,
    /// The batch in the clean pass.
    pub clean_pass: &'p CleanPass,
    /// The loss by its name in a run file, which the names of given draws begin with.
    pub name: &'static str,
    /// Where its draws come from.
    pub draws: Draws,
    /// Number of its first mask sample.
    pub first_sample: usize,
}

impl<'p> LossInputs<'p> {
    fn first(
        decomposition: &'p Decomposition,
        store: &'p Store,
        clean_pass: &'p CleanPass,
        draws: Draws,
    ) -> Self {
        Self {
            decomposition,
            store,
            clean_pass,
            name: "",
            draws,
            first_sample: 0,
        }
    }

    /// The value of the next loss, which has the next samples.
    fn next_value(&mut self, b: &mut Builder, term: &Term) -> Result<Value> {
        self.name = term.name();
        let value = loss_term(term).value(b, self)?;
        self.first_sample += self.decomposition.run.train.mask_samples;
        Ok(value)
    }

    /// The `k`-th mask sample, its draws called `<name>.<suffix>`.
    fn sample(&self, k: usize, suffix: &str) -> MaskSample {
        let number = self.first_sample + k;
        MaskSample {
            draws: self.draws,
            number: u8::try_from(number).expect("a run has fewer than 128 samples a step"),
            name: format!("{}.{suffix}", self.name),
        }
    }

    /// Divergence of an output from the target's, a scalar.
    fn output_distance(&self, b: &mut Builder, output: Value) -> Result<Value> {
        let kind = self.decomposition.run.train.output_loss;
        divergence(b, kind, self.clean_pass.output, output)
    }
}

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
        let mut from = LossInputs::first(self, store, clean_pass, draws);
        let losses = self.run.losses.iter();
        losses
            .map(|loss| {
                Ok(Scalar {
                    name: loss.term.name(),
                    coeff: loss.coeff,
                    value: from.next_value(b, &loss.term)?,
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
        store: &Store,
        clean_pass: &CleanPass,
        draws: Draws,
    ) -> Result<Vec<(String, Value)>> {
        let mut from = LossInputs::first(self, store, clean_pass, draws);
        from.first_sample = FIRST_MEASURE;
        let measures = self.run.eval.losses.iter();
        measures
            .map(|measure| Ok((measure.name.clone(), from.next_value(b, &measure.term)?)))
            .collect()
    }
}

/// The mean of some scalars.
fn mean(b: &mut Builder, scalars: &[Value]) -> Result<Value> {
    let weight = 1.0 / scalars.len() as f64;
    let terms: Vec<(f64, Value)> = scalars.iter().map(|&scalar| (weight, scalar)).collect();
    b.weighted_sum(&terms)
}
