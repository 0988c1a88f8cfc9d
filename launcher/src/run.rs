//! `spd-launch CONFIG`: checks a run, then runs it to its end.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use spd_checkpoint::Lock;
use spd_trainer::run_file::Run;
use spd_trainer::{Continuation, Fault, RunPlan, World, cuda, refuses_world};

use crate::cli::{self, RunArgs};
use crate::exit::Exit;
use crate::hub::{self, RunFiles};
use crate::launched::Launched;
use crate::nodes::{First, Here, Joining, Member};
use crate::ranks::{Program, own_program};
use crate::restart::Restarts;
use crate::run_dir::{Found, RunDir};
use crate::slurm::Job;
use crate::stop::{self, Stop};
use crate::supervise;
use crate::supervisor::{HangLimit, Timeouts};
use crate::track::Track;
use crate::world::Node;
use crate::{memory, plan, screen, summary};

/// Runs a run file to its end, continuing an earlier launch.
///
/// # Errors
///
/// Bad input, before anything is created; failures of this machine. Failures of ranks are printed
/// here and returned as an exit.
pub(crate) fn run(asked: &RunArgs) -> Result<Exit, Fault> {
    let node = match asked.slurm {
        Some(nodes) => Node::planned(nodes),
        None => Node::from_env().map_err(Fault::BadInput)?,
    };
    let unseen = unseen_gpus(asked, world_size(asked, &node))?;
    if let Some(jobs) = asked.jobs {
        return Err(Fault::BadInput(format!(
            "--jobs {jobs}: there is one run; it goes with --seeds or --sweep"
        )));
    }
    let Checked {
        run,
        run_dir,
        found,
        destination,
        mut run_plan,
        mut files,
    } = check(asked, &node, unseen.is_some())?;
    run_plan
        .rows
        .extend(unseen.map(|row| ("GPUs".to_owned(), row)));
    if let Some(derivation) = node.derivation() {
        run_plan.rows.push(("node".to_owned(), derivation));
    }
    if found == Found::Finished {
        return if node.is_first() {
            finished(&run_dir)
        } else {
            Ok(Exit::Done)
        };
    }
    if !node.is_first() {
        if asked.dry_run {
            return Ok(Exit::Done);
        }
        return join(asked, &node, &run, &run_dir);
    }
    let plan = plan::text(&run.name, &destination, &run_plan);
    if asked.slurm.is_some() {
        screen::note(plan.trim_end());
        let command = own_command().map_err(Fault::Failed)?;
        let job = Job {
            name: &run.name,
            nodes: node.count,
            threads: threads_of_rank(asked) * asked.ranks(),
            gpus: asked.gpus,
            memory: &run_plan.memory,
            command,
        };
        screen::result(&job.script());
        return Ok(Exit::Done);
    }
    if asked.dry_run {
        screen::result(&plan);
        screen::note("dry run: nothing was created");
        return Ok(Exit::Done);
    }
    screen::plan(&plan);
    files.fetch([&run])?;
    let hold = if found == Found::Nothing {
        create(&run_dir, &run, asked.fresh)?
    } else {
        let hold = run_dir.hold().map_err(Fault::BadInput)?;
        run_dir.retrack(&run).map_err(Fault::BadInput)?;
        hold
    };
    let launched = Launched::now(hold);
    let mut track = None;
    let ended = launch(asked, &node, (&run, &run_dir), &run_plan, &mut track);
    let lock = launched.leave(&ended);
    if let Some(track) = track {
        track.finish(ended.as_ref().map_or(Exit::Failed, |(exit, _)| *exit));
    }
    drop(lock);
    let (exit, _) = ended?;
    if exit == Exit::Done {
        show_end(&run_dir).map_err(Fault::Failed)?;
    }
    Ok(exit)
}

