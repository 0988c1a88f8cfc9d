//! A run that ended, or goes on, looked at again: its newest good checkpoint is evaluated or drawn,
//! with other settings of its evaluation where some are given, on the processor. The run stays as
//! it is.
//!
//! An evaluation is a directory of the form of a run's, without checkpoints, so that whatever shows
//! runs shows it: `config.toml` with the settings that it was made with, `metrics.jsonl` with its
//! row, `figures/`, `summary.json`. `evaluated.json` says what it is of.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::json;
use spd_checkpoint::atomic::write_file;
use spd_checkpoint::{Lock, Snapshot, read_newest};
use spd_engine::{Pool, Processor, Store};
use spd_files::atomic::make_dirs;
use spd_tracker::{Mark, Row, Spool};
use xxhash_rust::xxh3::xxh3_64;

use crate::data;
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt, Outcome};
use crate::figures;
use crate::metrics::summary::{self, Of, Summary};
use crate::resume::{self, What};
use crate::run_file::{Data, EvalData, Run};
use crate::state;
use crate::task::Task as _;
use crate::training::evaluation_row;

/// The evaluations of a run directory.
const EVALUATIONS: &str = "evaluations";

/// A directory that has this file is one of an evaluation.
const EVALUATED: &str = "evaluated.json";

/// A request for a look at a run.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Again<'a> {
    /// The run directory (`config.toml` is there).
    pub run_dir: &'a Path,
    /// Keys of `[eval]`, in place of those of the run: `KEY=VALUE`.
    pub set: &'a [String],
    /// Another dataset to evaluate on.
    pub data: Option<&'a Path>,
    /// The directory of the evaluation, in place of one in the run directory.
    pub out: Option<&'a Path>,
    /// CPU threads.
    pub threads: usize,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
    /// Told before each pass of the ladder how many are made, and of how many.
    pub climbs: &'a (dyn Fn(u64, u64) + Sync),
}

impl<'a> Again<'a> {
    /// A look at the components of a run, which writes nothing.
    pub(crate) fn at_components(
        run_dir: &'a Path,
        set: &'a [String],
        threads: usize,
        fits: &'a dyn Fn(usize) -> Result<(), String>,
    ) -> Self {
        Self {
            run_dir,
            set,
            data: None,
            out: None,
            threads,
            fits,
            climbs: &|_, _| {},
        }
    }
}

/// The state that was looked at.
#[derive(Debug)]
pub struct Seen {
    /// The step of the checkpoint.
    pub step: u64,
    /// The directory of the evaluation, or that of the run where its own figures were drawn.
    pub place: PathBuf,
    /// The directory of the figures.
    pub figures: PathBuf,
    /// Newer checkpoints that do not hold: where each lies, and what is wrong with it.
    pub damaged: Vec<(PathBuf, String)>,
}

/// Draws the figures of the newest good checkpoint: those of the run where nothing else is asked
/// for, which a run that ended draws the same, and elsewhere those of an evaluation.
///
/// # Errors
///
/// Bad input, when a setting is none of an evaluation or does not fit the run, there is no
/// checkpoint, the data are not there or not those of the run, or another process has the
/// directory; when the disk refuses.
pub fn redraw(again: &Again<'_>) -> Result<Seen, Fault> {
    let state = State::of(again)?;
    let place = match state.is_as_in_the_run && again.out.is_none() {
        true => again.run_dir.to_owned(),
        false => state.place(again),
    };
    state.look(again, place, |_, _, _| Ok(()))
}

