//! A harvest of a run: the behaviour of each component of its newest checkpoint over a dataset, as
//! tables.
//!
//! The text is cut into parts of some 32,768 positions. [`Harvesting::count`] makes those
//! of one rank, and saves its counts as it goes, so that a killed harvest goes on;
//! [`Harvesting::finish`] adds up the counts of all ranks, removes components one by one, and writes
//! the tables. Counts [add up](spd_harvest::Counts) to the same bytes in any order, so the files
//! are the same by any number of ranks, after any number of kills, and merged from any shards.
//!
//! `harvest/FORMAT.md` has the files.

mod about;
mod attribute;
mod merge;
mod place;
mod removals;
mod so_far;
mod text;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;
use spd_checkpoint::{CheckpointError, Lock, load, step_path};
use spd_dataloader::Batch;
use spd_engine::{Arena, Builder, Executor, Pool, Processor, Store};
use spd_harvest::{Counts, Example, OfSite, Part, Setup, Site, StateError, Text};

pub use self::attribute::{Attribute, Attributions, attribute};
pub use self::merge::merge;

use self::about::{About, Dataset};
use self::place::Place;
use self::text::Texts;
use crate::again::{Newest, evaluate_on, newest};
use crate::component_model::{BatchShape, RowsOf};
use crate::data;
use crate::decomposition::Decomposition;
use crate::fault::Fault;
use crate::figures::of_positions;
use crate::memory::arena_bytes;
use crate::networks::Input;
use crate::rank::processor;
use crate::resume::{self, What};
use crate::run_file::Run;
use crate::state;
use crate::world::World;

/// Positions of a part, about: as few as a batch, or more.
const PART: usize = 32 << 10;

/// Time between two saves, if nothing else is asked for.
pub const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Settings of a harvest that has no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// Tokens to read, at most.
    pub tokens: u64,
    /// Examples of each component by lot, at most.
    pub examples: usize,
    /// Positions at which each component is removed, at most.
    pub removals: usize,
    /// Whether pairs of components are counted.
    pub pairs: bool,
    /// The part of the work that is done: `(0, 1)` is all of it.
    pub shard: (u64, u64),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tokens: 10_000_000,
            examples: 1000,
            removals: 8,
            pairs: true,
            shard: (0, 1),
        }
    }
}

/// A request for a harvest.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Request<'a> {
    /// The run directory (`config.toml` is there).
    pub run_dir: &'a Path,
    /// Another dataset than the one that the run is trained on.
    pub data: Option<&'a Path>,
    /// The directory of the harvest, in place of one in the run directory.
    pub out: Option<&'a Path>,
    /// The settings.
    pub settings: Settings,
    /// CPU threads.
    pub threads: usize,
    /// Number of the GPU, if it runs on one.
    pub gpu: Option<usize>,
    /// Time between two saves.
    pub save_every: Duration,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
}

/// A step forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// So many parts are counted, of so many of this rank; and the positions of those.
    Counted(u64, u64, u64),
    /// So many components are removed, of so many.
    Removed(u64, u64),
}

/// A harvest in the making.
#[expect(missing_debug_implementations, reason = "programs are long")]
pub struct Harvesting {
    run: Run,
    about: About,
    setup: Setup,
    place: Place,
    shard: (u64, u64),
    save_every: Duration,
    texts: Texts,
    pool: Arc<Pool>,
    processor: Processor,
    store: Store,
    decomposition: Decomposition,
    /// Newer checkpoints that do not hold: where each lies, and what is wrong with it.
    pub damaged: Vec<(PathBuf, String)>,
}

