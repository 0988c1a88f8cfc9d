//! The directory of a harvest: counts of ranks while it is made, and its files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::json;
use spd_checkpoint::Lock;
use spd_files::atomic::{make_dirs, names, remove, unfinished, write_file};
use spd_harvest::{
    Counts, Datasets, FORMAT, Removal, Setup, load, save, write_lines, write_tables,
};
use xxhash_rust::xxh3::xxh3_64;

use super::about::About;
use super::removals::so_far;
use super::so_far::Key;
use super::{Request, Settings};
use crate::fault::Fault;

/// Harvests of a run directory.
pub(super) const HARVESTS: &str = "harvests";

/// The file that is written last.
const DONE: &str = "harvest.json";

/// The file of the attributions that is written last, and of those so far.
pub(super) const ATTRIBUTED: &str = "attribute.json";
pub(super) const SOME_ATTRIBUTED: &str = "attributed.json";

/// The counts of all.
pub(super) const COUNTS: &str = "harvest.safetensors";

/// The directory.
pub(super) struct Place {
    pub(super) dir: PathBuf,
}

impl Place {
    /// The directory of a harvest: the same settings have the same one.
    pub(super) fn of(request: &Request<'_>, about: &About, setup: &Setup) -> Result<Self, Fault> {
        let place = Self {
            dir: match request.out {
                Some(out) => out.to_owned(),
                None => {
                    let all = request.run_dir.join(HARVESTS);
                    all.join(name(request.settings, request.data, about.step)?)
                }
            },
        };
        place.check(about, setup)?;
        Ok(place)
    }

    /// Refuses a directory that holds something else, or another harvest.
    pub(super) fn check(&self, about: &About, setup: &Setup) -> Result<(), Fault> {
        let shown = self.dir.display();
        let names =
            names(&self.dir).map_err(|error| Fault::BadInput(format!("{shown}: {error}")))?;
        if let Some(other) = names.iter().find(|name| !is_own(&name.to_string_lossy())) {
            return Err(Fault::BadInput(format!(
                "{shown}: holds {}, which is of no harvest; give the name of a new directory with --out",
                other.display()
            )));
        }
        let whole = [self.dir.join(COUNTS)];
        let whole = whole.into_iter().filter(|path| path.is_file());
        self.partial()?
            .into_iter()
            .chain(whole)
            .try_for_each(|path| {
                let (counts, of) = load(&path)?;
                is_same(&path, (&counts.setup, of), (setup, about))
            })
    }

    /// Makes the directory, keeps other processes that write there away, and removes what killed ones
    /// have begun to write.
    pub(super) fn take(&self) -> Result<Lock, Fault> {
        make_dirs(&self.dir).map_err(|error| {
            Fault::BadInput(format!(
                "{}: cannot be made: {error}; give another directory with --out",
                self.dir.display()
            ))
        })?;
        let lock = Lock::take(&self.dir)?;
        let left =
            unfinished(&self.dir).and_then(|left| left.iter().try_for_each(|path| remove(path)));
        left.with_context(|| self.dir.display().to_string())?;
        Ok(lock)
    }

    pub(super) fn is_done(&self) -> bool {
        self.dir.join(DONE).is_file()
    }

    fn of_rank(&self, rank: u64) -> PathBuf {
        self.dir.join(format!("counts-{rank}.safetensors"))
    }

    /// The counts of ranks.
    fn partial(&self) -> Result<Vec<PathBuf>, Fault> {
        let names = names(&self.dir).with_context(|| self.dir.display().to_string())?;
        let mut paths: Vec<PathBuf> = names
            .iter()
            .filter(|name| is_partial(&name.to_string_lossy()))
            .map(|name| self.dir.join(name))
            .collect();
        paths.sort();
        Ok(paths)
    }

