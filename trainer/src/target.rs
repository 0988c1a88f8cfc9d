//! The target's weights: from a file, from the cache of trained targets, or trained now into that
//! cache.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, anyhow};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use spd_checkpoint::atomic::write_file;
use spd_checkpoint::{CheckpointError, Lock};
use spd_engine::{Pool, Processor, Store};
use spd_files::atomic::make_dirs;
use spd_tracker::{Cursor, METRICS, Read, Reader, STARTS, SYSTEM, TIMES};
use xxhash_rust::xxh3::Xxh3;

use crate::cache::cache_dir;
use crate::data::Sources;
use crate::fault::{Fault, Interrupt};
use crate::given_weights::{are_to_come, given, place};
use crate::heartbeat::Heartbeat;
use crate::memory::Memory;
use crate::networks::{Model, Network, Target, Weights, load};
use crate::progress::Progress;
use crate::resume::{self, CHECKPOINTS, Ingredient, What};
use crate::run_file::{Checkpoint, Data, Log, Run};
use crate::saver::Place;
use crate::supervision::Supervision;
use crate::target_task::{Lessons, TargetTask};
use crate::train::train;
use crate::world::World;

/// Directory of a trained target, named by everything that its weights depend on: the network and
/// `[target.train]`, `[data]`, what the network says of itself, and the dataset's index, which
/// holds the hashes of its shards.
pub(crate) fn cached_dir(run: &Run, network: &dyn Target) -> Result<PathBuf, Fault> {
    let mut key = settings(run)?;
    if let Data::Tokens { train, .. } = &run.data {
        key.push_str(&crate::data::key(&run.data, train)?);
    }
    // The key of version 2: bump it when training itself changes.
    let key = format!("2 {} {key}", network.describe());
    let hash = xxhash_rust::xxh3::xxh3_64(key.as_bytes());
    let described = network.describe();
    let kind = described.split(',').next().unwrap_or("target");
    Ok(cache_dir()
        .join("targets")
        .join(format!("{kind}-{hash:016x}")))
}

