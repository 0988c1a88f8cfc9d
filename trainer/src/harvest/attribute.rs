//! Attributions at the positions of a harvest: what each component that is active comes from, and
//! the logits.
//!
//! A target is a component at the first of the examples that were taken by lot, which are any of the
//! positions where it is active, each as likely as the other; so a mean over them is one over all
//! positions where it is active, but for chance. The logits are looked at in as many rows, at
//! positions that are spread evenly. [`attribution`](crate::attribution) has what is measured. The
//! cost is a pass forward and backward of a row for each position of each target.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use spd_files::atomic::write_file;
use spd_harvest::{Attribution, Counts, Datasets as _, FORMAT, LOGITS, Source, write_attributions};
use xxhash_rust::xxh3::xxh3_64;

use super::merge::{opened, read};
use super::place::{ATTRIBUTED, HARVESTS, Place, SOME_ATTRIBUTED};
use super::removals::Asked;
use super::so_far::{Key, SoFar};
use super::{Harvesting, vocabulary};
use crate::attribution::{self, Attributed, Attributor, To};
use crate::component_set;
use crate::fault::Fault;
use crate::networks::LayerKind;
use crate::prompt::On;
use crate::rank::processor;
use crate::removal::rows;
use crate::run_file::Run;

/// Positions of a component, and of the logits, if nothing else is asked for.
const POSITIONS: [usize; 2] = [32, 1024];

/// A request for the attributions of a run.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Attribute<'a> {
    /// The run directory.
    pub run_dir: &'a Path,
    /// The harvest; `None` where the run has none.
    pub harvest: Option<&'a Path>,
    /// The directory of the table, in place of that of the harvest.
    pub out: Option<&'a Path>,
    /// Targets, `SITE:INDEX,...` or `logits`; none means all.
    pub to: &'a [String],
    /// Positions of each target, at most.
    pub positions: Option<usize>,
    /// Sources of a target that are kept.
    pub strongest: usize,
    /// CPU threads.
    pub threads: usize,
    /// Number of the GPU, if it runs on one.
    pub gpu: Option<usize>,
    /// Time between two saves.
    pub save_every: Duration,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
}

/// The attributions of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Attributions {
    /// The step of its checkpoint.
    pub step: u64,
    /// The directory of the table.
    pub dir: PathBuf,
    /// Components that are attributed, and whether the logits are; `None` if that was done before.
    pub targets: Option<(usize, bool)>,
}

/// Attributes the components of a harvest, and writes the table.
///
/// - `told`: how many targets are done, and how many there are
///
/// # Errors
///
/// Bad input, when the run is none of a language model, there is no harvest, or no
/// checkpoint of it any more, a target is none of its components, the directory has other
/// attributions, or there is too little memory; when the disk or a GPU refuses.
pub fn attribute(asked: &Attribute<'_>, told: &dyn Fn(u64, u64)) -> Result<Attributions, Fault> {
    let run = Run::load_resolved(&asked.run_dir.join("config.toml"))?;
    vocabulary(asked.run_dir, run.target.model.input())?;
    let harvest = asked.harvest.ok_or_else(|| {
        Fault::BadInput(format!(
            "{}: expected a harvest, found none; `spd-launch harvest {}` makes one",
            asked.run_dir.join(HARVESTS).display(),
            asked.run_dir.display()
        ))
    })?;
    let (counts, mut about) = read(harvest)?;
    about.run = asked.run_dir.to_owned();
    let place = Place {
        dir: asked.out.unwrap_or(harvest).to_owned(),
    };
    if asked.out.is_some() {
        place.check(&about, &counts.setup)?;
    }
    let mut of = opened(about, &counts, place, asked.threads)?;
    let targets = of.targets(&counts, asked.to)?;
    let subject = of.subject(&counts, asked)?;
    let mut found = Attributions {
        step: of.about.step,
        dir: of.place.dir.clone(),
        targets: None,
    };
    let done = found.dir.join(ATTRIBUTED);
    if done.is_file() {
        let text = spd_files::read(&done).with_context(|| done.display().to_string())?;
        if serde_json::from_slice(&text).ok() == Some(subject) {
            return Ok(found);
        }
        return Err(Fault::BadInput(format!(
            "{}: belongs to attributions of another harvest, or with other settings; give another directory with --out",
            done.display()
        )));
    }
    of.processor = processor(asked.gpu, &of.pool)?;
    of.keep_kernels()?;
    let mut attributors = of.attributors(&targets, asked)?;
    let _lock = of.place.take()?;
    let so_far = SoFar {
        path: found.dir.join(SOME_ATTRIBUTED),
        of: subject.clone(),
    };
    let measure = |keys: &[Key]| of.attribute(&counts, keys, &mut attributors, asked);
    let all = so_far.complete(&targets, asked.save_every, measure, told)?;
    write_attributions(&found.dir, &counts.setup, &all)?;
    let text = serde_json::to_vec_pretty(&subject).context("the attributions")?;
    write_file(&done, &[&text, b"\n"]).with_context(|| done.display().to_string())?;
    so_far.remove();
    let has_logits = all.contains_key(&of.logits());
    found.targets = Some((all.len() - usize::from(has_logits), has_logits));
    Ok(found)
}

