//! The whole of a run, as one rank sees it: target, decomposition, summary.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use spd_checkpoint::Lock;
use spd_checkpoint::atomic::write_file;
use spd_engine::cuda::Device;
use spd_engine::{Pool, Processor, Store};

use crate::cache::cache_dir;
use crate::data::{self, Sources};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Outcome};
use crate::memory::Peak;
use crate::metrics::summary::{self, Of, Spent, Summary};
use crate::networks::{Network, shipped};
use crate::progress::Progress;
use crate::resume::{self, Continuation};
use crate::run_file::Run;
use crate::saver::{At, Place};
use crate::supervision::Supervision;
use crate::target::{self, On};
use crate::task::Task as _;
use crate::train::train;

/// The state from which a run continues in its directory `dir`. Reads its checkpoints and its
/// target, and changes nothing.
///
/// # Errors
///
/// Bad input, when the data, the target or the rows are not those of its checkpoints. A target that
/// is still to be trained is compared by the rank.
pub fn continuation(run: &Run, dir: &Path) -> Result<Continuation, Fault> {
    let mut made_of = resume::data(&run.data);
    let network = shipped(&run.target.model)?;
    made_of.extend(target::ingredient(run, &*network)?);
    resume::goes_on(dir, &made_of, run.checkpoint.every)
}

/// CPU threads of a rank.
#[derive(Debug, Clone, Copy)]
pub struct Threads {
    /// While it decomposes.
    pub run: usize,
    /// While it trains the target: one rank does that for all, and one of several runs that want
    /// the same.
    pub target: usize,
}

/// Runs one rank to its end in the prepared run directory (`config.toml` is there), from the newest
/// good checkpoint if there is one. A request to stop is heard within a step, an update of the
/// warm-up, a batch of an evaluation or a figure. Its programs run on the GPU of the number `gpu`,
/// or on the processor where none is named.
///
/// # Errors
///
/// Bad input, or whatever else keeps the run from its end.
pub fn rank(
    run_dir: &Path,
    threads: Threads,
    gpu: Option<usize>,
    supervision: &Supervision,
) -> Result<Outcome, Fault> {
    let (started, peak) = (Instant::now(), Peak::watch());
    let run = prepared(run_dir)?;
    let network = shipped(&run.target.model)?;
    let pool = Arc::new(Pool::new(threads.run)?);
    let processor = processor(gpu, &pool)?;
    let job = Job {
        target_threads: threads.target,
        run: &run,
        text: &run.to_toml(),
        network: &network,
        run_dir,
        started,
    };
    // The loop runs on a thread of the pool, so that no step has to wake one.
    pool.enter(|| {
        if let Some(device) = processor.device() {
            supervision.world.join(device, &supervision.heartbeat)?;
        }
        let outcome = job.go(&processor, peak, supervision)?;
        // A failing rank skips this handshake.
        processor.device().map_or(Ok(()), |device| device.leave())?;
        Ok(outcome)
    })
}

/// Decomposes a network of the calling program: runs `run`, whose `[target]` has `kind = "custom"`,
/// to its end on `threads` threads of the processor, in a run directory that is made where it is
/// missing. If the directory holds this run, the run goes on from its newest good checkpoint.
/// Results are in `summary.json`, `metrics.jsonl`, `figures/` and `checkpoints/` there.
///
/// # Errors
///
/// Bad input, such as the directory of another run, or whatever else keeps the run from its end.
pub fn decompose(
    run: &Run,
    network: &Network,
    run_dir: &Path,
    threads: usize,
) -> Result<Outcome, Fault> {
    let (started, peak) = (Instant::now(), Peak::watch());
    let config = run_dir.join("config.toml");
    std::fs::create_dir_all(run_dir).with_context(|| run_dir.display().to_string())?;
    if !config.is_file() {
        write_file(&config, run.to_toml().as_bytes())?;
    }
    let there = prepared(run_dir)?;
    if let Some(line) = run.differences(&there).first() {
        return Err(Fault::BadInput(format!(
            "{}: holds another run: {line}; choose another directory",
            run_dir.display()
        )));
    }
    let pool = Arc::new(Pool::new(threads)?);
    let processor = processor(None, &pool)?;
    let job = Job {
        target_threads: threads,
        run,
        text: &run.to_toml(),
        network,
        run_dir,
        started,
    };
    pool.enter(|| job.go(&processor, peak, &Supervision::default()))
}

/// The run of a run directory.
fn prepared(run_dir: &Path) -> Result<Run, Fault> {
    let config = run_dir.join("config.toml");
    let text = spd_files::read_to_string(&config).with_context(|| config.display().to_string())?;
    Ok(Run::from_resolved(&text)?)
}

/// The whole of one rank.
struct Job<'a> {
    /// While the target is trained.
    target_threads: usize,
    run: &'a Run,
    /// The resolved run, which checkpoints remember.
    text: &'a str,
    network: &'a Network,
    run_dir: &'a Path,
    started: Instant,
}

