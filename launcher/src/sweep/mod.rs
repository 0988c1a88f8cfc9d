//! `spd-launch CONFIG --seeds ... --sweep ...`: several runs that share the cores, and one table at
//! the end.
//!
//! ```text
//! axes -> members: load, run plan       refuses all bad input, for all members
//!      -> run_dir                       runs/NAME.sweep, with one run directory for each member
//!      -> spd-launch DIR/config.toml    as many members at a time as there are cores
//!      -> status_lines, report          a line a running member; a table and sweep.json at the end
//!      -> rows                          the sweep's own rows for trackers
//! ```
//!
//! A member is an ordinary run in an ordinary run directory: `spd-launch` on its `config.toml`
//! would continue it alone.

mod axes;
mod member;
mod report;
pub(crate) mod rows;
mod status_lines;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use spd_checkpoint::atomic::write_file;
use spd_configs::Place;
use spd_report::{PAGE, State};
use spd_trainer::run_file::Run;
use spd_trainer::{Fault, RunPlan, Threads, World};

use self::axes::{Axis, Combination, axes, combinations};
use self::member::Member;
use self::rows::SweepRows;
use self::status_lines::StatusLines;
use crate::cli::{self, RunArgs};
use crate::exit::Exit;
use crate::gpus::gpu;
use crate::hub::RunFiles;
use crate::launched::Launched;
use crate::run::check::{check_memory, checkpoint_bytes, continued_from};
use crate::run::create;
use crate::run_dir::{DirState, RunDir};
use crate::stop::{self, Stop, StopRequest};
use crate::track::Track;
use crate::world::Node;
use crate::{plan, screen};

/// Interval of reading the members' rows.
const READ: Duration = Duration::from_millis(200);

/// Settings common to all members.
struct Sweep<'a> {
    asked: &'a RunArgs,
    name: String,
    root: RunDir,
    jobs: usize,
    /// CPU threads of each member, and of the one that trains the target while the others wait.
    threads: Threads,
    /// The rows for trackers, once the sweep has begun.
    rows: Option<SweepRows>,
}

/// Runs every combination of values to its end, continuing an earlier launch.
///
/// # Errors
///
/// Bad input, before anything is created; failures of this machine. Failures of members are in the
/// table and the exit.
pub(crate) fn sweep(asked: &RunArgs) -> Result<Exit, Fault> {
    Node::only().map_err(Fault::BadInput)?;
    if gpu(asked.gpus)?.is_some() {
        return Err(Fault::BadInput(
            "--gpus 1: several runs use the CPU; run them one after the other, or leave it out"
                .into(),
        ));
    }
    let bad = |lines: Vec<String>| Fault::BadInputs(lines);
    let axes = axes(asked.seeds.as_deref(), &asked.sweep, &asked.set).map_err(bad)?;
    let path = spd_configs::locate(&asked.config)?;
    let mut files = RunFiles::of(asked);
    let (name, runs) = load(&mut files, (&path, &asked.set), &axes).map_err(bad)?;
    let root = asked.out.clone();
    let root = RunDir::at(root.unwrap_or_else(|| Path::new("runs").join(format!("{name}.sweep"))));
    let stands = root.find_sweep().map_err(Fault::BadInput)?;
    let mut members: Vec<Member> = runs
        .into_iter()
        .map(|(values, mut run)| {
            if !asked.tracker.is_empty() {
                run.tracker.to.clone_from(&asked.tracker);
            }
            rows::label(&mut run, &name, &axes::name(&values));
            Member::new(&root, values, run)
        })
        .collect();
    let found = find(asked, &members).map_err(bad)?;
    let cores = cli::threads(asked.threads);
    let jobs = asked.jobs.unwrap_or(cores).min(members.len()).min(cores);
    let mut sweep = Sweep {
        asked,
        name,
        root,
        jobs,
        threads: threads(&members, cores, jobs),
        rows: None,
    };
    let (mut run_plan, largest) = sweep.check(&members, &found)?;
    let set = overrides(&asked.set, &largest.values);
    let room_for = |run_plan| {
        check_memory(
            asked,
            (&path, &set),
            &World::default(),
            &largest.run,
            run_plan,
        )
    };
    let room = room_for(&run_plan).map_err(Fault::BadInput)?;
    if let Some(room) = room.filter(|room| *room < sweep.jobs) {
        screen::note(&format!(
            "{room} at a time instead of {}: more do not fit in memory",
            sweep.jobs
        ));
        sweep.jobs = room;
        // Running members use the cores of the others, if memory allows: each thread takes some.
        let threads = cores / room;
        let world = World::default();
        let wider = spd_trainer::run_plan(&largest.run, threads, false, &world)?;
        if matches!(room_for(&wider), Ok(Some(found)) if found >= room) {
            (sweep.threads.run, run_plan) = (threads, wider);
        }
    }
    let mut run_plan = sweep.described(run_plan, &members, &found);
    run_plan.rows.push(plan::run_file(&path));
    run_plan.rows.extend(files.rows());
    screen::plan(&plan::text(
        &format!("{}: {} runs", sweep.name, members.len()),
        &format!(
            "{} ({})",
            sweep.root.path().display(),
            if stands { "continued" } else { "new" }
        ),
        &run_plan,
    ));
    for (member, found) in members.iter_mut().zip(&found) {
        if *found == DirState::Finished {
            member.state = State::Done;
            member.read_results()?;
        }
    }
    if asked.dry_run {
        screen::note("dry run: nothing was created");
        return Ok(Exit::Done);
    }
    files.fetch(members.iter().map(|member| &member.run))?;
    let hold = if stands {
        sweep.root.hold()
    } else {
        let file = report::json(&sweep.name, &members);
        sweep.root.prepare_sweep(&file)
    };
    let launched = Launched::now(hold.map_err(Fault::BadInput)?);
    sweep.rows = SweepRows::start(&sweep.root);
    sweep.write(&members)?;
    let about = rows::about(&sweep.name, &members);
    let track = about.map(|about| Track::of_sweep(sweep.root.path(), about));
    let ended = sweep.run(&mut members, &found);
    let written = sweep.write(&members);
    // All rows are in their files before trackers are told that the sweep is over.
    drop(sweep.rows.take());
    let has_failed = members.iter().any(|m| m.state == State::Failed);
    let ended = ended.map_err(Fault::Failed).map(|exit| match exit {
        Exit::Done if has_failed => (Exit::Failed, String::new()),
        exit => (exit, String::new()),
    });
    launched.leave(&ended, track);
    written?;
    let (table, dir) = (report::text(&sweep.name, &members), sweep.root.path());
    let page = dir.join(PAGE);
    let page = if page.is_file() {
        format!("; its page is {}", page.display())
    } else {
        String::new()
    };
    let place = format!("results are in {}{page}\n", dir.display());
    let object = serde_json::from_str(&report::json(&sweep.name, &members));
    screen::result_of(&format!("{table}\n"), &place, object.unwrap_or_default());
    Ok(ended?.0)
}

