//! Harvests of one checkpoint as one: of several datasets, or of shards of one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use spd_engine::{Pool, Processor};
use spd_harvest::{Counts, load};

use super::about::{self, About, Dataset};
use super::place::{COUNTS, Place};
use super::text::Texts;
use super::{Harvesting, Opened, SAVE_EVERY, Step};
use crate::fault::Fault;

/// Adds up harvests, and writes the files of all of them into `out`. Returns what was harvested, in
/// words.
///
/// # Errors
///
/// Bad input, when a directory holds no harvest, they are of several checkpoints or settings, two
/// of them count the same rows, or the run or the data are gone; when the disk refuses.
pub fn merge(
    dirs: &[PathBuf],
    out: &Path,
    threads: usize,
    told: &(dyn Fn(Step) + Sync),
) -> Result<String, Fault> {
    let mut all: Option<(Counts, About)> = None;
    for dir in dirs {
        let (mut counts, of) = read(dir)?;
        let Some((sum, about)) = &mut all else {
            all = Some((counts, of));
            continue;
        };
        if !about.is_of_same(&of) || about.removals != of.removals || sum.setup != counts.setup {
            return Err(Fault::BadInput(format!(
                "{}: expected a harvest of step {} of {} with the settings of {}, found another; merge harvests of one checkpoint",
                dir.display(),
                about.step,
                about.name,
                dirs[0].display()
            )));
        }
        add_datasets(about, of, &mut counts)?;
        if sum.overlaps(&counts) {
            return Err(Fault::BadInput(format!(
                "{}: counts rows that another of the harvests counts too; merge shards, or other datasets",
                dir.display()
            )));
        }
        sum.add(&counts);
    }
    let (counts, about) = all.context("a harvest to merge")?;
    let place = Place {
        dir: out.to_owned(),
    };
    place.check(&about, &counts.setup)?;
    let mut harvesting = opened(about, &counts, place, threads)?;
    let _lock = harvesting.place.take()?;
    harvesting.complete(counts, told)
}

/// The counts of a harvest, and its subject.
pub(super) fn read(dir: &Path) -> Result<(Counts, About), Fault> {
    let path = dir.join(COUNTS);
    if !path.is_file() {
        return Err(Fault::BadInput(format!(
            "{}: expected a harvest, found no {COUNTS}; run `spd-launch harvest` to its end first",
            dir.display()
        )));
    }
    let (counts, of) = load(&path)?;
    let of = serde_json::from_value(of)
        .map_err(|error| Fault::BadInput(format!("{}: its subject: {error}", path.display())))?;
    Ok((counts, of))
}

/// Adds the datasets of a harvest to those of the ones before, and has its counts name them so.
fn add_datasets(about: &mut About, of: About, counts: &mut Counts) -> Result<(), Fault> {
    let mut numbers = Vec::with_capacity(of.datasets.len());
    for dataset in of.datasets {
        let mut known = about.datasets.iter();
        let known = known.position(|other| other.identity() == dataset.identity());
        numbers.push(u16::try_from(known.unwrap_or(about.datasets.len())));
        if known.is_none() {
            about.datasets.push(dataset);
        }
    }
    let numbers: Result<Vec<u16>, _> = numbers.into_iter().collect();
    let numbers = numbers.map_err(|_| Fault::BadInput("merge: too many datasets".into()))?;
    counts.renumber(&numbers);
    Ok(())
}

/// The run behind harvests, and all of their text.
pub(super) fn opened(
    about: About,
    counts: &Counts,
    place: Place,
    threads: usize,
) -> Result<Harvesting, Fault> {
    let mut texts = Vec::with_capacity(about.datasets.len());
    let mut last = None;
    for dataset in &about.datasets {
        let of_data = dataset.data.as_deref();
        let opened = Opened::of(&about.run, of_data, Some(about.step))?;
        let of = Dataset::of(&opened.run, of_data, &opened.sources, dataset.rows)?;
        let checkpoint = about::checkpoint(&about.run, opened.newest.step)?;
        if of.identity() != dataset.identity() || checkpoint != about.checkpoint {
            return Err(Fault::BadInput(format!(
                "{}: expected step {} and the text that were harvested, found another checkpoint or other text; put them back",
                about.run.display(),
                about.step
            )));
        }
        texts.push((
            of_data.is_none(),
            about::source(of_data, &opened.sources).clone(),
        ));
        last = Some(opened);
    }
    let opened = last.context("a harvest has a dataset")?;
    let pool = Arc::new(Pool::new(threads)?);
    Ok(Harvesting {
        texts: Texts::of(opened.run.seed, texts)?,
        damaged: Vec::new(),
        run: opened.run,
        setup: counts.setup.clone(),
        about,
        place,
        shard: (0, 1),
        save_every: SAVE_EVERY,
        processor: Processor::Cpu(Arc::clone(&pool)),
        pool,
        store: opened.store,
        decomposition: opened.decomposition,
    })
}