    /// Adds up the counts of all ranks into those of the first one. None of them may go on.
    pub(super) fn gather(&self, about: &About, setup: &Setup) -> Result<Counts, Fault> {
        let first = self.of_rank(0);
        let mut sum = match first.is_file() {
            true => load(&first)?.0,
            false => Counts::new(setup.clone()),
        };
        let others: Vec<PathBuf> = self.partial()?;
        let others: Vec<PathBuf> = others.into_iter().filter(|path| *path != first).collect();
        for path in &others {
            let (counts, _) = load(path)?;
            // A file that was added before a kill may still be there.
            if !sum.overlaps(&counts) {
                sum.add(&counts);
            }
        }
        if !others.is_empty() {
            save(&first, &mut sum, &value(about)?)?;
            for path in &others {
                remove(path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(sum)
    }

    /// The counts that a rank need not make, and its own so far.
    pub(super) fn counted(
        &self,
        rank: u64,
        about: &About,
        setup: &Setup,
    ) -> Result<(Counts, Counts), Fault> {
        let none = || Counts::new(setup.clone());
        let first = self.of_rank(0);
        if !first.is_file() {
            return Ok((none(), none()));
        }
        let (counts, of) = load(&first)?;
        is_same(&first, (&counts.setup, of), (setup, about))?;
        Ok(match rank {
            0 => (none(), counts),
            _ => (counts, none()),
        })
    }

    /// Saves the counts of a rank.
    pub(super) fn save(&self, rank: u64, counts: &mut Counts, about: &About) -> Result<(), Fault> {
        Ok(save(&self.of_rank(rank), counts, &value(about)?)?)
    }

    /// Writes the files, `harvest.json` last, and removes the counts of ranks. Returns what was
    /// harvested, in words.
    pub(super) fn write(
        &self,
        counts: &mut Counts,
        about: &About,
        texts: &mut dyn Datasets,
        removals: &BTreeMap<Key, Removal>,
    ) -> Result<String, Fault> {
        save(&self.dir.join(COUNTS), counts, &value(about)?)?;
        write_tables(&self.dir, counts, texts, removals)?;
        write_lines(&self.dir, counts, texts, removals)?;
        let mut done = value(about)?;
        done["format"] = json!(FORMAT);
        done["positions"] = json!(counts.positions());
        done["parts"] = json!([counts.parts(), about.parts()]);
        done["setup"] = serde_json::to_value(&counts.setup).context("the settings")?;
        let text = serde_json::to_vec_pretty(&done).context("the harvest")?;
        let path = self.dir.join(DONE);
        write_file(&path, &[&text, b"\n"]).with_context(|| path.display().to_string())?;
        for path in self.partial()? {
            remove(&path).with_context(|| path.display().to_string())?;
        }
        so_far(&self.dir, counts, about).remove();
        Ok(format!(
            "{} of {} components are active somewhere in {} tokens",
            counts.active(),
            counts.setup.components(),
            counts.positions()
        ))
    }
}

/// The name of the directory of a harvest in its run directory.
fn name(settings: Settings, data: Option<&Path>, step: u64) -> Result<String, Fault> {
    let Settings { shard, .. } = settings;
    let whole = Settings {
        shard: (0, 1),
        ..settings
    };
    let mut name = format!("step-{step:08}");
    if whole != Settings::default() || data.is_some() {
        let text = serde_json::to_vec(&(whole, data)).context("the settings of a harvest")?;
        name += &format!("-{:016x}", xxh3_64(&text));
    }
    if shard.1 > 1 {
        name += &format!("-shard-{}-of-{}", shard.0, shard.1);
    }
    Ok(name)
}

fn value(about: &About) -> Result<serde_json::Value, Fault> {
    Ok(serde_json::to_value(about).context("what a harvest is of")?)
}

fn is_same(
    path: &Path,
    (found_setup, found): (&Setup, serde_json::Value),
    (setup, about): (&Setup, &About),
) -> Result<(), Fault> {
    let found: Option<About> = serde_json::from_value(found).ok();
    if found_setup == setup && found.is_some_and(|found| found.is_same(about)) {
        return Ok(());
    }
    Err(Fault::BadInput(format!(
        "{}: belongs to a harvest of another checkpoint, other text or other settings; give another directory with --out",
        path.display()
    )))
}

fn is_partial(name: &str) -> bool {
    let rank = name
        .strip_prefix("counts-")
        .and_then(|rest| rest.strip_suffix(".safetensors"));
    rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether a file is of a harvest.
fn is_own(name: &str) -> bool {
    let is_table = name.ends_with(".parquet") || name.ends_with(".jsonl");
    let others = [DONE, COUNTS, ATTRIBUTED, SOME_ATTRIBUTED];
    let others = [&others[..], &["removals.json", "kernels.txt", "lock"]].concat();
    // Unfinished files begin with a dot.
    is_table || name.starts_with('.') || is_partial(name) || others.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The hashes are XXH3-64 of `[{"tokens":64,"examples":1000,...},null]` by Python's xxhash.
    #[test]
    fn the_same_settings_have_the_same_directory_in_every_build() {
        let usual = Settings::default();
        let few = Settings {
            tokens: 64,
            pairs: false,
            ..usual
        };
        let shard = |settings| Settings {
            shard: (1, 4),
            ..settings
        };
        let data = Some(Path::new("data/x"));
        for (settings, data, expected) in [
            (usual, None, "step-00000012"),
            (shard(usual), None, "step-00000012-shard-1-of-4"),
            (few, None, "step-00000012-e87ed01c62695374"),
            (
                shard(few),
                None,
                "step-00000012-e87ed01c62695374-shard-1-of-4",
            ),
            (usual, data, "step-00000012-b67bd5c6a0bffc59"),
        ] {
            assert_eq!(name(settings, data, 12).unwrap(), expected);
        }
    }
}
