//! Removals of a harvest: what the output is without each component, where it is active.
//!
//! A component is removed at the first of the examples that were taken by lot, which are any of the
//! positions where it is active, each as likely as the other. The results are saved now
//! and then, beside the counts that they belong to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use serde_json::{Value, json};
use spd_engine::Executor;
use spd_files::atomic::write_file;
use spd_harvest::{Counts, Datasets as _, Removal};

use super::about::About;
use super::{Harvesting, Step};
use crate::fault::Fault;
use crate::removal::{Effects, Removed, rows};

/// Components that are removed between two looks at the clock.
const TOGETHER: usize = 32;

/// Removals by number of the site among those of the harvest, and of the component.
pub(super) type Removals = BTreeMap<(usize, usize), Removal>;

/// A row of text, and the position in it at which a component is removed.
struct Asked {
    component: usize,
    tokens: Vec<u32>,
    position: u32,
}

impl Harvesting {
    /// Removes each component that is active somewhere.
    pub(super) fn remove(
        &mut self,
        counts: &Counts,
        told: &(dyn Fn(Step) + Sync),
    ) -> Result<Removals, Fault> {
        let most = self.about.removals;
        if most == 0 {
            return Ok(Removals::new());
        }
        let saved = Saved::of(&self.place.dir, counts, &self.about);
        let mut found = saved.read();
        let program = self.decomposition.removal_program(&self.store)?;
        let mut program = Executor::planned(&program, &self.processor);
        program.parameters.seed = self.run.seed;
        let mut arena = self.processor.arena(program.plan().arena_bytes())?;
        let sites = self.setup.sites.clone();
        let all = counts.setup.components() as u64;
        let pool = Arc::clone(&self.pool);
        let (mut at, mut done) = (Instant::now(), 0);
        for (index, site) in sites.iter().enumerate() {
            let mut known = self.decomposition.sites.iter();
            let number = known.position(|other| other.path() == site.name);
            let number = number.context("a site of the run")?;
            let components: Vec<usize> = (0..site.components).collect();
            for together in components.chunks(TOGETHER) {
                done += together.len() as u64;
                if together
                    .iter()
                    .any(|&component| found.contains_key(&(index, component)))
                {
                    continue;
                }
                let asked = self.asked(counts, index, together)?;
                let removed: Vec<Removed<'_>> = asked
                    .iter()
                    .map(|asked| Removed {
                        component: (number, asked.component),
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
                for ((_, component), effect) in effects.all() {
                    let removal = Removal {
                        positions: effect.positions,
                        kl: effect.kl,
                        up: effect.up,
                        down: effect.down,
                    };
                    found.insert((index, component), removal);
                }
                told(Step::Removed(done, all));
                if at.elapsed() >= self.save_every {
                    saved.write(&found)?;
                    at = Instant::now();
                }
            }
        }
        Ok(found)
    }

    fn asked(
        &mut self,
        counts: &Counts,
        index: usize,
        components: &[usize],
    ) -> Result<Vec<Asked>, Fault> {
        let mut all = Vec::new();
        for &component in components {
            let examples = counts.sample(index, component);
            for example in examples.iter().take(self.about.removals) {
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
pub(super) struct Saved {
    path: PathBuf,
    /// The counts that they are of.
    of: Value,
}

impl Saved {
    pub(super) fn of(dir: &Path, counts: &Counts, about: &About) -> Self {
        let parts: Vec<(u16, u64)> = counts.each_part().collect();
        Self {
            path: dir.join("removals.json"),
            of: json!([about, counts.setup, parts]),
        }
    }

    fn read(&self) -> Removals {
        let read = || {
            let text = spd_files::read(&self.path).ok()?;
            let (of, all): (Value, Vec<Line>) = serde_json::from_slice(&text).ok()?;
            (of == self.of).then_some(all)
        };
        // A file that cannot be read is measured again.
        let all = read().unwrap_or_default().into_iter();
        all.map(|(place, positions, kl, up, down)| {
            let removal = Removal {
                positions,
                kl,
                up,
                down,
            };
            (place, removal)
        })
        .collect()
    }

    fn write(&self, found: &Removals) -> Result<(), Fault> {
        let all = found.iter().map(|(&place, removal)| {
            let Removal {
                positions,
                kl,
                up,
                down,
            } = removal;
            (place, positions, kl, up, down)
        });
        let text = serde_json::to_vec(&(&self.of, all.collect::<Vec<_>>()));
        let text = text.context("the removals")?;
        write_file(&self.path, &[&text]).with_context(|| self.path.display().to_string())?;
        Ok(())
    }

    pub(super) fn remove(&self) {
        // It is of no use once the tables are there.
        let _ = spd_files::atomic::remove(&self.path);
    }
}

type Moved = Vec<(u32, f64)>;

type Line = ((usize, usize), usize, f64, Moved, Moved);
