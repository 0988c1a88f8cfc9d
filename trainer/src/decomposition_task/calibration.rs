//! The start of conditioned logits: the factor of each component's activation is the reciprocal of
//! the 0.999-quantile of its size over some training rows, so that hardly any activation is beyond
//! the limits.
//!
//! All ranks look at the same rows, and find the same factors.

use spd_dataloader::Batch;
use spd_engine::Store;

use super::DecompositionTask;
use crate::component_model::input_scales;
use crate::data::{fill, training_feed};
use crate::fault::{Fault, Interrupt};
use crate::rounded::{rounded, whole};
use crate::task::CheckStop;

/// The part of the activations that are no larger than the quantile.
const PART: f64 = 0.999;

impl DecompositionTask {
    /// Sets the factors of activations, where they are not said.
    pub(super) fn calibrate(
        &mut self,
        store: &mut Store,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<(), Interrupt> {
        let run = &self.decomposition.run;
        let conditioning = run.importance.conditioning;
        let Some(tokens) = conditioning.and_then(|said| said.min_tokens) else {
            return Ok(());
        };
        let feed = training_feed(run.seed, run.eval.batch_size);
        let of_batch = self.decomposition.shape(feed.rows).examples() as u64;
        let batches = tokens.div_ceil(of_batch);
        let source = self.sources.train.clone();
        let (program, arena) = (&mut self.figures, &mut self.arena);
        let sites = &self.decomposition.sites;
        let mut found: Vec<Vec<Quantile>> = vec![Vec::new(); sites.len()];
        let mut batch = Batch::default();
        for index in 0..batches {
            check_stop()?;
            source.fill(&feed, index * feed.rows as u64, &mut batch)?;
            fill(program, &batch);
            program.parameters.step = u32::try_from(index).unwrap_or(u32::MAX);
            program.run_and_fetch(store, arena)?;
            for (site, found) in sites.iter().zip(&mut found) {
                let name = format!("activations {}", site.path());
                let values = program.output(&name, store, arena);
                let all = values.len() as u64 / site.components as u64 * batches;
                found.resize_with(site.components, || Quantile::of(all));
                for row in values.chunks_exact(site.components) {
                    for (quantile, value) in found.iter_mut().zip(row) {
                        quantile.add(value.abs());
                    }
                }
            }
        }
        for (site, found) in sites.iter().zip(found) {
            let mut factors = Vec::with_capacity(found.len());
            for (component, quantile) in found.into_iter().enumerate() {
                let value = quantile.value();
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Fault::BadInput(format!(
                        "[importance] conditioning: the activations of component {component} of `{}` have the quantile {value} over \
                         {tokens} tokens; expected one above 0; say input_scale in the place of min_tokens",
                        site.path()
                    ))
                    .into());
                }
                factors.push(rounded(1.0 / value));
            }
            for name in input_scales(site) {
                let slot = store.slot(&name).expect("logits are conditioned");
                store.change(slot, |held| held.copy_from_slice(&factors));
            }
        }
        Ok(())
    }
}

/// The quantile of numbers that come one by one: the largest of them are kept.
#[derive(Debug, Clone)]
struct Quantile {
    /// The values that it may lie between, and some more.
    kept: Vec<f32>,
    most: usize,
    /// How far it is from the smallest of those to the next.
    between: f64,
}

impl Quantile {
    /// That of so many numbers.
    fn of(all: u64) -> Self {
        let place = PART * all.saturating_sub(1) as f64;
        let below = whole(place) as u64;
        Self {
            kept: Vec::new(),
            most: usize::try_from(all - below).unwrap_or(usize::MAX),
            between: place - below as f64,
        }
    }

    fn add(&mut self, number: f32) {
        self.kept.push(number);
        if self.kept.len() > 2 * self.most + 64 {
            self.cut();
        }
    }

    /// Keeps the largest ones, in falling order.
    fn cut(&mut self) {
        self.kept.sort_unstable_by(|a, b| b.total_cmp(a));
        self.kept.truncate(self.most);
    }

    fn value(mut self) -> f64 {
        self.cut();
        let mut rising = self.kept.iter().rev().map(|&number| f64::from(number));
        let first = rising.next().unwrap_or(0.0);
        let second = rising.next().unwrap_or(first);
        first + self.between * (second - first)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::Pool;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::Conditioning;
    use crate::data::open;
    use crate::decomposition::Decomposition;
    use crate::task::Task as _;
    use crate::world::World;

    // 2,000 and 3 numbers: places 1997.001 and 1.998.
    #[test]
    fn a_quantile_is_between_two_of_the_largest() {
        for (all, expected) in [(2000, 1997.001), (3, 1.998), (1, 0.0)] {
            let mut quantile = Quantile::of(all);
            for number in 0..all {
                // In another order: 7 shares no factor with their number.
                quantile.add((7 * number % all) as f32);
            }
            let found = quantile.value();
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }

    #[test]
    fn factors_are_found_again() {
        let mut run = preset("tiny-resid", &Overrides::default()).unwrap().run;
        run.importance.conditioning = Some(Conditioning {
            output_scale: 1.0,
            input_scale: None,
            min_tokens: Some(1000),
        });
        run.eval.batches = 1;
        let begun = || {
            let mut store = Store::new();
            let decomposition = Decomposition::new(&run, &mut store).unwrap();
            let weights = decomposition.target.tensors().into_iter().map(|tensor| {
                let wave = |i: usize| 0.3 * (i as f32 * 1.3).sin();
                let values = (0..tensor.dims.iter().product()).map(wave).collect();
                (tensor.name, tensor.dims, values)
            });
            decomposition.set_target(&mut store, &weights.collect::<Vec<_>>());
            let (pool, world) = (Arc::new(Pool::single()), World::default());
            let sources = open(&run).unwrap();
            let task =
                DecompositionTask::new(decomposition, sources, &mut store, &pool.into(), &world);
            let mut task = task.unwrap();
            task.make_room().unwrap();
            task.begin(&mut store, &mut || Ok(())).unwrap();
            let sites = &task.decomposition.sites;
            let names = sites.iter().flat_map(input_scales);
            let factors = names.map(|name| store.get(store.slot(&name).unwrap()).to_vec());
            factors.collect::<Vec<_>>()
        };
        let factors = begun();
        assert_eq!(factors.len(), 8);
        for sides in factors.chunks(2) {
            assert!(sides[0] == sides[1] && sides[0].len() == 12);
            assert!(
                sides[0]
                    .iter()
                    .all(|factor| factor.is_finite() && *factor > 0.0)
            );
            let first = sides[0][0].to_bits();
            assert!(sides[0].iter().any(|factor| factor.to_bits() != first));
        }
        assert!(factors == begun());
    }
}