/// Evaluates the newest good checkpoint, and draws its figures. If nothing else is asked for, its
/// values are the bits that the run itself finds there. Returns their row too.
///
/// # Errors
///
/// As [`redraw`].
pub fn evaluate(again: &Again<'_>) -> Result<(Seen, Row), Fault> {
    let of = State::of(again)?;
    let place = of.place(again);
    let (step, settings) = (of.state.step, of.settings.clone());
    let climbs = again.climbs;
    let mut found = None;
    let seen = of.look(again, place, |task, store, place| {
        let mut check_stop = || Ok(());
        let mut last = task.evaluate(store, true, &mut check_stop)?;
        last.extend(task.climb(store, &mut |made, all| {
            climbs(made, all);
            Ok(())
        })?);
        let row = evaluation_row(task, step, last.iter().cloned(), true);
        let spool = Spool::start(place, &Mark::default(), step)?;
        spool.append(row.clone());
        spool.sync().map_err(|why| anyhow!(why))?;
        let summary = Summary {
            run_dir: again.run_dir,
            of: Of::Later {
                step,
                place,
                settings: &settings,
            },
            last,
        };
        let text = summary::text(&summary, task, store, &mut check_stop)?;
        write_file(&place.join("summary.json"), text.as_bytes())?;
        found = Some(row);
        Ok(())
    })?;
    Ok((seen, found.context("an evaluation has a row")?))
}

/// The state of a run that is looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunState {
    /// Its directory.
    pub run: PathBuf,
    /// The step of its newest good checkpoint.
    pub step: u64,
    /// Newer checkpoints that do not hold: where each lies, and what is wrong with it.
    #[serde(skip)]
    pub damaged: Vec<(PathBuf, String)>,
}

/// A state of a run, ready to be looked at.
pub(crate) struct State {
    run: Run,
    /// Settings that are not those of the run, a line each.
    settings: Vec<String>,
    is_as_in_the_run: bool,
    pub(crate) state: RunState,
    pub(crate) pool: Arc<Pool>,
    pub(crate) store: Store,
    pub(crate) task: DecompositionTask,
}

impl State {
    /// Everything that can be refused is refused here, and nothing is written.
    pub(crate) fn of(again: &Again<'_>) -> Result<Self, Fault> {
        let config = again.run_dir.join("config.toml");
        let text =
            spd_files::read_to_string(&config).with_context(|| config.display().to_string())?;
        let bad = |faults: spd_configs::Faults| Fault::BadInput(faults.to_string());
        let stored = Run::load_resolved(&config).map_err(bad)?;
        let mut run = Run::load_resolved_with(&config, again.set).map_err(bad)?;
        if let Some(path) = again.data {
            evaluate_on(&mut run, path)?;
        }
        again.out.map_or(Ok(()), check_out)?;
        let Newest {
            step,
            snapshot,
            damaged,
        } = newest(again.run_dir, "look at")?;
        let sources = data::open_checked(&run)?;
        let pool = Arc::new(Pool::new(again.threads)?);
        let processor = Processor::Cpu(Arc::clone(&pool));
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store)?;
        let task = DecompositionTask::to_look_at(decomposition, sources, &mut store, &processor)?;
        (again.fits)(task.memory(&store).total()).map_err(Fault::BadInput)?;
        // The target is that of the checkpoint; the data may have been replaced, and are to be
        // others where others are given.
        let mut made_of = resume::data(&run);
        made_of.retain(|part| again.data.is_none() || part.what != What::Eval);
        state::restore(&snapshot, &mut store, &text, &made_of)?;
        Ok(Self {
            settings: run.differences(&stored),
            is_as_in_the_run: run == stored,
            run,
            state: RunState {
                run: again.run_dir.to_owned(),
                step,
                damaged,
            },
            pool,
            store,
            task,
        })
    }

    /// The directory of the evaluation: the same settings have the same one.
    fn place(&self, again: &Again<'_>) -> PathBuf {
        if let Some(out) = again.out {
            return out.to_owned();
        }
        let mut name = format!("step-{:08}", self.state.step);
        if !self.is_as_in_the_run {
            name += &format!("-{:016x}", xxh3_64(self.run.to_toml().as_bytes()));
        }
        again.run_dir.join(EVALUATIONS).join(name)
    }

    /// Draws the figures into `place`, and does `more` there. Other processes that write there are
    /// kept away meanwhile.
    fn look(
        self,
        again: &Again<'_>,
        place: PathBuf,
        more: impl FnOnce(&mut DecompositionTask, &mut Store, &Path) -> Result<(), Interrupt> + Send,
    ) -> Result<Seen, Fault> {
        let Self {
            run,
            settings,
            state,
            pool,
            mut store,
            mut task,
            ..
        } = self;
        let step = state.step;
        let is_own = place == again.run_dir;
        if !is_own {
            let tried = spd_files::try_dir(&place);
            tried.map_err(|line| Fault::BadInput(format!("{line}; try --out")))?;
            make_dirs(&place).with_context(|| format!("{}: cannot be made", place.display()))?;
        }
        let _lock = Lock::take(&place)?;
        if !is_own {
            let about = json!({
                "run": again.run_dir.display().to_string(),
                "step": step,
                "settings": settings,
            });
            write_file(&place.join(EVALUATED), format!("{about}\n").as_bytes())?;
            write_file(&place.join("config.toml"), run.to_toml().as_bytes())?;
        }
        Outcome::of(pool.enter(|| {
            task.make_room()?;
            figures::write(&mut task, &mut store, &place, step, &mut || Ok(()))?;
            more(&mut task, &mut store, &place)
        }))?;
        Ok(Seen {
            step,
            figures: figures::directory(&place, step),
            place,
            damaged: state.damaged,
        })
    }
}