impl Harvesting {
    /// Opens a run, its newest checkpoint and the text. Everything that can be refused is refused
    /// here, and nothing is written.
    ///
    /// # Errors
    ///
    /// Bad input, when there is no checkpoint, the target reads no tokens, the data are not there or
    /// not those of the run, or another harvest has the directory.
    pub fn open(request: &Request<'_>) -> Result<Self, Fault> {
        let settings = request.settings;
        let Opened {
            run,
            store,
            decomposition,
            newest,
            sources,
        } = Opened::of(request.run_dir, request.data, None)?;
        let vocab = vocabulary(request.run_dir, decomposition.target.input())?;
        let positions = decomposition.shape(1).positions;
        let rows = settings.tokens.div_ceil(positions as u64);
        let dataset = Dataset::of(&run, request.data, &sources, rows)?;
        let (_, sites) = program(&decomposition, &store)?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a threshold is rounded to f32"
        )]
        let alive = run.eval.metrics.active.alive_threshold as f32;
        let setup = Setup {
            sites,
            vocab,
            positions,
            alive,
            seed: run.seed,
            examples: settings.examples,
            pairs: settings.pairs,
        };
        let about = About::of(request.run_dir, &run, newest.step, settings, dataset)?;
        let place = Place::of(request, &about, &setup)?;
        let rows = about::source(request.data, &sources).clone();
        let texts = Texts::of(run.seed, vec![(request.data.is_none(), rows)])?;
        let pool = Arc::new(Pool::new(request.threads)?);
        let processor = processor(request.gpu, &pool)?;
        let harvesting = Self {
            damaged: newest.damaged,
            run,
            about,
            setup,
            place,
            shard: settings.shard,
            save_every: request.save_every,
            texts,
            pool,
            processor,
            store,
            decomposition,
        };
        (request.fits)(harvesting.memory()?).map_err(Fault::BadInput)?;
        Ok(harvesting)
    }

    /// The directory of the harvest.
    pub fn dir(&self) -> &Path {
        &self.place.dir
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.about.step
    }

    /// Whether it is there already, whole.
    pub fn is_done(&self) -> bool {
        self.place.is_done()
    }

    /// Takes the directory, and adds up the counts that killed ranks left in it. No other process
    /// may write there while the lock is held.
    ///
    /// # Errors
    ///
    /// Bad input, when the directory cannot be made or another process has it; when the disk refuses.
    pub fn begin(&self) -> Result<Lock, Fault> {
        let lock = self.place.take()?;
        self.place.gather(&self.about, &self.setup)?;
        // Ranks on GPUs use the kernels that the first one chose.
        if self.processor.device().is_some() {
            self.planned()?;
        }
        Ok(lock)
    }

    /// Has a GPU keep to the kernels that it chose before.
    fn keep_kernels(&self) -> Result<(), Fault> {
        let Some(device) = self.processor.device() else {
            return Ok(());
        };
        let kept = device.keep_record(self.place.dir.join("kernels.txt"));
        kept.map_err(|fault| Fault::BadInput(fault.to_string()))
    }

    /// The program of a batch.
    fn planned(&self) -> Result<Executor, Fault> {
        self.keep_kernels()?;
        let (program, _) = program(&self.decomposition, &self.store)?;
        let mut program = Executor::planned(&program, &self.processor);
        program.parameters.seed = self.run.seed;
        Ok(program)
    }

    /// Counts the parts of a rank that are not counted yet.
    ///
    /// # Errors
    ///
    /// When the disk or a GPU refuses, the data cannot be read, or an importance is not finite.
    pub fn count(
        &mut self,
        (rank, ranks): (u64, u64),
        told: &(dyn Fn(Step) + Sync),
    ) -> Result<(), Fault> {
        let parts = self.about.parts();
        let (shard, shards) = self.shard;
        let (before, mut counts) = self.place.counted(rank, &self.about, &self.setup)?;
        let own = (0..parts).filter(|part| part % shards == shard && part / shards % ranks == rank);
        let left: Vec<u64> = own
            .filter(|&part| !before.has(0, part) && !counts.has(0, part))
            .collect();
        drop(before);
        let mut program = self.planned()?;
        let mut arena = self.processor.arena(program.plan().arena_bytes())?;
        let pool = Arc::clone(&self.pool);
        pool.enter(|| {
            let mut saved = Instant::now();
            for (made, &number) in (1..).zip(&left) {
                self.part(&mut counts, number, (&mut program, &mut arena))?;
                told(Step::Counted(made, left.len() as u64, counts.positions()));
                if saved.elapsed() >= self.save_every || made == left.len() as u64 {
                    self.place.save(rank, &mut counts, &self.about)?;
                    saved = Instant::now();
                }
            }
            Ok(())
        })
    }

    /// Adds a part to the counts.
    fn part(
        &mut self,
        counts: &mut Counts,
        number: u64,
        (program, arena): (&mut Executor, &mut Arena),
    ) -> Result<(), Fault> {
        let Dataset {
            rows, part_rows, ..
        } = self.about.datasets[0];
        let (source, feed) = self.texts.source(0, self.run.eval.batch_size);
        let mut batch = Batch::default();
        let mut part = Part::new(counts, 0, number);
        let (first, last) = (number * part_rows, rows.min((number + 1) * part_rows));
        for position in (first..last).step_by(feed.rows) {
            source.fill(&feed, position, &mut batch)?;
            data::fill(program, &batch);
            let index = position / feed.rows as u64;
            program.parameters.step = u32::try_from(index).unwrap_or(u32::MAX);
            program.run_and_fetch(&mut self.store, arena)?;
            let left = usize::try_from(last - position).unwrap_or(usize::MAX);
            let t = self.setup.positions;
            let tokens = batch.tokens.chunks_exact(t + 1);
            let tokens: Vec<u32> = tokens.flat_map(|row| &row[..t]).copied().collect();
            let output = |name: &str| program.output(name, &self.store, arena);
            let shape = self.decomposition.shape(feed.rows);
            let sites = self.setup.sites.iter();
            let measured: Vec<Measured<'_>> = sites
                .map(|site| Measured::of(site, shape, &output))
                .collect();
            let sites: Vec<OfSite<'_>> = measured.iter().map(Measured::of_site).collect();
            let text = Text {
                first_row: position,
                rows: left.min(feed.rows),
                tokens: &tokens,
                next: output("next"),
            };
            let ended = part.measure(counts, text, &sites);
            ended.map_err(Fault::NotFinite)?;
        }
        part.finish(counts);
        Ok(())
    }

    /// Adds up the counts of all ranks, removes components, and writes the files. Returns what was
    /// harvested, in words.
    ///
    /// # Errors
    ///
    /// When the disk or a GPU refuses, or the data cannot be read.
    pub fn finish(&mut self, told: &(dyn Fn(Step) + Sync)) -> Result<String, Fault> {
        let counts = self.place.gather(&self.about, &self.setup)?;
        self.complete(counts, told)
    }

    fn complete(
        &mut self,
        mut counts: Counts,
        told: &(dyn Fn(Step) + Sync),
    ) -> Result<String, Fault> {
        let removals = self.remove(&counts, told)?;
        self.place
            .write(&mut counts, &self.about, &mut self.texts, &removals)
    }

    /// Bytes of memory that a rank may take. The positions of a part where each component is active
    /// are left out.
    fn memory(&self) -> Result<usize, Fault> {
        let processor = Processor::Cpu(Arc::clone(&self.pool));
        let (program, _) = program(&self.decomposition, &self.store)?;
        let removal = self.decomposition.removal_program(&self.store)?;
        let programs = [program, removal].map(|program| Executor::planned(&program, &processor));
        let own: usize = programs.iter().map(|program| program.own.inputs).sum();
        let components = self.setup.components();
        let examples = self.setup.examples.saturating_mul(2 * size_of::<Example>());
        let pairs = match self.setup.pairs {
            true => components.saturating_mul(components) / 2 * 12,
            false => 0,
        };
        let each = (20 + 64) * 8 + 2 * 24 * self.setup.vocab;
        let counts = components.saturating_mul(examples.saturating_add(each));
        // With the copy that is being written.
        let counts = counts.saturating_add(pairs).saturating_mul(2);
        let programs = self.store.bytes() + arena_bytes(&programs) + own;
        Ok(programs.saturating_add(counts))
    }
}