/// Threads of `jobs` members at a time. If all need the same target, one of them trains it with all
/// cores while the others wait.
fn threads(members: &[Member], cores: usize, jobs: usize) -> Threads {
    let run = (cores / jobs).max(1);
    let is_one = members.windows(2).all(|pair| {
        let [one, other] = [&pair[0].run, &pair[1].run];
        one.target == other.target && one.data == other.data
    });
    Threads {
        run,
        target: if is_one { cores.max(run) } else { run },
    }
}

type Runs = Vec<(Combination, Run)>;

/// The run of each combination, and their common name.
fn load(
    files: &mut RunFiles,
    (path, set): (&Path, &[String]),
    axes: &[Axis],
) -> Result<(String, Runs), Vec<String>> {
    let (mut runs, mut lines, mut known) = (Runs::new(), Vec::new(), BTreeSet::new());
    let mut name = None;
    for values in combinations(axes) {
        match files.load(path, &overrides(set, &values)) {
            Ok(run) => {
                name.get_or_insert_with(|| run.name.clone());
                runs.push((values, run));
            }
            Err(faults) => {
                for fault in faults.iter() {
                    let swept = |key: &str| axes.iter().find(|axis| axis.key == key);
                    let line = match &fault.place {
                        Place::Override(key) => match swept(key) {
                            Some(axis) => format!("{}: {}", axis.said(), fault.message),
                            None => fault.to_string(),
                        },
                        _ => fault.to_string(),
                    };
                    // An invalid value is invalid in each of its combinations.
                    if known.insert(line.clone()) {
                        lines.push(line);
                    }
                }
            }
        }
    }
    let (mut names, mut told) = (BTreeMap::new(), BTreeMap::new());
    for (values, run) in &runs {
        if let Some(other) = told.insert(run.to_toml(), values) {
            let line = alike(axes, other, values);
            if known.insert(line.clone()) {
                lines.push(line);
            }
        }
        if let Some(other) = names.insert(axes::name(values), values) {
            lines.push(format!(
                "{other:?} and {values:?} would share the directory {}; sweep them one after the other, each with its own --out",
                axes::name(values)
            ));
        }
    }
    match name {
        Some(name) if lines.is_empty() => Ok((name, runs)),
        _ => Err(lines),
    }
}