impl Job<'_> {
    fn go(
        &self,
        processor: &Processor,
        peak: Peak,
        supervision: &Supervision,
    ) -> Result<Outcome, Fault> {
        let heartbeat = &supervision.heartbeat;
        let Self {
            target_threads,
            run,
            text,
            network,
            run_dir,
            started,
        } = *self;
        let world = &supervision.world;
        let lock = if world.is_first() {
            Some(Lock::take(run_dir)?)
        } else {
            None
        };
        heartbeat.enter("data");
        let mut made_of = resume::data(&run.data);
        let asked = || supervision.stop.load(Ordering::Relaxed);
        let target_of = |sources: &Sources| {
            let trained = On {
                processor,
                threads: target_threads,
            };
            target::weights(run, network, run_dir, sources, &trained, supervision)
        };
        // The first rank reads all of the data, and trains the target; the others find both as they
        // should be.
        let mut found = None;
        let goes_on = world.first(|| {
            let sources = data::open_checked(run)?;
            // Before a target is trained for it.
            if let Continuation::Lost(line) =
                resume::goes_on(run_dir, &made_of, run.checkpoint.every)?
            {
                return Err(Fault::BadInput(line));
            }
            keep_record(processor, run_dir)?;
            let weights = target_of(&sources)?;
            found = weights.map(|weights| (sources, weights));
            Ok(found.is_some())
        })?;
        if !goes_on {
            return Ok(Outcome::Stopped);
        }
        let (sources, (weights, training)) = match found {
            Some(found) => found,
            None => {
                let sources = data::open_checked(run)?;
                match target_of(&sources)? {
                    Some(weights) => (sources, weights),
                    None => return Ok(Outcome::Stopped),
                }
            }
        };
        made_of.push(target::made_of(run, &**network, &weights)?);
        heartbeat.enter("planning");
        let mut store = Store::new();
        let decomposition = Decomposition::of(run, network, &mut store)?;
        decomposition.set_target(&mut store, &weights);
        drop(weights);
        let plan = || {
            if !world.is_first() {
                keep_record(processor, run_dir)?;
            }
            DecompositionTask::new(decomposition, sources.clone(), &mut store, processor, world)
        };
        // The first rank autotunes, and the others read its choices.
        let task = match processor {
            Processor::Gpu(_) => world.in_turn(plan)?,
            Processor::Cpu(_) => Some(plan()?),
        };
        let Some(mut task) = task else {
            return Ok(Outcome::Stopped);
        };
        task.make_room()?;
        let place = Place {
            dir: run_dir,
            lock: lock.as_ref(),
            world,
            checkpoint: run.checkpoint,
            log: run.log,
            config: text,
            made_of: &made_of,
            is_kept: false,
            progress: None,
            heartbeat,
        };
        if train(&mut task, &mut store, &place, &asked)? == Outcome::Stopped {
            return Ok(Outcome::Stopped);
        }
        // The target's programs are gone when those of the decomposition are made.
        let planned = task.memory(&store).total().max(training.total());
        let spent = Spent {
            time: started.elapsed(),
            planned,
            peak,
        };
        let mut progress = if world.is_first() {
            Progress::at(run_dir, heartbeat)?
        } else {
            Progress::felt(heartbeat)
        };
        let step = run.train.steps;
        let asked_all = || !world.agree(|| !asked());
        let mut go_on = || progress.alive("eval", step, &asked_all);
        let last = task.evaluate(&mut store, true, &mut go_on)?;
        let finished = match last {
            Some(last) => world.first(|| {
                let mut go_on = || progress.alive("eval", step, &asked);
                let summary = Summary {
                    sources: &sources,
                    run_dir,
                    of: Of::End(&spent),
                    last,
                };
                let text = summary::text(&summary, &mut task, &mut store, &mut go_on)?;
                let Some(text) = text else {
                    return Ok(false);
                };
                write_file(&run_dir.join("summary.json"), text.as_bytes())?;
                Ok::<_, Fault>(true)
            })?,
            None => false,
        };
        if !finished {
            progress.stopped(step, At::Step(step).stopped(""));
            return Ok(Outcome::Stopped);
        }
        Ok(Outcome::Done)
    }
}

/// A resumed run uses the kernels that it began with: autotuned choices are recorded beside its
/// checkpoints.
fn keep_record(processor: &Processor, run_dir: &Path) -> Result<(), Fault> {
    let Some(device) = processor.device() else {
        return Ok(());
    };
    let kept = device.keep_record(run_dir.join("kernels.txt"));
    kept.map_err(|fault| Fault::BadInput(fault.to_string()))
}

/// The processor of programs: a GPU, whose compiled kernels are kept beside the trained targets, or
/// on the threads of the pool.
pub(crate) fn processor(gpu: Option<usize>, pool: &Arc<Pool>) -> Result<Processor, Fault> {
    let Some(ordinal) = gpu else {
        return Ok(Processor::Cpu(Arc::clone(pool)));
    };
    let device = Device::open(ordinal, Some(kernel_cache()))?;
    Ok(Processor::Gpu(Some(device)))
}

/// Directory of compiled GPU code.
pub(crate) fn kernel_cache() -> std::path::PathBuf {
    cache_dir().join("kernels")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_kernels_that_is_none_is_the_users_to_mend() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Arc::new(Pool::single());
        let on = [
            processor(None, &pool).unwrap(),
            Processor::Gpu(Some(Device::emulated())),
        ];
        for processor in &on {
            assert!(keep_record(processor, dir.path()).is_ok());
        }
        write_file(&dir.path().join("kernels.txt"), b"mine").unwrap();
        assert!(keep_record(&on[0], dir.path()).is_ok());
        let Err(Fault::BadInput(line)) = keep_record(&on[1], dir.path()) else {
            panic!("a record of something else");
        };
        assert_eq!(
            line,
            format!(
                "{}: expected the run's autotuning decisions, found another first line; restore the file, or start over with --fresh",
                dir.path().join("kernels.txt").display()
            )
        );
    }
}
