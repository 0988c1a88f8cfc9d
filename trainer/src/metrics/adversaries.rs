//! Held-out rows under the adversaries that live on through training, all of them attacked, at all
//! sites: `adversary/<loss>`, the loss of the output; `adversary/<loss>/<site>` and
//! `adversary/<loss>/sites`, the errors of what comes out of each site and of all, as
//! `site_outputs` has them. In slow evaluations.
//!
//! Sources are those that the last step left. If they are of rows of the batch, each held-out
//! row draws one of the training batch, the same at all sites, with equal chances; of a batch in
//! shards, one of the shard that it is in. Over many rows the evaluation meets the adversary that
//! the training batch met. Other sources are as they are. The loss is that of a training step but
//! for its batch: a source is the worst for rows that are gone.
//!
//! # Keys of `[eval]`
//!
//! - `adversaries` | false | `PersistentPGDReconEval` | whether slow evaluations measure held-out
//!   rows under the sources of adversaries that live on, as `eval/adversary/<loss>` and
//!   `eval/adversary/<loss>/<site>`

use serde::Serialize;
use spd_configs::{reader::Table, values::Flag};
use spd_engine::{Builder, Result};

use super::site_outputs::errors;
use super::{Before, Evaluated, Mean, Metric};
use crate::losses::{LossInputs, divergence};

/// Held-out rows under adversaries that live on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Adversaries {
    /// Whether they are measured. Left out of the file where it says what every older file means.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub adversaries: bool,
}

impl Metric for Adversaries {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let adversaries = table.or("adversaries", Flag, false)?;
        Some(Self { adversaries })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        if !self.adversaries || !on.is_slow {
            return Ok(means);
        }
        for loss in on.losses {
            let Some(adversary) = loss.term.term().adversary() else {
                continue;
            };
            let name = loss.term.name();
            let from = LossInputs { name, ..on.from };
            let pass = adversary.held_out(b, &from)?;
            let target = from.clean_pass.output;
            let value = divergence(b, from.output_loss, target, pass.output)?;
            let name = format!("adversary/{name}");
            means.push(on.mean(name.clone(), value));
            let mut of_sites = errors(b, on, &pass, &name)?;
            if let Some(all) = of_sites.last_mut() {
                all.name += "/sites";
            }
            means.extend(of_sites);
        }
        Ok(means)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::ops::{Draw, Mask, MaskValues};
    use spd_engine::{Alone, Builder, Pool, Store, Type};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::Routing;
    use crate::decomposition::{Decomposition, Draws};
    use crate::losses::adversary::{Adversary, Optimizer, SOURCE_ROW, Scope, SourceDtype};
    use crate::losses::{Auxiliaries, Loss, PersistentPgdRecon, Term};
    use crate::parameters::HALT;
    use crate::run_file::Schedule;

    /// Rows of the training batch that held-out ones take their sources of.
    const TAKEN: [u32; 4] = [2, 0, 2, 5];

    /// A toy with an adversary that has a source for each element of a batch of eight.
    fn toy() -> (Decomposition, Store) {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        run.train.batch_size = 8;
        run.eval.batch_size = TAKEN.len();
        run.eval.metrics.adversaries.adversaries = true;
        let term = Term::PersistentPgdRecon(PersistentPgdRecon {
            routing: Routing::All,
            adversary: Adversary {
                scope: Scope::PerBatchElement,
                pool: None,
                optimizer: Optimizer::Sgd,
                lr: Schedule::Constant(0.1),
                n_warmup_steps: 0,
                start_frac: 0.0,
                sigmoid: false,
                source_dtype: SourceDtype::Float32,
            },
            n_samples: 1,
            route_warmup: false,
        });
        let coeff = Schedule::Constant(1.0);
        run.losses.push(Loss {
            term,
            coeff,
            auxiliaries: Auxiliaries::default(),
        });
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        store.hold_blocks(0..1, 1);
        decomposition.initialise(&mut store);
        store.zeros(HALT, &[2]);
        for slot in store.slots().collect::<Vec<_>>() {
            if store.name(slot).starts_with("losses.persistent") {
                let wave = |(i, value): (usize, &mut f32)| *value = 0.5 + 0.4 * (i as f32).sin();
                let values = store.get_mut(slot).iter_mut();
                values.enumerate().for_each(wave);
            }
        }
        (decomposition, store)
    }

    /// An output of a program on four rows of features.
    fn output(b: &Builder, store: &mut Store, name: &str, sources: &[(String, Vec<f32>)]) -> f32 {
        let mut executor = Alone::new(b, &Arc::new(Pool::single()).into()).unwrap();
        let input = executor.input("input").iter_mut().enumerate();
        input.for_each(|(i, value)| *value = 0.5 + 0.5 * (i as f32 * 0.7).cos());
        if executor.has_input(SOURCE_ROW) {
            executor.input_u32(SOURCE_ROW).copy_from_slice(&TAKEN);
        }
        for (name, values) in sources {
            executor.input(name).copy_from_slice(values);
        }
        executor.run_and_fetch(store).unwrap();
        executor.output(name, store)[0]
    }

    // The same pass, given the sources of those rows: to the bit.
    #[test]
    fn held_out_rows_take_the_sources_of_rows_of_training() {
        let (decomposition, mut store) = toy();
        let (program, _) = decomposition.eval_program(&store, true).unwrap();
        let name = "eval/adversary/persistent_pgd_recon";
        let found = output(&program, &mut store, name, &[]);

        let mut b = Builder::new();
        let shape = decomposition.shape(TAKEN.len());
        let clean_pass = decomposition.clean_pass(&mut b, &store, shape, &Draws::Counters);
        let clean_pass = clean_pass.unwrap();
        let mut sources = Vec::new();
        let mut masked = Vec::new();
        for (index, site) in decomposition.sites.iter().enumerate() {
            let mut given = |kind: &str, dims: &[usize], each: usize| {
                let of = format!("losses.persistent_pgd_recon.{kind}.{}", site.dashed());
                let slot = store.slot(&of).unwrap();
                let held = store.shards(slot).held;
                let values = store.get(held.first().map_or(slot, |(_, slot)| *slot));
                let rows = TAKEN.iter().map(|&row| row as usize * each);
                let values = rows.flat_map(|row| values[row..row + each].to_vec());
                sources.push((of.clone(), values.collect()));
                b.input(&of, &Type::f32(dims)).unwrap()
            };
            let c = site.components;
            let components = given("sources", &[TAKEN.len(), c], c);
            let delta = given("delta_sources", &[TAKEN.len()], 1);
            let values = MaskValues {
                mask: Mask::Between(Draw::Given),
                importance: Some(clean_pass.sites[index].importance),
                given: Some(components),
                delta: Some(delta),
                route: None,
            };
            masked.push((index, values));
        }
        let pass = decomposition
            .masked_pass(&mut b, &clean_pass, &masked)
            .unwrap();
        let kind = decomposition.run.train.output_loss;
        let value = divergence(&mut b, kind, clean_pass.output, pass.output).unwrap();
        b.output("loss", value);
        let expected = output(&b, &mut store, "loss", &sources);
        assert!(
            expected > 0.0 && found.to_bits() == expected.to_bits(),
            "{found} {expected}"
        );
    }
}