impl Harvesting {
    /// The key of the logits, after those of all components.
    fn logits(&self) -> Key {
        (self.setup.sites.len(), 0)
    }

    /// The targets: components of which there are examples, behind other sites, and the
    /// logits.
    fn targets(&self, counts: &Counts, to: &[String]) -> Result<Vec<Key>, Fault> {
        let sites = &self.decomposition.sites;
        let is_all = to.is_empty();
        let all = |components: usize| match is_all {
            true => (0..components).collect(),
            false => BTreeSet::new(),
        };
        let mut sets: Vec<BTreeSet<usize>> =
            sites.iter().map(|site| all(site.components)).collect();
        for text in to.iter().filter(|text| *text != LOGITS) {
            let more = component_set::read("--to", text, sites)?;
            sets.iter_mut()
                .zip(more)
                .for_each(|(set, more)| set.extend(more));
        }
        let mut targets = Vec::new();
        for (index, number) in self.numbers()?.into_iter().enumerate() {
            let is_behind = sites[number].layer.kind != LayerKind::Embedding;
            if is_behind && self.setup.sites[index].activations {
                let set = sets[number].iter().map(|&component| (index, component));
                targets.extend(set.filter(|key| !counts.sample(key.0, key.1).is_empty()));
            }
        }
        if targets.is_empty() && sets.iter().any(|set| !set.is_empty()) {
            return Err(Fault::BadInput(
                "--to: expected components of which the harvest has examples, behind other sites, found none; give others, or logits"
                    .to_owned(),
            ));
        }
        let has_logits = is_all || to.iter().any(|text| text == LOGITS);
        targets.extend(has_logits.then_some(self.logits()));
        Ok(targets)
    }

    /// The subject of the attributions, in words that are the same wherever the run lies.
    fn subject(&self, counts: &Counts, asked: &Attribute<'_>) -> Result<Value, Fault> {
        let about = &self.about;
        let parts: Vec<(u16, u64)> = counts.each_part().collect();
        let counted = serde_json::to_vec(&(parts, &counts.setup)).context("the harvest")?;
        let of = asked
            .positions
            .map_or(POSITIONS, |positions| [positions; 2]);
        Ok(json!({
            "format": FORMAT,
            "name": about.name,
            "step": about.step,
            "checkpoint": about.checkpoint,
            "datasets": about.datasets,
            "harvest": format!("{:016x}", xxh3_64(&counted)),
            "alive": counts.setup.alive,
            "to": asked.to,
            "positions": { "component": of[0], "logits": of[1] },
            "strongest": asked.strongest,
        }))
    }

    /// The programs for targets of each kind, if there is memory for them.
    fn attributors(
        &self,
        targets: &[Key],
        asked: &Attribute<'_>,
    ) -> Result<BTreeMap<To, Attributor>, Fault> {
        let kind = |key: &Key| match *key == self.logits() {
            true => To::Logits,
            false => To::Components,
        };
        let kinds: BTreeSet<To> = targets.iter().map(kind).collect();
        let on = On {
            processor: &self.processor,
            fits: asked.fits,
        };
        let made = |to| -> Result<(To, Attributor), Fault> {
            Ok((
                to,
                Attributor::new(&self.decomposition, &self.store, to, &on)?,
            ))
        };
        kinds.into_iter().map(made).collect()
    }

    /// Attributes some components of a site, or the logits.
    fn attribute(
        &mut self,
        counts: &Counts,
        keys: &[Key],
        attributors: &mut BTreeMap<To, Attributor>,
        asked: &Attribute<'_>,
    ) -> Result<Vec<(Key, Attribution)>, Fault> {
        let (to, places) = match keys[0] == self.logits() {
            true => (
                To::Logits,
                self.spread(asked.positions.unwrap_or(POSITIONS[1]))?,
            ),
            false => {
                let most = asked.positions.unwrap_or(POSITIONS[0]);
                (To::Components, self.asked(counts, keys, most)?)
            }
        };
        let numbers = self.numbers()?;
        let attributor = attributors.get_mut(&to).context("its program is made")?;
        let targets: Vec<attribution::Asked<'_>> = places
            .iter()
            .map(|place| attribution::Asked {
                component: (to == To::Components)
                    .then(|| (numbers[place.component.0], place.component.1)),
                tokens: &place.tokens,
                position: place.position,
            })
            .collect();
        let most = rows(&self.decomposition);
        let mut sums: BTreeMap<Key, Sums> = BTreeMap::new();
        let pool = Arc::clone(&self.pool);
        pool.enter(|| {
            for (places, targets) in places.chunks(most).zip(targets.chunks(most)) {
                let found = attributor.measure(&self.decomposition, &mut self.store, targets)?;
                for (place, found) in places.iter().zip(found) {
                    sums.entry(place.component).or_default().add(&found);
                }
            }
            Ok::<_, Fault>(())
        })?;
        let sources = self.sources(&attributor.sites, &numbers);
        let of = |(key, sums): (Key, Sums)| -> Result<(Key, Attribution), Fault> {
            let found = sums.attribution(&sources, asked.strongest);
            let found = found.ok_or_else(|| {
                let name = self.setup.sites.get(key.0).map_or(LOGITS, |site| site.name.as_str());
                let component = key.1;
                Fault::NotFinite(format!(
                    "{name}:{component}: its attributions are not finite; the checkpoint cannot be looked at"
                ))
            });
            Ok((key, found?))
        };
        sums.into_iter().map(of).collect()
    }