/// The message about two combinations that give the same run.
fn alike(axes: &[Axis], one: &Combination, other: &Combination) -> String {
    let mut differ = axes.iter().zip(one.iter().zip(other));
    differ.by_ref().find(|(_, (a, b))| a != b).map_or_else(
        || format!("{other:?} is repeated"),
        |(axis, ((_, a), (_, b)))| {
            format!(
                "{}: {a} and {b} give the same run; leave one of them out",
                axis.said()
            )
        },
    )
}

fn overrides(set: &[String], values: &Combination) -> Vec<String> {
    let values = values.iter().map(|(key, value)| format!("{key}={value}"));
    set.iter().cloned().chain(values).collect()
}

/// The state of each member's directory.
fn find(asked: &RunArgs, members: &[Member]) -> Result<Vec<DirState>, Vec<String>> {
    let (mut all, mut lines) = (Vec::new(), Vec::new());
    for member in members {
        let found = if asked.fresh {
            member.dir.find_old().map(|_| DirState::Nothing)
        } else {
            member.dir.find(&member.run)
        };
        match found {
            Ok(found) => all.push(found),
            Err(line) => lines.push(line),
        }
    }
    if !lines.is_empty() {
        return Err(lines);
    }
    // The table is about one dataset and one target, so if any run is left, finished ones are
    // checked too.
    if all.iter().any(|found| *found != DirState::Finished) {
        for (member, found) in members.iter().zip(&all) {
            let same = match found {
                DirState::Nothing => Ok(()),
                // Its checkpoints may be gone: it needs none.
                DirState::Finished => {
                    spd_trainer::continuation(&member.run, member.dir.path()).map(drop)
                }
                DirState::Begun | DirState::FinishedUnread(_) => {
                    continued_from(&member.run, &member.dir, found).map(drop)
                }
            };
            lines.extend(same.err().map(|fault| fault.to_string()));
        }
    }
    if lines.is_empty() {
        Ok(all)
    } else {
        Err(lines)
    }
}