/// The settings that the weights depend on, as keys have them since the first version: without what
/// was left out of files then.
fn settings(run: &Run) -> Result<String, Fault> {
    let target = &run.target;
    let mut settings = serde_json::to_string(&(&target.model, &target.train, &run.data))
        .context("the target's key")?;
    let mut leave_out = |usual: &str| settings = settings.replacen(usual, "", 1);
    if matches!(
        target.model,
        Model::Gpt2(_) | Model::Gpt2Simple(_) | Model::GptNeo(_)
    ) {
        leave_out(r#","activation":"gelu_tanh""#);
        leave_out(&format!(r#","norm_eps":{}"#, Value::from(1e-5)));
        leave_out(r#","tied_head":true"#);
    }
    leave_out(r#","cross_documents":true"#);
    Ok(settings)
}

/// Makes sure that a target which is to be trained can be kept.
///
/// # Errors
///
/// One line that names what is in the way of the cache.
pub(crate) fn check_cache(run: &Run, network: &dyn Target) -> Result<(), Fault> {
    if run.target.weights.is_some() {
        return Ok(());
    }
    let dir = cached_dir(run, network)?;
    // Existing files are read; missing ones are written.
    if dir.join(FILE).is_file() {
        return Ok(());
    }
    // A file in the place of the directory is set aside.
    let place = match in_the_way(&dir, true) {
        Some(_) => dir.parent().unwrap_or(&dir),
        None => &dir,
    };
    let tried = spd_files::try_dir(place);
    tried.map(drop).map_err(|line| {
        Fault::BadInput(format!(
            "{line}; trained targets are kept there: mend it, or set SPD_CACHE to a directory that can be written to"
        ))
    })
}

/// Origin of the weights, for the plan.
pub(crate) fn origin(run: &Run, network: &dyn Target) -> Result<String, Fault> {
    match (&run.target.weights, &run.target.train) {
        (Some(path), _) => Ok(match &run.target.commit {
            Some(commit) => format!("from {}, commit {commit}", path.display()),
            None => format!("from {}", path.display()),
        }),
        (None, Some(train)) => {
            let dir = cached_dir(run, network)?;
            let how = match kept(&dir, network)? {
                Kept::Whole(_) => "trained before".to_owned(),
                Kept::Nothing => "to be trained".to_owned(),
                Kept::Damaged(reason) => format!("to be made again ({reason})"),
            };
            Ok(format!(
                "{how}, {} steps; kept in {}",
                train.steps,
                dir.join(FILE).display()
            ))
        }
        (None, None) => Err(Fault::BadInput(
            "[target]: neither weights nor train".into(),
        )),
    }
}

/// The weights of the run's target, trained first where they must be, and what that took in memory.
///
/// - `on`: the processor that trains it, a GPU or threads, of these no fewer than so many: a target
///   is often trained while others wait for it, and its bits are the same for any number
pub(crate) fn weights(
    run: &Run,
    network: &Network,
    run_dir: &Path,
    sources: &Sources,
    on: (&Processor, usize),
    supervision: &Supervision,
) -> Result<(Weights, Memory), Interrupt> {
    let mut memory = Memory::default();
    if let Some(weights) = given(run, &**network)? {
        return Ok((weights, memory));
    }
    let dir = cached_dir(run, &**network)?;
    let heartbeat = &supervision.heartbeat;
    let (mut wait, mut is_made) = (None, false);
    loop {
        let damaged = match kept(&dir, &**network)? {
            Kept::Whole(weights) => return Ok((weights, memory)),
            Kept::Damaged(reason) if is_made => {
                let dir = dir.display();
                let error =
                    anyhow!("{dir}: {reason}, and was written just now; is the disk in order?");
                return Err(error.into());
            }
            Kept::Damaged(reason) => Some(reason),
            Kept::Nothing => None,
        };
        Interrupt::when(supervision.stop.load(Ordering::Relaxed))?;
        if let Some(reason) = damaged.filter(|_| !can_be_locked(&dir)) {
            set_aside(&dir, &reason, run_dir, heartbeat)?;
            continue;
        }
        make_dirs(&dir).with_context(|| format!("{}: cannot be made", dir.display()))?;
        match Lock::take(&dir) {
            Err(CheckpointError::Held { holder, .. }) => {
                let wait = match &mut wait {
                    Some(wait) => wait,
                    None => wait.insert(Wait::begin(run, run_dir, &dir, &holder, heartbeat)?),
                };
                wait.look();
            }
            Err(other) => return Err(other.into()),
            Ok(lock) => {
                // Another run may have made it meanwhile.
                match kept(&dir, &**network)? {
                    Kept::Whole(_) => continue,
                    Kept::Damaged(reason) => {
                        // The lock goes with it, and is taken again.
                        set_aside(&dir, &reason, run_dir, heartbeat)?;
                        continue;
                    }
                    Kept::Nothing => {}
                }
                let Some(settings) = &run.target.train else {
                    return Err(
                        Fault::BadInput("[target]: neither weights nor train".into()).into(),
                    );
                };
                let lessons = Lessons {
                    run,
                    network,
                    settings,
                };
                memory = with_threads(on, |processor| {
                    let entry = (&*dir, &lock);
                    train_target(lessons, entry, run_dir, sources, processor, supervision)
                })?;
                is_made = true;
            }
        }
    }
}

/// Does something on a processor, with no fewer than so many threads.
fn with_threads<R: Send>(
    (processor, threads): (&Processor, usize),
    work: impl FnOnce(&Processor) -> Result<R, Interrupt> + Send,
) -> Result<R, Interrupt> {
    match processor {
        Processor::Cpu(pool) if pool.threads() < threads => {
            let pool = Arc::new(Pool::new(threads)?);
            let wide = Processor::Cpu(Arc::clone(&pool));
            pool.enter(|| work(&wide))
        }
        own => work(own),
    }
}

/// The weights of a run's target, if they are there: given ones, or those of its training.
pub(crate) fn known(run: &Run, network: &dyn Target) -> Result<Option<Weights>, Fault> {
    // Training looks again, once they exist.
    if are_to_come(run)? {
        return Ok(None);
    }
    if let Some(weights) = given(run, network)? {
        return Ok(Some(weights));
    }
    Ok(match kept(&cached_dir(run, network)?, network)? {
        Kept::Whole(weights) => Some(weights),
        Kept::Nothing | Kept::Damaged(_) => None,
    })
}

/// The target of a run for its checkpoints, if it is there.
pub(crate) fn ingredient(run: &Run, network: &dyn Target) -> Result<Option<Ingredient>, Fault> {
    let weights = known(run, network)?;
    weights
        .map(|weights| made_of(run, network, &weights))
        .transpose()
}

/// The target of a run for its checkpoints.
pub(crate) fn made_of(
    run: &Run,
    network: &dyn Target,
    weights: &Weights,
) -> Result<Ingredient, Fault> {
    let path = match place(run)? {
        Some(path) => path,
        None => cached_dir(run, network)?.join(FILE),
    };
    Ok(Ingredient {
        what: What::Target,
        path,
        hash: fingerprint(weights),
    })
}

/// xxh3-128 of the weights as they are used: names, shapes and values.
fn fingerprint(weights: &Weights) -> String {
    let mut hash = Xxh3::new();
    for (name, dims, values) in weights {
        hash.update(format!("{name:?} F32 {dims:?}\n").as_bytes());
        // As they lie in memory: all that this is built for is little-endian.
        hash.update(bytemuck::cast_slice(values));
    }
    format!("{:032x}", hash.digest128())
}

/// A target in the cache.
enum Kept {
    Nothing,
    /// Its weights, which are those that were written.
    Whole(Weights),
    /// Not what was written, and why.
    Damaged(String),
}

/// Reads a trained target from its directory. A file that does not promise its own hash, or does
/// not keep it, is worth nothing. A target that was begun is worth nothing if something else has
/// the place of a part of it.
fn kept(dir: &Path, network: &dyn Target) -> Result<Kept, Fault> {
    let file = &dir.join(FILE);
    if let Some(found) = in_the_way(dir, true) {
        return Ok(Kept::Damaged(format!("it is {found}")));
    }
    let parts = [(FILE, false), ("lock", false), (CHECKPOINTS, true)];
    let logs = [METRICS, TIMES, STARTS, SYSTEM, resume::SAVED].map(|name| (name, false));
    match std::fs::symlink_metadata(file) {
        // A file in the place of a folder is named when one is to be made.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            let mut parts = parts.into_iter().chain(logs);
            let found = parts.find_map(|(name, is_dir)| {
                let found = in_the_way(&dir.join(name), is_dir)?;
                Some(Kept::Damaged(format!("{name} is {found}")))
            });
            return Ok(found.unwrap_or(Kept::Nothing));
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            return Err(error.context(file.display().to_string()).into());
        }
        Ok(_) => {}
    }
    let weights = match load(file, network) {
        Ok(weights) => weights,
        Err(fault) => {
            let (fault, shown) = (fault.to_string(), format!("{}: ", file.display()));
            let reason = fault.strip_prefix(&shown).unwrap_or(&fault);
            return Ok(Kept::Damaged(format!("{FILE}: {reason}")));
        }
    };
    let found = fingerprint(&weights);
    Ok(match promised(file) {
        None => Kept::Damaged(format!("{FILE}: it promises no hash of its weights")),
        Some(promised) if promised != found => Kept::Damaged(format!(
            "{FILE}: its weights have the hash {found}, it promises {promised}"
        )),
        Some(_) => Kept::Whole(weights),
    })
}

/// The hash that a trained target has in its header.
fn promised(file: &Path) -> Option<String> {
    let mut file = spd_files::open(file).ok()?;
    let bytes = file.metadata().ok()?.len();
    let mut header_bytes = [0; 8];
    file.read_exact(&mut header_bytes).ok()?;
    let mut header = Vec::new();
    let header_bytes = u64::from_le_bytes(header_bytes).min(bytes);
    file.take(header_bytes).read_to_end(&mut header).ok()?;
    let header: Value = serde_json::from_slice(&header).ok()?;
    Some(header.get("__metadata__")?.get(HASH)?.as_str()?.to_owned())
}

/// Key of that hash.
const HASH: &str = "xxh3_128";

/// The kind of what stands in the place of a file, or of a directory, and is none.
fn in_the_way(path: &Path, is_dir: bool) -> Option<&'static str> {
    std::fs::symlink_metadata(path).ok()?;
    match std::fs::metadata(path) {
        Err(_) => Some("a link that leads nowhere"),
        Ok(found) if is_dir && found.is_dir() || !is_dir && found.is_file() => None,
        Ok(found) => Some(spd_files::name(found.file_type())),
    }
}

/// Whether a process could be at work in a directory of the cache, with its lock.
fn can_be_locked(dir: &Path) -> bool {
    in_the_way(dir, true).is_none() && in_the_way(&dir.join("lock"), false).is_none()
}

/// Moves a damaged target, with all that lies beside it, out of the way of a new one.
fn set_aside(
    dir: &Path,
    reason: &str,
    run_dir: &Path,
    heartbeat: &Arc<Heartbeat>,
) -> Result<(), Fault> {
    let aside = spd_files::atomic::set_aside(dir).with_context(|| {
        format!(
            "{}: {reason}, and cannot be set aside; remove it",
            dir.display()
        )
    })?;
    Progress::at(run_dir, heartbeat)?.event(
        0,
        format!(
            "the cached target {} is damaged: {reason}; it is set aside as {} and trained again",
            dir.display(),
            aside.display()
        ),
    );
    Ok(())
}

/// Another run of the same target trains it just now.
struct Wait {
    progress: Progress,
    rows: Reader,
    step: u64,
    steps: u64,
}

impl Wait {
    fn begin(
        run: &Run,
        run_dir: &Path,
        dir: &Path,
        holder: &str,
        heartbeat: &Arc<Heartbeat>,
    ) -> Result<Self, Fault> {
        let mut progress = Progress::at(run_dir, heartbeat)?;
        progress.event(
            0,
            format!("waits for {holder}, which trains the same target"),
        );
        let rows = Reader::of_metrics(dir, &Cursor::default());
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
        // Unreadable progress costs the display alone.
        while let Ok(Some(read)) = self.rows.next() {
            self.step = match read {
                Read::Row { row, .. } => row.step,
                Read::RolledBack(start) => start.step,
            };
        }
        self.show(false);
    }

    fn show(&mut self, now: bool) {
        self.progress.show("wait", self.steps, self.step, now);
    }
}

/// Time between two looks at a target that another run trains.
const LOOK_EVERY: Duration = Duration::from_millis(200);

const FILE: &str = "target.safetensors";

/// - `dir`, `lock`: the directory of the cache, and the lock of who fills it
fn train_target(
    lessons: Lessons<'_>,
    (dir, lock): (&Path, &Lock),
    run_dir: &Path,
    sources: &Sources,
    processor: &Processor,
    supervision: &Supervision,
) -> Result<Memory, Interrupt> {
    let mut store = Store::new();
    let settings = lessons.settings;
    let mut task = TargetTask::new(lessons, sources.clone(), &mut store, processor)?;
    task.make_room()?;
    // By one rank, whatever the world: its weights are the same for all.
    let alone = World::default();
    let place = Place {
        dir,
        lock: Some(lock),
        world: &alone,
        checkpoint: Checkpoint {
            every: (settings.steps / 5).max(1),
            keep: 1,
        },
        log: Log {
            every: (settings.steps / 200).max(1),
        },
        // The directory is named by the config.
        config: "target",
        made_of: &[],
        is_kept: true,
        progress: Some(run_dir),
        heartbeat: &supervision.heartbeat,
    };
    let memory = task.memory(&store);
    let stop = || supervision.stop.load(Ordering::Relaxed);
    train(&mut task, &mut store, &place, &stop)?;
    store.fetch()?;
    let weights = task.weights(&store);
    let views: Vec<(&String, TensorView<'_>)> = weights
        .iter()
        .map(|(name, dims, values)| {
            let bytes = bytemuck::cast_slice(values);
            Ok((name, TensorView::new(Dtype::F32, dims.clone(), bytes)?))
        })
        .collect::<Result<_, safetensors::SafeTensorError>>()
        .context("the trained target")?;
    let hash = [(HASH.to_owned(), fingerprint(&weights))];
    let whole = safetensors::serialize(views, Some(hash.into())).context("the trained target")?;
    write_file(&dir.join(FILE), &whole)?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Overrides, preset};

    // A run file's key in the cache was made without them, and trained targets are to be found.
    #[test]
    fn a_key_omits_defaults_of_older_files() {
        let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
        let usual = settings(&run).unwrap();
        for key in ["activation", "norm_eps", "tied_head", "cross_documents"] {
            assert!(!usual.contains(key), "{usual}");
        }
        assert!(usual.contains(r#""d_mlp":"#), "{usual}");
        let Model::Gpt2(model) = &mut run.target.model else {
            panic!("a GPT-2");
        };
        model.norm_eps = 1e-6;
        let other = settings(&run).unwrap();
        assert!(other.contains(r#","norm_eps":"#), "{other}");
        assert!(!other.contains("activation"), "{other}");
    }
}