/// A run with a checkpoint, and the text.
struct Opened {
    run: Run,
    store: Store,
    decomposition: Decomposition,
    newest: Newest,
    sources: data::Sources,
}

impl Opened {
    /// With the checkpoint of a step, or the newest one that holds.
    fn of(run_dir: &Path, of_data: Option<&Path>, step: Option<u64>) -> Result<Self, Fault> {
        let config = run_dir.join("config.toml");
        let text =
            spd_files::read_to_string(&config).with_context(|| config.display().to_string())?;
        let mut run = Run::load_resolved(&config)?;
        if let Some(path) = of_data {
            evaluate_on(&mut run, path)?;
        }
        let newest = match step {
            Some(step) => harvested(run_dir, step)?,
            None => newest(run_dir, "look at")?,
        };
        let sources = data::open_checked(&run)?;
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store)?;
        let shards = run.train.blocks();
        store.hold_blocks(World::default().blocks(shards), shards);
        let mut made_of = resume::data(&run);
        made_of.retain(|part| of_data.is_none() || part.what != What::Eval);
        state::restore(&newest.snapshot, &mut store, &text, &made_of)?;
        Ok(Self {
            run,
            store,
            decomposition,
            newest,
            sources,
        })
    }
}

/// Reads the checkpoint of a harvest, while the run goes on from later ones.
fn harvested(run_dir: &Path, step: u64) -> Result<Newest, Fault> {
    let root = run_dir.join(resume::CHECKPOINTS);
    let path = step_path(&root, step);
    if !path.is_dir() {
        return Err(Fault::BadInput(format!(
            "{}: has no checkpoint of step {step} any more, which was harvested; `spd-launch harvest {}` harvests the newest one",
            root.display(),
            run_dir.display()
        )));
    }
    let snapshot = load(&path).map_err(|error| match error {
        CheckpointError::Damaged { .. } => Fault::BadInput(error.to_string()),
        error => error.into(),
    })?;
    Ok(Newest {
        step,
        snapshot,
        damaged: Vec::new(),
    })
}

