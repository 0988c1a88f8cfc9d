//! Does the network still compute it the same way? `stochastic_hidden_acts_recon`: what goes into
//! each site in a masked pass, against what goes into it in the clean one.
//!
//! `sum over sites of |x_masked - x_clean|^2 / sum over sites of numel(x)`, a mean over elements,
//! and the mean of that over mask samples; all sites are masked at all positions, as in
//! `stochastic_recon`. A site that no other site lies before has the same input in both passes. It
//! counts as it does in the reference: no error, and its elements in the denominator; where all
//! sites are such, the term is 0. The inputs of an embedding are tokens, which are the same in all
//! passes and do not count.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::{Builder, DType, Result, Value};

use super::LossInputs;
use super::recon::Reconstruction;
use crate::component_model::{CleanPass, MaskedPass, Masking, Routing, Sites};

/// Masks drawn between importance and 1, everywhere; what goes into each site is compared, not what
/// comes out of the network.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StochasticHiddenActsRecon;

impl Reconstruction for StochasticHiddenActsRecon {
    const MASKING: Masking = Masking::Stochastic;
    const OF_OUTPUTS: bool = false;

    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }

    fn routing(&self) -> Routing {
        Routing::All
    }

    fn distance(&self, b: &mut Builder, from: &LossInputs<'_>, pass: &MaskedPass) -> Result<Value> {
        let errors = hidden_acts_errors(b, from.clean_pass, pass)?;
        if errors.is_empty() {
            return b.constant(0.0, &[]);
        }
        let terms = errors.into_iter().map(|error| (error.part, error.mean));
        b.weighted_sum(&terms.collect::<Vec<_>>())
    }
}

/// How far what goes into a site in a masked pass is from what goes into it in the clean one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HiddenActsError {
    /// Number of the site.
    pub(crate) site: usize,
    /// Its part of the elements of all sites' inputs.
    pub(crate) part: f64,
    /// The mean of the squares over elements, a scalar.
    pub(crate) mean: Value,
}

/// The errors of all sites that another one lies before.
pub(crate) fn hidden_acts_errors(
    b: &mut Builder,
    clean_pass: &CleanPass,
    pass: &MaskedPass,
) -> Result<Vec<HiddenActsError>> {
    let elements = |b: &Builder, value: Value| match b.ty(value) {
        ty if ty.dtype == DType::F32 => ty.len() as f64,
        _ => 0.0,
    };
    let total: f64 = pass.inputs.iter().map(|&input| elements(b, input)).sum();
    let mut errors = Vec::new();
    for (number, (site, &input)) in clean_pass.sites.iter().zip(&pass.inputs).enumerate() {
        if input != site.input {
            errors.push(HiddenActsError {
                site: number,
                part: elements(b, input) / total,
                mean: b.mse(input, site.input)?,
            });
        }
    }
    Ok(errors)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Alone, Pool, Processor, Store};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;
    use crate::losses::Term;
    use crate::metrics::Measure;
    use crate::parameters::HALT;

    /// The term's value at the starting values, over sites that match `pattern`.
    fn measured(pattern: &str) -> f32 {
        let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
        run.decomposition.sites[0].pattern = pattern.into();
        let term = Term::StochasticHiddenActsRecon(StochasticHiddenActsRecon);
        run.eval.metrics.terms.rows.push(Measure {
            name: "hidden".into(),
            slow: false,
            term: term.clone(),
        });
        run.losses[0].term = term;
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        decomposition.initialise(&mut store);
        for slot in store.slots().collect::<Vec<_>>() {
            if store.name(slot).starts_with("target_model.") {
                let wave = |(i, value): (usize, &mut f32)| *value = (i as f32).sin();
                store.get_mut(slot).iter_mut().enumerate().for_each(wave);
            }
        }
        store.zeros(HALT, &[2]);
        // A step on nothing else has no gradient, and is planned all the same.
        decomposition.step_program(&store).unwrap();
        let (program, _) = decomposition.eval_program(&store, true).unwrap();
        let processor = Processor::Cpu(Arc::new(Pool::single()));
        let mut executor = Alone::new(&program, &processor).unwrap();
        executor.run_and_fetch(&mut store).unwrap();
        executor.output("eval/loss/hidden", &store)[0]
    }

    #[test]
    fn the_term_is_zero_where_no_site_is_behind_another() {
        assert_eq!(measured("transformer.h.1.attn.c_attn").to_bits(), 0);
        assert!(measured("transformer.h.*.attn.c_attn") > 0.0);
    }
}
