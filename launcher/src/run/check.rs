//! Checks before a run: its file, its directory, its data, and the memory that it needs.

use std::path::Path;

use spd_trainer::run_file::{Recompute, Run};
use spd_trainer::{Continuation, Fault, RunPlan, World, cuda, refuses_world};

use crate::cli::RunArgs;
use crate::hub::{self, RunFiles};
use crate::run_dir::{DirState, RunDir};
use crate::world::Node;
use crate::{memory, plan, screen};

/// A run that has passed all checks.
pub(super) struct Checked {
    pub(super) run: Run,
    pub(super) run_dir: RunDir,
    pub(super) found: DirState,
    /// Its directory, in words; empty, as the plan is, for a finished run.
    pub(super) destination: String,
    pub(super) run_plan: RunPlan,
    /// Its pending downloads.
    pub(super) files: RunFiles,
}

/// Checks everything that can be checked before a run or for `--dry-run`; creates nothing.
///
/// - `gpus_unseen`: whether the memory of the GPUs is unknown here
pub(super) fn check(asked: &RunArgs, node: &Node, gpus_unseen: bool) -> Result<Checked, Fault> {
    let path = spd_configs::locate(&asked.config)?;
    let mut files = RunFiles::of(asked);
    let mut run = files.load(&path, &asked.set)?;
    if !asked.tracker.is_empty() {
        run.tracker.to.clone_from(&asked.tracker);
    }
    if let Ok(keys) = Run::unused_keys(&path)
        && !keys.is_empty()
    {
        let (shown, keys) = (path.display(), keys.join(", "));
        screen::note(&format!("{shown}: without effect here: {keys}"));
    }
    let run_dir = RunDir::at(
        asked
            .out
            .clone()
            .unwrap_or_else(|| Path::new("runs").join(&run.name)),
    );
    let begun = if asked.fresh { None } else { run_dir.shards() };
    let ranks = asked.ranks() * node.nodes();
    decide_shards(&mut run, begun, ranks, asked).map_err(Fault::BadInput)?;
    let found = if asked.fresh {
        run_dir.find_old().map(|_| DirState::Nothing)
    } else {
        run_dir.find(&run)
    };
    let mut checked = Checked {
        found: found.map_err(Fault::BadInput)?,
        destination: String::new(),
        run_plan: RunPlan::default(),
        files,
        run,
        run_dir,
    };
    if checked.found == DirState::Finished {
        return Ok(checked);
    }
    let world = World::planned(ranks, node.nodes());
    let mut run_plan = decide_recompute(asked, &world, gpus_unseen, &mut checked.run)?;
    let Checked { run, run_dir, .. } = &checked;
    run_plan.rows.push(plan::run_file(&path));
    run_plan.rows.extend(checked.files.rows());
    check_memory(asked, (&path, &asked.set), &world, run, &run_plan).map_err(Fault::BadInput)?;
    if !gpus_unseen {
        check_gpu_memory(asked, &path, &world, run, &run_plan).map_err(Fault::BadInput)?;
    }
    // Only the first launcher checks the directory.
    if !node.is_first() {
        return Ok(checked);
    }
    let destination = destination(run, run_dir, &checked.found)?;
    run_dir
        .check(
            checkpoint_bytes(run, &run_plan, &checked.found),
            asked.fresh,
        )
        .map_err(Fault::BadInput)?;
    (checked.destination, checked.run_plan) = (destination, run_plan);
    Ok(checked)
}

/// Refuses a run that needs more memory than is available; returns how many such runs fit, if
/// known.
///
/// - `path`, `set`: the source of the run
///
/// # Errors
///
/// One line, with the most helpful setting.
pub(crate) fn check_memory(
    asked: &RunArgs,
    (path, set): (&Path, &[String]),
    world: &World,
    run: &Run,
    run_plan: &RunPlan,
) -> Result<Option<usize>, String> {
    let there = asked.memory.or_else(memory::available);
    let need = run_plan.memory.total();
    memory::check(run, need, there, memory::PATIENCE, |more| {
        let set: Vec<String> = set.iter().chain(more).cloned().collect();
        let mut run = hub::load_again(run, path, &set)?;
        decide_shards(&mut run, None, world.size(), asked).ok()?;
        let run_plan =
            spd_trainer::run_plan(&run, asked.threads_of_rank(), asked.gpus > 0, world).ok()?;
        Some(run_plan.memory.total())
    })?;
    Ok(there.map(|there| there / need.max(1)))
}