/// The vocabulary of the target of a run, which has to read tokens.
fn vocabulary(run_dir: &Path, input: Input) -> Result<usize, Fault> {
    match input {
        Input::Tokens { vocab, .. } => Ok(vocab),
        Input::Features(_) => Err(Fault::BadInput(format!(
            "{}: expected a language model, found a target that reads features; its figures show all of its components",
            run_dir.display()
        ))),
    }
}

/// Importances, logits and activations of all sites on a batch, and `next`, the probabilities of
/// the next token, f32 `[rows, t, v]`; and the sites. A site whose rows are no positions, such as
/// the entries of a table, is left out.
fn program(decomposition: &Decomposition, store: &Store) -> Result<(Builder, Vec<Site>), Fault> {
    let mut b = Builder::new();
    let shape = decomposition.shape(decomposition.run.eval.batch_size);
    let clean_pass = decomposition.clean_pass(&mut b, store, shape, &decomposition.draws)?;
    let mut sites = Vec::new();
    let all = decomposition.sites.iter().zip(&clean_pass.sites);
    for (index, (site, clean)) in all.enumerate() {
        if shape.rows_of(clean.rows) == RowsOf::Others {
            continue;
        }
        b.output(format!("importance {}", site.path()), clean.importance);
        b.output(format!("logits {}", site.path()), clean.logits);
        let activations = clean.rows == shape.examples();
        if activations {
            let lengths = decomposition.lengths(&mut b, &clean_pass, index)?;
            b.output(format!("activation {}", site.path()), lengths);
        }
        sites.push(Site {
            name: site.path().to_owned(),
            components: site.components,
            activations,
        });
    }
    let next = b.softmax(clean_pass.output)?;
    b.output("next", next);
    Ok((b, sites))
}

/// Measurements of a site, with a row for each position.
struct Measured<'a> {
    importance: Cow<'a, [f32]>,
    logits: Cow<'a, [f32]>,
    activation: Option<&'a [f32]>,
}

impl<'a> Measured<'a> {
    fn of(site: &Site, shape: BatchShape, output: &impl Fn(&str) -> &'a [f32]) -> Self {
        let [importance, logits] = ["importance", "logits"].map(|what| {
            let values = output(&format!("{what} {}", site.name));
            of_positions(values, shape, site.components).expect("sites of other rows are left out")
        });
        let activation = site.activations;
        Self {
            importance,
            logits,
            activation: activation.then(|| output(&format!("activation {}", site.name))),
        }
    }

    fn of_site(&self) -> OfSite<'_> {
        OfSite {
            importance: &self.importance,
            logits: &self.logits,
            activation: self.activation,
        }
    }
}

impl From<StateError> for Fault {
    fn from(err: StateError) -> Self {
        match err {
            StateError::Io { .. } => Self::Failed(err.into()),
            StateError::Damaged { .. } => Self::BadInput(err.to_string()),
        }
    }
}