/// Runs a run whose directory is locked; returns how it ended, and the first line about that.
/// `track` keeps the trackers, samples and page.
fn launch(
    asked: &RunArgs,
    node: &Node,
    (run, run_dir): (&Run, &RunDir),
    run_plan: &RunPlan,
    track: &mut Option<Track>,
) -> Result<(Exit, String), Fault> {
    let mut stop = Stop::listen().context("cannot install signal handlers")?;
    let mut others = None;
    if node.count > 1 {
        let joining = Joining::open(run_dir, node, here(asked)).map_err(Fault::Failed)?;
        others = joining.join(run, joins_within(asked), &mut stop)?;
        if others.is_none() {
            let said = "stopped before the launchers of all nodes were there";
            return Ok((Exit::Stopped, said.to_owned()));
        }
    }
    let program = program(asked, node, run_dir).map_err(Fault::Failed)?;
    let memory = plan::memory(&run_plan.memory);
    let restarts = Restarts::new(asked.restarts);
    let ranks = Attempts {
        program,
        run_dir,
        timeouts: timeouts(asked),
        memory: &memory,
    };
    let track = track.insert(Track::of_run(run_dir.path(), run, node));
    stop.heed(track.stop());
    let ended = ranks.run(restarts, &mut stop, others.as_mut());
    if let Some(others) = others {
        // The other launchers do not wait for trackers.
        match &ended {
            Ok((exit, _)) => others.quit(*exit, None),
            Err(error) => others.quit(Exit::Failed, Some(&format!("{error:#}"))),
        }
    }
    ended.map_err(Fault::Failed)
}

/// Ranks of all nodes.
fn world_size(asked: &RunArgs, node: &Node) -> usize {
    asked.ranks() * node.nodes()
}