/// Refuses a run that needs more memory than its GPU has free.
fn check_gpu_memory(
    asked: &RunArgs,
    path: &Path,
    world: &World,
    run: &Run,
    run_plan: &RunPlan,
) -> Result<(), String> {
    let Some(need) = &run_plan.gpu_memory else {
        return Ok(());
    };
    // Every rank needs as much.
    for gpu in 0..asked.ranks() {
        let there = cuda::free_memory(gpu)?;
        let with = |more: &[String]| {
            let set: Vec<String> = asked.set.iter().chain(more).cloned().collect();
            let mut run = hub::load_again(run, path, &set)?;
            decide_shards(&mut run, None, world.size(), asked).ok()?;
            let run_plan =
                spd_trainer::run_plan(&run, asked.threads_of_rank(), true, world).ok()?;
            run_plan.gpu_memory.map(|memory| memory.total())
        };
        let checked = memory::check(run, need.total(), Some(there), memory::PATIENCE, with);
        checked.map_err(|line| {
            line.replacen(" of memory", &format!(" of the memory of GPU {gpu}"), 1)
        })?;
    }
    Ok(())
}

/// Decides whether gradients make intermediates again, where the run file leaves it open: they do
/// if the run does not fit into memory otherwise. Returns the plan.
fn decide_recompute(
    asked: &RunArgs,
    world: &World,
    gpus_unseen: bool,
    run: &mut Run,
) -> Result<RunPlan, Fault> {
    let plan =
        |run: &Run| spd_trainer::run_plan(run, asked.threads_of_rank(), asked.gpus > 0, world);
    let fits = |plan: &RunPlan| {
        let there = asked.memory.or_else(memory::available);
        let need = plan.gpu_memory.as_ref().filter(|_| !gpus_unseen);
        let mut gpus = 0..asked.ranks();
        there.is_none_or(|there| plan.memory.total() <= there)
            && need.is_none_or(|need| {
                gpus.all(|gpu| cuda::free_memory(gpu).is_ok_and(|there| need.total() <= there))
            })
    };
    let keeping = plan(run)?;
    if run.train.recompute != Recompute::Auto || fits(&keeping) {
        return Ok(keeping);
    }
    run.train.recompute = Recompute::Always;
    let again = plan(run)?;
    if fits(&again) {
        return Ok(again);
    }
    run.train.recompute = Recompute::Auto;
    Ok(keeping)
}

/// Sets the number of shards of a batch where the run file leaves it open: as at the beginning of
/// the run, or one for each rank.
///
/// - `begun`: the number of an existing run
/// - `ranks`: of all nodes
///
/// # Errors
///
/// One line, when the ranks cannot share them evenly.
fn decide_shards(
    run: &mut Run,
    begun: Option<usize>,
    ranks: usize,
    asked: &RunArgs,
) -> Result<(), String> {
    let refused = |why: String| {
        let (flag, here) = (asked.flag(), asked.ranks());
        if here == ranks {
            format!("{flag} {ranks}: {why}")
        } else {
            format!("{flag} {here} on {} nodes: {why}", ranks / here)
        }
    };
    let given = run.train.shards;
    let shards = given.or(begun).unwrap_or(ranks);
    if given.is_none()
        && let Some(why) = run.refuses_shards(shards)
    {
        return Err(refused(why));
    }
    if let Some(why) = refuses_world(shards, ranks) {
        return Err(refused(why));
    }
    // The default of run files.
    run.train.shards = (shards > 1).then_some(shards);
    Ok(())
}

/// Bytes of the checkpoints still to be written: one more than are kept, as the oldest is deleted
/// after the newest is written. They share the target's weights.
pub(crate) fn checkpoint_bytes(run: &Run, run_plan: &RunPlan, found: &DirState) -> u64 {
    let checkpoints = if *found == DirState::Nothing {
        run.checkpoint.keep.saturating_add(1)
    } else {
        1
    };
    let states = run_plan.state_bytes.saturating_mul(checkpoints);
    states.saturating_add(run_plan.frozen_bytes) as u64
}

fn destination(run: &Run, run_dir: &RunDir, found: &DirState) -> Result<String, Fault> {
    let what = match found {
        DirState::Nothing if run_dir.stands().map_err(Fault::BadInput)? => {
            "new; the existing one is moved aside".to_owned()
        }
        DirState::Nothing => "new".to_owned(),
        DirState::Begun | DirState::Finished | DirState::FinishedUnread(_) => {
            continued_from(run, run_dir, found)?
        }
    };
    Ok(format!("{} ({what})", run_dir.path().display()))
}

/// The step from which an existing run continues, in words for the plan.
///
/// # Errors
///
/// Bad input, when its checkpoints are lost, or its data or target differ from those it began with.
pub(crate) fn continued_from(
    run: &Run,
    run_dir: &RunDir,
    found: &DirState,
) -> Result<String, Fault> {
    let words = match spd_trainer::continuation(run, run_dir.path())? {
        Continuation::From(0) => "continued from before its first step".to_owned(),
        Continuation::From(step) => format!("continued from step {step}"),
        Continuation::Anew => "begins again: no checkpoint was written yet".to_owned(),
        Continuation::Lost(line) => return Err(Fault::BadInput(line)),
    };
    if let DirState::FinishedUnread(why) = found {
        screen::note(&format!(
            "{why}; it is made again from the newest checkpoint"
        ));
    }
    Ok(words)
}
