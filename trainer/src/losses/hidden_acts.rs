//! Does the network still compute it the same way? `stochastic_hidden_acts_recon`: what goes into each site in a masked
//! pass, against what goes into it in the clean one.
//!
//! `sum over sites of |x_masked - x_clean|^2 / sum over sites of numel(x)`, a mean over elements, and the mean of that over
//! mask samples; all sites are masked at all positions, as in `stochastic_recon`. A site that no other site lies before has
//! the same input in both passes. It counts as it does in the reference: no error, and its elements in the denominator.

use spd_configs::{Routing, Term};
use spd_engine::{Builder, Result, Store, Value};

use super::{TermDraws, mean};
use crate::decomposition::{Decomposition, Draws, Front, Masking, SampleId};
use crate::fault::Fault;

impl Decomposition {
    pub(super) fn hidden_acts(
        &self,
        b: &mut Builder,
        front: &Front,
        term: &Term,
        draws: TermDraws,
    ) -> Result<Value> {
        let mut distances = Vec::new();
        for k in 0..self.run.train.mask_samples {
            let sample = draws.mask_sample(term, k);
            let how = (Masking::Stochastic, Routing::All);
            for pass in self.passes(b, front, how, (draws.from, &sample))? {
                distances.push(input_distance(b, front, &pass.inputs)?);
            }
        }
        mean(b, &distances)
    }

    /// Refuses losses that are zero whatever the components are.
    pub(crate) fn check_losses(&self, store: &Store) -> std::result::Result<(), Fault> {
        let trained = self.run.losses.iter().map(|loss| ("[[loss]]", &loss.term));
        let measured = &self.run.eval.losses;
        let measured = measured.iter().map(|m| ("[[eval.loss]]", &m.term));
        let mut terms = trained.chain(measured);
        let Some((table, term)) =
            terms.find(|(_, term)| matches!(term, Term::StochasticHiddenActsRecon))
        else {
            return Ok(());
        };
        let mut b = Builder::new();
        let front = self.front(&mut b, store, self.shape(1), &Draws::Counters)?;
        let sample = SampleId {
            number: 0,
            name: String::new(),
        };
        let how = (Masking::Zeros, Routing::All);
        let passes = self.passes(&mut b, &front, how, (Draws::Counters, &sample))?;
        if passes.iter().any(|pass| depends(&front, &pass.inputs)) {
            return Ok(());
        }
        let sites: Vec<&str> = self.sites.iter().map(|site| site.path()).collect();
        Err(Fault::BadInput(format!(
            "{table} {}: expected a site behind another, whose input it could change, found {}; decompose an earlier \
             layer too, or leave the term out",
            term.name(),
            sites.join(", ")
        )))
    }
}

/// Whether any site's input is another than in the clean pass. What is computed alike is one value.
fn depends(front: &Front, inputs: &[Value]) -> bool {
    let mut pairs = front.sites.iter().zip(inputs);
    pairs.any(|(site, &input)| site.input != input)
}

fn input_distance(b: &mut Builder, front: &Front, inputs: &[Value]) -> Result<Value> {
    let elements = |b: &Builder, value: Value| b.ty(value).len() as f64;
    let total: f64 = inputs.iter().map(|&input| elements(b, input)).sum();
    let mut terms = Vec::new();
    for (site, &input) in front.sites.iter().zip(inputs) {
        if input != site.input {
            terms.push((elements(b, input) / total, b.mse(input, site.input)?));
        }
    }
    b.weighted_sum(&terms)
}

#[cfg(test)]
mod tests {
    use spd_configs::{Loss, Measure, Run};

    use super::*;
    use crate::bench::{Overrides, preset};

    /// One site in the middle of a network that has others.
    fn one_site() -> Run {
        let preset = preset("tiny-gpt2-h1", &Overrides::default());
        preset.unwrap().run
    }

    fn refused(run: &Run) -> String {
        match Decomposition::new(run, &mut Store::new()) {
            Err(Fault::BadInput(line)) => line,
            other => panic!("{:?}", other.map(|made| made.sites)),
        }
    }

    #[test]
    fn a_site_behind_no_other_is_refused() {
        let why = "stochastic_hidden_acts_recon: expected a site behind another, whose input it could change, found \
                   transformer.h.1.attn.c_attn; decompose an earlier layer too, or leave the term out";
        let term = Term::StochasticHiddenActsRecon;
        let mut trained = one_site();
        trained.losses.push(Loss {
            coeff: 1.0,
            term: term.clone(),
        });
        assert_eq!(refused(&trained), format!("[[loss]] {why}"));
        let mut measured = one_site();
        measured.eval.losses.push(Measure {
            name: "any".into(),
            term,
        });
        assert_eq!(refused(&measured), format!("[[eval.loss]] {why}"));
        // With the block before it there is something to compare.
        measured.decomposition.sites[0].pattern = "transformer.h.*.attn.c_attn".into();
        assert!(Decomposition::new(&measured, &mut Store::new()).is_ok());
    }
}