/// The newest checkpoint that holds.
pub(crate) struct Newest {
    pub(crate) step: u64,
    pub(crate) snapshot: Snapshot,
    /// Newer ones that do not hold: where each lies, and what is wrong with it.
    pub(crate) damaged: Vec<(PathBuf, String)>,
}

/// Reads the newest checkpoint of a run directory that holds.
///
/// - `purpose`: what it is for, as a verb
///
/// # Errors
///
/// Bad input when there is none.
pub(crate) fn newest(run_dir: &Path, purpose: &str) -> Result<Newest, Fault> {
    let root = run_dir.join(resume::CHECKPOINTS);
    let found = read_newest(&root)?;
    let Some((step, snapshot)) = found.newest else {
        let bad = found.damaged.first();
        let bad = bad.map(|(path, reason)| format!(" that holds ({}: {reason})", path.display()));
        return Err(Fault::BadInput(format!(
            "{}: has no checkpoint{} to {purpose}; run it first",
            root.display(),
            bad.unwrap_or_default()
        )));
    };
    Ok(Newest {
        step,
        snapshot,
        damaged: found.damaged,
    })
}

/// Has the run evaluated on the dataset at a path.
pub(crate) fn evaluate_on(run: &mut Run, path: &Path) -> Result<(), Fault> {
    let refused = |why: String| Fault::BadInput(format!("--data {}: {why}", path.display()));
    let Data::Tokens { eval, .. } = &mut run.data else {
        return Err(refused(
            "expected a target that reads tokens, found one that reads features, which are generated; `--set eval.batches` makes more"
                .to_owned(),
        ));
    };
    let is_dataset = |path: &Path| path.join("index.json").is_file();
    match path.try_exists() {
        Ok(false) => return Err(refused("no such dataset".to_owned())),
        Err(error) => return Err(refused(error.to_string())),
        Ok(true) => {}
    }
    if path.to_str().is_none() {
        return Err(refused(
            "expected a path of UTF-8, found another".to_owned(),
        ));
    }
    let held_out = path.join("val");
    if !is_dataset(path) && is_dataset(&held_out) {
        let held_out = held_out.display();
        return Err(refused(format!(
            "expected a dataset, found a directory of some; give one, like {held_out}"
        )));
    }
    *eval = EvalData::Dataset(path.to_owned());
    Ok(())
}

/// Refuses a place that holds something else than an evaluation.
fn check_out(out: &Path) -> Result<(), Fault> {
    let is_empty = match fs::read_dir(out) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => {
            return Err(Fault::BadInput(format!("--out {}: {error}", out.display())));
        }
    };
    if is_empty || out.join(EVALUATED).is_file() {
        return Ok(());
    }
    Err(Fault::BadInput(format!(
        "--out {}: holds files and no {EVALUATED}, so it is no evaluation; give the name of a new directory",
        out.display()
    )))
}