/// CPU threads of each rank.
fn threads_of_rank(asked: &RunArgs) -> usize {
    (cli::threads(asked.threads) / asked.ranks()).max(1)
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

/// The command line of this program, with its absolute path.
fn own_command() -> anyhow::Result<Vec<OsString>> {
    let program = env::current_exe().context("cannot find this program's executable")?;
    let arguments = env::args_os().skip(1);
    Ok([program.into_os_string()]
        .into_iter()
        .chain(arguments)
        .collect())
}

/// The node of a launcher that must be the only one.
///
/// # Errors
///
/// One line, when it is one of several, or environment variables disagree about that.
pub(crate) fn only_node() -> Result<Node, Fault> {
    let node = Node::from_env().map_err(Fault::BadInput)?;
    if node.count > 1 {
        return Err(Fault::BadInput(format!(
            "{node}: several runs at once share the cores of one node; start one launcher"
        )));
    }
    Ok(node)
}

/// A run that has passed all checks.
struct Checked {
    run: Run,
    run_dir: RunDir,
    found: Found,
    /// Its directory, in words; empty, as the plan is, for a finished run.
    destination: String,
    run_plan: RunPlan,
    /// Its pending downloads.
    files: RunFiles,
}

/// Checks everything that can be checked before a run or for `--dry-run`; creates nothing.
///
/// - `gpus_unseen`: whether the memory of the GPUs is unknown here
fn check(asked: &RunArgs, node: &Node, gpus_unseen: bool) -> Result<Checked, Fault> {
    let path = spd_configs::locate(&asked.config)?;
    let mut files = RunFiles::of(asked);
    let run = files.load(&path, &asked.set);
    let mut run = run?;
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
    let ranks = world_size(asked, node);
    decide_shards(&mut run, begun, ranks, asked).map_err(Fault::BadInput)?;
    let found = if asked.fresh {
        run_dir.find_old().map(|_| Found::Nothing)
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
    if checked.found == Found::Finished {
        return Ok(checked);
    }
    let Checked { run, run_dir, .. } = &checked;
    let world = World::planned(ranks, node.nodes());
    let threads = threads_of_rank(asked);
    let mut run_plan = spd_trainer::run_plan(run, threads, asked.gpus > 0, &world)?;
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
    memory::check(run, need, there, |more| {
        let set: Vec<String> = set.iter().chain(more).cloned().collect();
        let mut run = hub::load_again(run, path, &set)?;
        decide_shards(&mut run, None, world.size(), asked).ok()?;
        let run_plan =
            spd_trainer::run_plan(&run, threads_of_rank(asked), asked.gpus > 0, world).ok()?;
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
            let run_plan = spd_trainer::run_plan(&run, threads_of_rank(asked), true, world).ok()?;
            run_plan.gpu_memory.map(|memory| memory.total())
        };
        memory::check(run, need.total(), Some(there), with).map_err(|line| {
            line.replacen(" of memory", &format!(" of the memory of GPU {gpu}"), 1)
        })?;
    }
    Ok(())
}

/// The GPU of a single rank.
pub(crate) const GPU: usize = 0;

/// A row of the plan about the GPUs of `--gpus` where it is made without them: on a login node, or
/// for a job elsewhere.
///
/// # Errors
///
/// As [`gpus`], if the run is to start here and now.
fn unseen_gpus(asked: &RunArgs, ranks: usize) -> Result<Option<String>, Fault> {
    if !asked.dry_run || asked.gpus == 0 {
        return gpus(asked.gpus, ranks).map(|_| None);
    }
    let why = match cuda::lacks(asked.gpus, ranks > 1) {
        Some(lacks) => format!("not visible here ({lacks})"),
        None if asked.slurm.is_some() => "those of the job, not of this machine".to_owned(),
        None => return Ok(None),
    };
    Ok(Some(format!(
        "{why}: their memory is checked when the run starts"
    )))
}

/// The number of GPUs of `--gpus`, after checking that they are usable.
///
/// - `ranks`: of all nodes
///
/// # Errors
///
/// One line, when there are fewer, or a library is missing.
pub(crate) fn gpus(asked: usize, ranks: usize) -> Result<usize, Fault> {
    if asked > 0
        && let Some(lacks) = cuda::lacks(asked, ranks > 1)
    {
        return Err(Fault::BadInput(format!(
            "--gpus {asked}: {lacks}; `spd-launch doctor` says what this machine has; leave it out to run on the CPU"
        )));
    }
    Ok(asked)
}

/// The GPU of `--gpus` for a command with one rank.
///
/// # Errors
///
/// One line, when there is none, or several are requested.
pub(crate) fn gpu(asked: usize) -> Result<Option<usize>, Fault> {
    if asked > 1 {
        return Err(Fault::BadInput(format!(
            "--gpus {asked}: only a run uses several GPUs; give --gpus 1"
        )));
    }
    Ok((gpus(asked, 1)? > 0).then_some(GPU))
}

/// Bytes of the checkpoints still to be written: one more than are kept, as the oldest is deleted
/// after the newest is written. They share the target's weights.
pub(crate) fn checkpoint_bytes(run: &Run, run_plan: &RunPlan, found: &Found) -> u64 {
    let checkpoints = if *found == Found::Nothing {
        run.checkpoint.keep.saturating_add(1)
    } else {
        1
    };
    let states = run_plan.state_bytes.saturating_mul(checkpoints);
    states.saturating_add(run_plan.frozen_bytes) as u64
}

fn destination(run: &Run, run_dir: &RunDir, found: &Found) -> Result<String, Fault> {
    let what = match found {
        Found::Nothing if run_dir.stands().map_err(Fault::BadInput)? => {
            "new; the existing one is moved aside".to_owned()
        }
        Found::Nothing => "new".to_owned(),
        Found::Begun | Found::Finished | Found::FinishedUnread(_) => goes_on(run, run_dir, found)?,
    };
    Ok(format!("{} ({what})", run_dir.path().display()))
}

/// The step from which an existing run continues, in words for the plan.
///
/// # Errors
///
/// Bad input, when its checkpoints are lost, or its data or target differ from those it began with.
pub(crate) fn goes_on(run: &Run, run_dir: &RunDir, found: &Found) -> Result<String, Fault> {
    let words = match spd_trainer::continuation(run, run_dir.path())? {
        Continuation::From(0) => "continued from before its first step".to_owned(),
        Continuation::From(step) => format!("continued from step {step}"),
        Continuation::Anew => "begins again: no checkpoint was written yet".to_owned(),
        Continuation::Lost(line) => return Err(Fault::BadInput(line)),
    };
    if let Found::FinishedUnread(why) = found {
        screen::note(&format!(
            "{why}; it is made again from the newest checkpoint"
        ));
    }
    Ok(words)
}

/// Makes and locks the directory of a run. An existing one is moved aside, and back if the creation
/// fails.
///
/// # Errors
///
/// When the file system refuses, or a launcher holds the existing directory.
pub(crate) fn create(run_dir: &RunDir, run: &Run, fresh: bool) -> Result<Lock, Fault> {
    let _whole = stop::hold();
    let in_the_way = fresh && run_dir.find_old().map_err(Fault::BadInput)?;
    let aside = if in_the_way {
        Some(run_dir.set_aside().map_err(Fault::BadInput)?)
    } else {
        None
    };
    let prepared = run_dir.prepare(run).map_err(Fault::BadInput);
    match (&prepared, &aside) {
        (Ok(_), Some(aside)) => screen::note(&format!(
            "the old {} is now {}",
            run_dir.path().display(),
            aside.path().display()
        )),
        (Err(_), Some(aside)) => run_dir
            .put_back(aside)
            .with_context(|| format!("{}: cannot be moved back", aside.path().display()))
            .map_err(Fault::Failed)?,
        (_, None) => {}
    }
    prepared
}

/// Runs a launcher that is not the first.
fn join(asked: &RunArgs, node: &Node, run: &Run, run_dir: &RunDir) -> Result<Exit, Fault> {
    let mut stop = Stop::listen().context("cannot install signal handlers")?;
    let of_node = (run, run_dir, here(asked));
    let member = Member::join(node, of_node, joins_within(asked), &mut stop)?;
    let Some(member) = member else {
        return Ok(Exit::Stopped);
    };
    let program = program(asked, node, run_dir).map_err(Fault::Failed)?;
    let track = Track::of_node(run_dir.path(), node);
    let served = member.serve(&program, run_dir, &mut stop);
    track.finish(served.as_ref().map_or(Exit::Failed, |exit| *exit));
    served.map_err(Fault::Failed)
}

/// The resources of this node.
fn here(asked: &RunArgs) -> Here {
    Here {
        ranks: asked.ranks(),
        computed_by: spd_trainer::computed_by(asked.gpus),
    }
}

/// How long the launchers of a run wait for each other.
fn joins_within(asked: &RunArgs) -> Duration {
    Duration::from_secs(asked.join_seconds)
}

fn timeouts(asked: &RunArgs) -> Timeouts {
    Timeouts {
        grace: Duration::from_secs(asked.grace),
        hang: match asked.hang_seconds {
            None => HangLimit::Learned,
            Some(0) => HangLimit::Never,
            Some(seconds) => HangLimit::After(Duration::from_secs(seconds)),
        },
    }
}

/// The program of the ranks of this node.
fn program(asked: &RunArgs, node: &Node, run_dir: &RunDir) -> anyhow::Result<Program> {
    let path = match &asked.rank_program {
        Some(path) => path.clone(),
        None => own_program().context("cannot find this program's executable")?,
    };
    let first = node.place() * asked.ranks();
    Ok(Program {
        path,
        run_dir: run_dir.path().to_owned(),
        threads: threads_of_rank(asked),
        target_threads: asked
            .target_threads
            .unwrap_or_else(|| cli::threads(asked.threads)),
        on_gpu: asked.gpus > 0,
        ranks: world_size(asked, node),
        here: first..first + asked.ranks(),
    })
}

/// The attempts of a run: its start and its restarts.
struct Attempts<'a> {
    program: Program,
    run_dir: &'a RunDir,
    timeouts: Timeouts,
    /// Planned memory of the run, in words.
    memory: &'a str,
}

impl Attempts<'_> {
    /// Runs until success or until no restart is allowed; also returns the first line about the
    /// end.
    fn run(
        &self,
        mut restarts: Restarts,
        stop: &mut Stop,
        mut others: Option<&mut First>,
    ) -> anyhow::Result<(Exit, String)> {
        let Self {
            program,
            run_dir,
            timeouts,
            memory,
        } = self;
        loop {
            let of_others = others.as_deref_mut();
            let attempt = supervise::attempt(program, run_dir, *timeouts, stop, of_others, memory)?;
            let mut lines = attempt.message.iter();
            let first = lines.next();
            let said = first.cloned().unwrap_or_default();
            if let Some(first) = first {
                match attempt.exit {
                    Exit::Failed | Exit::BadInput => screen::error(first),
                    _ => screen::end(first),
                }
            }
            lines.for_each(|line| screen::end(line));
            let is_whole = others.as_ref().is_none_or(|others| others.is_whole());
            if !attempt.may_restart || stop.asked() || !is_whole {
                return Ok((attempt.exit, said));
            }
            let newest = spd_checkpoint::newest_step(&run_dir.checkpoints());
            match restarts.again(newest) {
                Ok(()) => screen::note(&match newest {
                    Some(step) => format!("started again; its newest checkpoint is of step {step}"),
                    None => {
                        "started again from the beginning: there is no checkpoint yet".to_owned()
                    }
                }),
                Err(reason) => {
                    reason.into_iter().for_each(screen::note);
                    return Ok((attempt.exit, said));
                }
            }
        }
    }
}

fn finished(run_dir: &RunDir) -> Result<Exit, Fault> {
    show_end(run_dir).map_err(Fault::Failed)?;
    screen::note(&format!(
        "{} is finished; --fresh runs it again (the old directory is moved aside), --out elsewhere",
        run_dir.path().display()
    ));
    Ok(Exit::Done)
}

fn show_end(run_dir: &RunDir) -> anyhow::Result<()> {
    let (text, summary) = summary::read(&run_dir.summary())?;
    let place = format!("results are in {}\n", run_dir.path().display());
    screen::result_of(&format!("{text}\n"), &place, summary);
    Ok(())
}