impl Sweep<'_> {
    /// Checks everything that could keep a member from starting; returns the one that needs the
    /// most memory.
    fn check<'m>(
        &self,
        members: &'m [Member],
        found: &[DirState],
    ) -> Result<(RunPlan, &'m Member), Fault> {
        let mut known: Vec<(Run, RunPlan, &Member)> = Vec::new();
        let mut bytes = 0_u64;
        for (member, found) in members.iter().zip(found) {
            // A seed changes neither shapes nor files.
            let alike = Run {
                seed: 0,
                ..member.run.clone()
            };
            let run_plan = match known.iter().find(|(run, ..)| *run == alike) {
                Some((_, run_plan, _)) => run_plan,
                None => {
                    let world = World::default();
                    let run_plan =
                        spd_trainer::run_plan(&member.run, self.threads.run, false, &world)?;
                    known.push((alike, run_plan, member));
                    &known.last().expect("pushed just now").1
                }
            };
            if *found != DirState::Finished {
                member
                    .dir
                    .check(0, self.asked.fresh)
                    .map_err(Fault::BadInput)?;
                bytes = bytes.saturating_add(checkpoint_bytes(&member.run, run_plan, found));
            }
        }
        self.root
            .check(bytes, self.asked.fresh)
            .map_err(Fault::BadInput)?;
        let largest = known
            .into_iter()
            .max_by_key(|(_, run_plan, _)| run_plan.memory.total());
        let (_, run_plan, member) = largest.expect("a sweep has a run");
        Ok((run_plan, member))
    }

    /// Describes all members in the plan of one.
    fn described(&self, run_plan: RunPlan, members: &[Member], found: &[DirState]) -> RunPlan {
        let values = members.first().into_iter().flat_map(|first| &first.values);
        let keys: Vec<&str> = values.map(|(key, _)| key.as_str()).collect();
        let ends = members.first().zip(members.last());
        let ends = ends.map(|(first, last)| format!("{} to {}", first.name, last.name));
        let finished = found.iter().filter(|of| **of == DirState::Finished);
        let done = match finished.count() {
            0 => String::new(),
            finished => format!(", {finished} of them finished before"),
        };
        let line = format!(
            "{} of {}, {}{done}; {} at a time, {} thread{} each",
            members.len(),
            keys.join(" and "),
            ends.unwrap_or_default(),
            self.jobs,
            self.threads.run,
            if self.threads.run == 1 { "" } else { "s" }
        );
        let mut run_plan = run_plan;
        for (label, value) in &mut run_plan.rows {
            if label == "run" {
                value.clone_from(&line);
            }
        }
        run_plan
    }

    /// Starts members as others end, until all have or a stop is requested.
    fn run(&mut self, members: &mut [Member], found: &[DirState]) -> Result<Exit> {
        let mut stop = Stop::listen().context("cannot install signal handlers")?;
        let width = members.iter().map(|m| m.name.len()).max().unwrap_or(0);
        let mut status = StatusLines::new(members.len(), width);
        let mut last_read = Instant::now();
        loop {
            if !stop.asked() {
                self.start(members, found);
            }
            if !members.iter().any(|member| member.state == State::Running) {
                break;
            }
            match stop.request() {
                Some(StopRequest::Leave(signal)) => {
                    members.iter().for_each(Member::ask);
                    screen::note(&format!(
                        "{}: the runs save and exit, {} s at most; a second Ctrl-C kills them",
                        stop::name(signal),
                        self.asked.grace
                    ));
                }
                Some(StopRequest::LeaveNow(signal)) => {
                    members.iter_mut().for_each(Member::kill);
                    return Ok(Exit::Killed(signal));
                }
                // The launcher of each run talks to trackers.
                Some(StopRequest::Pressed) | None => {}
            }
            for index in 0..members.len() {
                if let Some((ran, events)) = members[index].ended()? {
                    let name = &members[index].name;
                    let events = events.iter().map(|event| format!("{name}  {event}"));
                    events.for_each(|event| screen::progress(&event));
                    let line = said_at_end(&members[index], ran);
                    screen::note(&line);
                    if let Some(rows) = &self.rows {
                        rows.tell(index, &members[index], &line);
                    }
                    self.write(members)?;
                }
            }
            if last_read.elapsed() >= READ {
                self.show(members, &mut status);
                last_read = Instant::now();
            }
            for output in members.iter_mut().filter_map(Member::output) {
                output.read();
            }
            stop.wait(members.iter().filter_map(Member::fd), READ);
        }
        let left = |member: &Member| matches!(member.state, State::Waiting | State::Stopped);
        Ok(if members.iter().any(left) {
            Exit::Stopped
        } else {
            Exit::Done
        })
    }

    /// Starts as many members as there is room for; one that cannot start has failed.
    fn start(&self, members: &mut [Member], found: &[DirState]) {
        let mut running = members.iter().filter(|m| m.state == State::Running).count();
        for (member, found) in members.iter_mut().zip(found) {
            if running >= self.jobs {
                return;
            }
            if member.state != State::Waiting {
                continue;
            }
            match self.start_one(member, found) {
                Ok(()) => running += 1,
                Err(cause) => {
                    screen::note(&format!("{}  failed: {cause}", member.name));
                    member.fail(cause);
                }
            }
        }
    }

    fn start_one(&self, member: &mut Member, found: &DirState) -> Result<(), String> {
        if *found == DirState::Nothing {
            // Released at once: the launcher of the member takes it.
            let hold = create(&member.dir, &member.run, self.asked.fresh);
            drop(hold.map_err(|fault| fault.to_string())?);
        } else {
            let _hold = member.dir.hold()?;
            member.dir.rewrite(&member.run)?;
        }
        let started = member.start(self.asked, self.threads);
        started.map_err(|error| format!("{error:#}"))
    }

    fn show(&self, members: &mut [Member], status: &mut StatusLines) {
        let count = |state| members.iter().filter(|m| m.state == state).count();
        let (done, failed) = (count(State::Done), count(State::Failed));
        let (mut running, mut events) = (Vec::new(), Vec::new());
        for member in members.iter_mut() {
            let name = member.name.clone();
            if let Some((progress, news)) = member.look() {
                events.extend(news.into_iter().map(|event| format!("{name}  {event}")));
                running.push((name, progress));
            }
        }
        events.iter().for_each(|event| screen::progress(event));
        let running: Vec<_> = running
            .iter()
            .map(|(name, progress)| (name.as_str(), *progress))
            .collect();
        status.show(&running, done + failed, failed);
    }

    /// Writes the state of the members.
    fn write(&mut self, members: &[Member]) -> Result<()> {
        let path = self.root.sweep();
        let written = write_file(&path, report::json(&self.name, members).as_bytes());
        if let Some(rows) = &mut self.rows {
            rows.add(&self.name, members, self.root.path());
        }
        written.with_context(|| path.display().to_string())
    }
}

fn said_at_end(member: &Member, ran: Duration) -> String {
    let state = match &member.failure {
        Some(cause) => format!("failed: {}", screen::plain(cause)),
        None => member.state.name().to_owned(),
    };
    format!("{}  {state}, after {:.0} s", member.name, ran.as_secs_f64())
}
