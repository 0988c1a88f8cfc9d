//! Removals of a harvest: what the output is without each component, where it is active.
//!
//! A component is removed at the first of the examples that were taken by lot, which are any of the
//! positions where it is active, each as likely as the other.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use serde_json::json;
use spd_engine::Executor;
use spd_harvest::{Counts, Datasets as _, Removal};

use super::about::About;
use super::so_far::{Key, SoFar};
use super::{Harvesting, Step};
use crate::fault::Fault;
use crate::removal::{Effects, Removed, rows};

/// A row of text, and the position in it at which a component is active.
pub(super) struct Asked {
    pub(super) component: Key,
    pub(super) tokens: Vec<u32>,
    pub(super) position: u32,
}

impl Harvesting {
    /// Removes each component that is active somewhere.
    pub(super) fn remove(
        &mut self,
        counts: &Counts,
        told: &(dyn Fn(Step) + Sync),
    ) -> Result<BTreeMap<Key, Removal>, Fault> {
        let most = self.about.removals;
        if most == 0 {
            return Ok(BTreeMap::new());
        }
        let program = self.decomposition.removal_program(&self.store)?;
        let mut program = Executor::planned(&program, &self.processor);
        program.parameters.seed = self.run.seed;
        let mut arena = self.processor.arena(program.plan().arena_bytes())?;
        let numbers = self.numbers()?;
        let pool = Arc::clone(&self.pool);
        let of_sites = self.setup.sites.iter().enumerate();
        let all =
            of_sites.flat_map(|(index, site)| (0..site.components).map(move |of| (index, of)));
        let all: Vec<Key> = all.collect();
        let so_far = so_far(&self.place.dir, counts, &self.about);
        let save_every = self.save_every;
        let measure = |keys: &[Key]| -> Result<Vec<(Key, Removal)>, Fault> {
            let asked = self.asked(counts, keys, most)?;
            let removed: Vec<Removed<'_>> = asked
                .iter()
                .map(|asked| Removed {
                    component: (numbers[asked.component.0], asked.component.1),
                    tokens: &asked.tokens,
                    positions: std::slice::from_ref(&asked.position),
                    weight: 1.0,
                    only_there: false,
                })
                .collect();
            let mut effects = Effects::default();
            pool.enter(|| {
                let mut batches = removed.chunks(rows(&self.decomposition));
                batches.try_for_each(|batch| {
                    let on = (&mut program, &mut self.store, &mut arena);
                    effects.measure(&self.decomposition, on, batch)
                })
            })?;
            let site = keys[0].0;
            let removals = effects.all().into_iter().map(|((_, component), effect)| {
                let removal = Removal {
                    positions: effect.positions,
                    kl: effect.kl,
                    up: effect.up,
                    down: effect.down,
                };
                ((site, component), removal)
            });
            Ok(removals.collect())
        };
        so_far.complete(&all, save_every, measure, &|done, all| {
            told(Step::Removed(done, all));
        })
    }

    /// The number of each site of the harvest among those of the run.
    pub(super) fn numbers(&self) -> Result<Vec<usize>, Fault> {
        let number = |site: &spd_harvest::Site| -> Result<usize, Fault> {
            let mut known = self.decomposition.sites.iter();
            let number = known.position(|other| other.path() == site.name);
            Ok(number.context("a site of the run")?)
        };
        self.setup.sites.iter().map(number).collect()
    }

    /// The first examples by lot of some components.
    pub(super) fn asked(
        &mut self,
        counts: &Counts,
        keys: &[Key],
        most: usize,
    ) -> Result<Vec<Asked>, Fault> {
        let mut all = Vec::new();
        for &component in keys {
            let examples = counts.sample(component.0, component.1);
            for example in examples.iter().take(most) {
                let row = self.texts.row(example.source, example.row);
                let (_, tokens) = row.context("the text of an example")?;
                all.push(Asked {
                    component,
                    tokens,
                    position: example.position,
                });
            }
        }
        Ok(all)
    }
}

/// The file of removals so far.
pub(super) fn so_far(dir: &Path, counts: &Counts, about: &About) -> SoFar {
    let parts: Vec<(u16, u64)> = counts.each_part().collect();
    SoFar {
        path: dir.join("removals.json"),
        of: json!([about, counts.setup, parts]),
    }
}