    /// Positions of the text, for the logits: one in each of the first rows, which lie at all
    /// heights.
    fn spread(&mut self, most: usize) -> Result<Vec<Asked>, Fault> {
        let (t, component) = (self.setup.positions, self.logits());
        let datasets = (0_u16..).zip(&self.about.datasets);
        let datasets: Vec<(u16, u64)> = datasets.map(|(source, of)| (source, of.rows)).collect();
        let longest = datasets.iter().map(|of| of.1).max().unwrap_or(0);
        // Each dataset has its turn, as long as it has rows.
        let places = (0..longest).flat_map(|row| {
            let with_it = datasets.iter().filter(move |of| row < of.1);
            with_it.map(move |of| (of.0, row))
        });
        let places: Vec<(u16, u64)> = places.take(most).collect();
        let n = places.len();
        let asked =
            places
                .into_iter()
                .enumerate()
                .map(|(number, (source, row))| -> Result<Asked, Fault> {
                    let (_, tokens) = self.texts.row(source, row).context("a row of the text")?;
                    let position =
                        u32::try_from((2 * number + 1) * t / (2 * n)).context("a position")?;
                    Ok(Asked {
                        component,
                        tokens,
                        position,
                    })
                });
        asked.collect()
    }

    /// The sources of the numbers of a program: sites of the harvest and their components, `None`
    /// for the delta.
    ///
    /// - `sites`: of the run, in the order of the program
    fn sources(&self, sites: &[usize], numbers: &[usize]) -> Vec<(usize, Option<usize>)> {
        let of_site = |&site: &usize| {
            let index = numbers.iter().position(|&number| number == site);
            let index = index.unwrap_or(numbers.len());
            let components = (0..self.decomposition.sites[site].components).map(Some);
            components.chain([None]).map(move |of| (index, of))
        };
        sites.iter().flat_map(of_site).collect()
    }
}

/// Sums over the positions of a target.
#[derive(Default)]
struct Sums {
    positions: usize,
    target: f64,
    /// Of what comes from each source, and of its squares.
    sources: Vec<[f64; 2]>,
}

impl Sums {
    fn add(&mut self, found: &Attributed) {
        self.positions += 1;
        self.target += found.target;
        self.sources.resize(found.sources.len(), [0.0; 2]);
        for (sums, &source) in self.sources.iter_mut().zip(&found.sources) {
            let source = f64::from(source);
            sums[0] += source;
            sums[1] += source * source;
        }
    }

    /// Means, with the sources of the largest ones; of equal ones that of the earlier site and the
    /// lower number comes first. `None` if one is not finite.
    fn attribution(&self, sources: &[(usize, Option<usize>)], most: usize) -> Option<Attribution> {
        let n = self.positions as f64;
        let all = sources.iter().zip(&self.sources);
        let mut all: Vec<Source> = all
            .filter(|(_, sums)| sums[1] != 0.0)
            .map(|(&(site, component), sums)| Source {
                site,
                component,
                mean: sums[0] / n,
                mean_square: sums[1] / n,
            })
            .collect();
        let squares = all.iter().map(|source| source.mean_square);
        if !(squares.sum::<f64>() + self.target).is_finite() {
            return None;
        }
        all.sort_by(|a, b| b.mean.abs().total_cmp(&a.mean.abs()));
        all.truncate(most);
        Some(Attribution {
            positions: self.positions,
            target: self.target / n,
            sources: all,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strongest_sources_come_first_and_equal_ones_in_order() {
        let sources = [(0, Some(0)), (0, Some(1)), (0, None), (1, Some(0))];
        let mut sums = Sums::default();
        for (target, found) in [(3.0, [1.0, -2.0, 0.0, 1.0]), (1.0, [0.0, -1.0, 0.0, 0.0])] {
            sums.add(&Attributed {
                target,
                sources: found.to_vec(),
            });
        }
        let source = |component, site, mean, mean_square| Source {
            site,
            component: Some(component),
            mean,
            mean_square,
        };
        // Small whole numbers and halves of them are exact.
        let expected = Attribution {
            positions: 2,
            target: 2.0,
            sources: vec![source(1, 0, -1.5, 2.5), source(0, 0, 0.5, 0.5)],
        };
        assert_eq!(sums.attribution(&sources, 2), Some(expected));
        assert_eq!(sums.attribution(&sources, 9).unwrap().sources.len(), 3);
        sums.add(&Attributed {
            target: 0.0,
            sources: vec![0.0, 0.0, f32::NAN, 0.0],
        });
        assert_eq!(sums.attribution(&sources, 2), None);
    }
}
