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
use crate::decomposition::{Decomposition, check_leak};
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt, Outcome};
use crate::memory::{Memory, Peak};
use crate::metrics::summary::{self, Of, Spent, Summary};
use crate::networks::{Network, Weights, shipped};
use crate::progress::Progress;
use crate::resume::{self, Continuation, Ingredient};
use crate::run_file::Run;
use crate::saver::{At, Place};
use crate::supervision::Supervision;
use crate::target;
use crate::task::Measured;
use crate::train::train;

/// The state from which a run continues in its directory `dir`. Reads its checkpoints and its
/// target, and changes nothing.
///
/// # Errors
///
/// Bad input, when the data, the target or the rows are not those of its checkpoints. A target that
/// is still to be trained is compared by the rank.
pub fn continuation(run: &Run, dir: &Path) -> Result<Continuation, Fault> {
    let mut made_of = resume::data(run);
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
        processor: &processor,
        supervision,
        started,
        peak,
    };
    // The loop runs on a thread of the pool, so that no step has to wake one.
    pool.enter(|| {
        if let Some(device) = processor.device() {
            supervision.world.join(device, &supervision.heartbeat)?;
        }
        let outcome = Outcome::of(job.go())?;
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
    check_leak(run, &**network)?;
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
        processor: &processor,
        supervision: &Supervision::default(),
        started,
        peak,
    };
    pool.enter(|| Outcome::of(job.go()))
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
    processor: &'a Processor,
    supervision: &'a Supervision,
    started: Instant,
    peak: Peak,
}

impl Job<'_> {
    fn go(&self) -> Result<(), Interrupt> {
        let Supervision {
            world, heartbeat, ..
        } = self.supervision;
        let lock = world.is_first().then(|| Lock::take(self.run_dir));
        let lock = lock.transpose()?;
        heartbeat.enter("data");
        let mut made_of = resume::data(self.run);
        let (sources, (weights, of_target)) = self.open(&made_of)?;
        made_of.push(target::made_of(self.run, &**self.network, &weights)?);
        heartbeat.enter("planning");
        let mut store = Store::new();
        let mut task = self.plan(sources, weights, &mut store)?;
        if let (Some(device), true) = (self.processor.device(), world.is_first()) {
            let mut progress = Progress::at(self.run_dir, heartbeat)?;
            for line in device.remarks() {
                progress.event(0, line);
            }
        }
        let place = Place {
            dir: self.run_dir,
            lock: lock.as_ref(),
            world,
            checkpoint: self.run.checkpoint,
            log: self.run.log,
            config: self.text,
            made_of: &made_of,
            is_kept: false,
            progress: None,
            heartbeat,
        };
        let last = train(&mut task, &mut store, &place, &|| self.is_asked_to_stop())?;
        // The target's programs are gone when those of the decomposition are made.
        let planned = task.memory(&store).total().max(of_target.total());
        self.summarise(&mut task, &mut store, last, planned)
    }

    fn is_asked_to_stop(&self) -> bool {
        self.supervision.stop.load(Ordering::Relaxed)
    }

    /// The data, and the target's weights with what it took to train them. The first rank reads all
    /// of the data, and trains the target; the others find both as they should be.
    fn open(&self, made_of: &[Ingredient]) -> Result<(Sources, (Weights, Memory)), Interrupt> {
        let &Self {
            run,
            network,
            run_dir,
            processor,
            supervision,
            ..
        } = self;
        supervision.world.in_turn(|| {
            let sources = data::open_checked(run)?;
            if supervision.world.is_first() {
                // Before a target is trained for it.
                let goes_on = resume::goes_on(run_dir, made_of, run.checkpoint.every)?;
                if let Continuation::Lost(line) = goes_on {
                    return Err(Fault::BadInput(line).into());
                }
                keep_record(processor, run_dir)?;
            }
            let on = (processor, self.target_threads);
            let weights = target::weights(run, network, run_dir, &sources, on, supervision)?;
            Ok((sources, weights))
        })
    }

    /// The programs, with room for them.
    fn plan(
        &self,
        sources: Sources,
        weights: Weights,
        store: &mut Store,
    ) -> Result<DecompositionTask, Interrupt> {
        let (processor, world) = (self.processor, &self.supervision.world);
        let decomposition = Decomposition::of(self.run, self.network, store)?;
        decomposition.set_target(store, &weights);
        drop(weights);
        let plan = || {
            if !world.is_first() {
                keep_record(processor, self.run_dir)?;
            }
            let task = DecompositionTask::new(decomposition, sources, store, processor, world);
            Ok(task?)
        };
        // The first rank autotunes, and the others read its choices.
        let mut task = match processor {
            Processor::Gpu(_) => world.in_turn(plan)?,
            Processor::Cpu(_) => plan()?,
        };
        task.make_room()?;
        Ok(task)
    }

    /// Writes `summary.json`.
    fn summarise(
        &self,
        task: &mut DecompositionTask,
        store: &mut Store,
        last: Measured,
        planned: usize,
    ) -> Result<(), Interrupt> {
        let Supervision {
            world, heartbeat, ..
        } = self.supervision;
        let spent = Spent {
            time: self.started.elapsed(),
            planned,
            peak: &self.peak,
        };
        let mut progress = match world.is_first() {
            true => Progress::at(self.run_dir, heartbeat)?,
            false => Progress::felt(heartbeat),
        };
        let step = self.run.train.steps;
        let ended = world.first(|| {
            let summary = Summary {
                run_dir: self.run_dir,
                of: Of::End(&spent),
                last,
            };
            let text = summary::text(&summary, task, store, &mut || {
                progress.show("eval", 0, step, false);
                Interrupt::when(self.is_asked_to_stop())
            })?;
            let path = self.run_dir.join("summary.json");
            Ok(write_file(&path, text.as_bytes())?)
        });
        if matches!(ended, Err(Interrupt::Stop)) {
            progress.stopped(step, At::Step(step).stopped(""));
        }
        ended
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
    fn a_foreign_record_of_kernels_is_bad_input() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Arc::new(Pool::single());
        let on = [
            processor(None, &pool).unwrap(),
            Processor::Gpu(Some(spd_emulated::device())),
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
