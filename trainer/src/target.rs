//! The target's weights: from a file, from the cache of trained targets, or trained now into that cache.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use spd_checkpoint::atomic::write_file;
use spd_checkpoint::{CheckpointError, Lock};
use spd_configs::{Checkpoint, Data, Log, Run, TargetTrain};
use spd_engine::{Processor, Store};
use spd_tracker::{METRICS, Mark, Read, Reader};

use crate::data::Sources;
use crate::fault::{Fault, Outcome};
use crate::memory::Memory;
use crate::target_models::{Weights, describe, load};
use crate::target_task::TargetTask;
use crate::train::{Place, Progress, train};

/// Where trained targets are kept: `$SPD_CACHE`, else `$XDG_CACHE_HOME/spd`, else `~/.cache/spd`.
pub fn cache_dir() -> PathBuf {
    let from = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    from("SPD_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|dir| dir.join("spd")))
        .or_else(|| from("HOME").map(|dir| dir.join(".cache").join("spd")))
        .unwrap_or_else(|| PathBuf::from(".spd-cache"))
}

/// Directory of a trained target, named by everything that its weights depend on: the `[target]` and `[data]` tables and
/// the dataset's index, which holds the hashes of its shards.
pub(crate) fn cached_dir(run: &Run) -> Result<PathBuf, Fault> {
    let mut key = serde_json::to_string(&(&run.target, &run.data)).context("the target's key")?;
    if let Data::Tokens { train, .. } = &run.data {
        let index = train.join("index.json");
        let text = spd_files::read_to_string(&index).map_err(|err| {
            Fault::BadInput(format!("{}: cannot be read: {err}", index.display()))
        })?;
        key.push_str(&text);
    }
    // The key of version 1: bump it when training itself changes.
    let hash = xxhash_rust::xxh3::xxh3_64(format!("1 {key}").as_bytes());
    let kind = describe(&run.target.model);
    let kind = kind.split(',').next().unwrap_or("target");
    Ok(cache_dir()
        .join("targets")
        .join(format!("{kind}-{hash:016x}")))
}

/// Makes sure that a target which is to be trained can be kept.
///
/// # Errors
///
/// One line that names what is in the way of the cache.
pub(crate) fn check_cache(run: &Run) -> Result<(), Fault> {
    if run.target.weights.is_some() {
        return Ok(());
    }
    let dir = cached_dir(run)?;
    // What is there is read; what is not is written.
    if dir.join(FILE).is_file() {
        return Ok(());
    }
    let tried = spd_files::try_dir(&dir);
    tried.map(drop).map_err(|line| {
        Fault::BadInput(format!(
            "{line}; trained targets are kept there: mend it, or set SPD_CACHE to a directory that can be written to"
        ))
    })
}

/// Where the weights will come from, for the table before a run.
pub(crate) fn origin(run: &Run) -> Result<String, Fault> {
    match (&run.target.weights, &run.target.train) {
        (Some(path), _) => Ok(format!("from {}", path.display())),
        (None, Some(train)) => {
            let file = cached_dir(run)?.join(FILE);
            let there = file.try_exists().unwrap_or(false);
            let how = if there {
                "trained before"
            } else {
                "to be trained"
            };
            Ok(format!(
                "{how}, {} steps; kept in {}",
                train.steps,
                file.display()
            ))
        }
        (None, None) => Err(Fault::BadInput(
            "[target]: neither weights nor train".into(),
        )),
    }
}

/// The weights of the run's target, trained first where they must be, and what that took in memory. `None` when `stop` came
/// first.
pub(crate) fn weights(
    run: &Run,
    run_dir: &Path,
    sources: &Sources,
    processor: &Processor,
    stop: &AtomicBool,
) -> Result<Option<(Weights, Memory)>, Fault> {
    let mut memory = Memory::default();
    if let Some(path) = &run.target.weights {
        return Ok(Some((load(path, &run.target.model)?, memory)));
    }
    let dir = cached_dir(run)?;
    let file = dir.join(FILE);
    let there = || {
        file.try_exists()
            .with_context(|| format!("{}", file.display()))
    };
    let mut wait = None;
    while !there()? {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match Lock::take(&dir) {
            Err(CheckpointError::Held { holder, .. }) => {
                let wait = match &mut wait {
                    Some(wait) => wait,
                    None => wait.insert(Wait::begin(run, (run_dir, &dir), &holder)?),
                };
                wait.look();
            }
            Err(other) => return Err(other.into()),
            Ok(lock) if !there()? => {
                let Some(settings) = &run.target.train else {
                    return Err(Fault::BadInput(
                        "[target]: neither weights nor train".into(),
                    ));
                };
                let place = (run_dir, &*dir, &lock);
                memory = train_target(run, settings, place, sources, processor, stop)?;
            }
            Ok(_) => {}
        }
    }
    Ok(Some((load(&file, &run.target.model)?, memory)))
}

/// Another run of the same target trains it just now.
struct Wait {
    progress: Progress,
    rows: Reader,
    step: u64,
    steps: u64,
}

impl Wait {
    fn begin(run: &Run, (run_dir, dir): (&Path, &Path), holder: &str) -> Result<Self, Fault> {
        let mut progress = Progress::at(run_dir)?;
        progress.event(
            0,
            format!("waits for {holder}, which trains the same target"),
        );
        let rows = Reader::open(&dir.join(METRICS), &Mark::default());
        let mut wait = Self {
            progress,
            rows: rows.context("the progress of the target")?,
            step: 0,
            steps: run.target.train.as_ref().map_or(0, |train| train.steps),
        };
        wait.show(true);
        Ok(wait)
    }

    /// Shows how far the other one is, after a moment.
    fn look(&mut self) {
        std::thread::sleep(LOOK_EVERY);
        // What cannot be read costs the display alone.
        while let Ok(Some(read)) = self.rows.next() {
            self.step = match read {
                Read::Row(row) => row.step,
                Read::RolledBack { .. } => 0,
            };
        }
        self.show(false);
    }

    fn show(&mut self, now: bool) {
        self.progress.show(("wait", self.steps), self.step, now);
    }
}

/// Time between two looks at a target that another run trains.
const LOOK_EVERY: Duration = Duration::from_millis(200);

const FILE: &str = "target.safetensors";

fn train_target(
    run: &Run,
    settings: &TargetTrain,
    (run_dir, dir, lock): (&Path, &Path, &Lock),
    sources: &Sources,
    processor: &Processor,
    stop: &AtomicBool,
) -> Result<Memory, Fault> {
    let mut store = Store::new();
    let mut task = TargetTask::new(run, settings, sources.clone(), &mut store, processor)?;
    task.make_room()?;
    let place = Place {
        dir,
        lock,
        checkpoint: Checkpoint {
            every: (settings.steps / 5).max(1),
            keep: 1,
        },
        log: Log {
            every: (settings.steps / 200).max(1),
        },
        // The directory is named by the config.
        config: "target",
        progress: Some(run_dir),
    };
    let memory = task.memory(&store);
    if train(&mut task, &mut store, &place, &|| {
        stop.load(Ordering::Relaxed)
    })? == Outcome::Stopped
    {
        return Ok(memory);
    }
    store.fetch()?;
    let weights = task.weights(&store);
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = weights
        .into_iter()
        .map(|(name, dims, values)| {
            (
                name,
                dims,
                values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect(),
            )
        })
        .collect();
    let views: Vec<(&String, TensorView<'_>)> = bytes
        .iter()
        .map(|(name, dims, bytes)| Ok((name, TensorView::new(Dtype::F32, dims.clone(), bytes)?)))
        .collect::<Result<_, safetensors::SafeTensorError>>()
        .context("the trained target")?;
    let whole = safetensors::serialize(views, None).context("the trained target")?;
    write_file(&dir.join(FILE), &whole)?;
    Ok(memory)
}
