//! Training a decomposition: its programs.

mod calibration;
mod task;

use spd_dataloader::Source;
use spd_engine::{Arena, Builder, Executor, Processor, Store};
use spd_tracker::Value;

use crate::batch_program::BatchProgram;
use crate::data::Sources;
use crate::decomposition::Decomposition;
use crate::evaluation::Evaluation;
use crate::fault::Fault;
use crate::gather;
use crate::memory::{Memory, arena_bytes, input_bytes};
use crate::metrics::ladder::Climbing;
use crate::networks::Input;
use crate::parameters::{Group, HALT};
use crate::strongest::shown_bytes;
use crate::world::World;

/// Whether single components are removed: those of a language model, if the run asks for it.
fn shows_components(decomposition: &Decomposition) -> bool {
    let eval = &decomposition.run.eval;
    let is_asked = eval.components > 0 || eval.metrics.well_tempered.well_tempered.is_some();
    matches!(decomposition.target.input(), Input::Tokens { .. }) && is_asked
}

/// A decomposition in training.
pub(crate) struct DecompositionTask {
    pub(crate) decomposition: Decomposition,
    pub(crate) processor: Processor,
    /// The memory that its programs share, once there is [room](Self::make_room): no two of them
    /// run at the same time.
    pub(crate) arena: Arena,
    pub(crate) program: BatchProgram,
    pub(crate) evaluation: Evaluation,
    /// The evaluation without its slow terms, where there are any.
    cheap_evaluation: Option<Evaluation>,
    /// Importances on inputs of one feature each, if it is a toy.
    pub(crate) probe: Option<Executor>,
    warmup: Option<Executor>,
    /// The importances behind the figures.
    pub(crate) figures: Executor,
    /// The importances behind the figures that were drawn last, as the values of a row.
    pub(crate) importances: Vec<(String, Value)>,
    /// Outputs of a language model without single components.
    pub(crate) removal: Option<Executor>,
    /// Adversaries of any number of steps.
    pub(crate) climbing: Option<Climbing>,
    pub(crate) sources: Sources,
    world: World,
}

impl DecompositionTask {
    /// Builds the programs; [`make_room`](Self::make_room) is to come before the first is run.
    pub(crate) fn new(
        decomposition: Decomposition,
        sources: Sources,
        store: &mut Store,
        processor: &Processor,
        world: &World,
    ) -> Result<Self, Fault> {
        Self::with((decomposition, sources), store, (processor, world), true)
    }

    /// The same for a state that is looked at and not trained: without the programs that train it,
    /// whose memory it then does not need.
    pub(crate) fn to_look_at(
        decomposition: Decomposition,
        sources: Sources,
        store: &mut Store,
        processor: &Processor,
    ) -> Result<Self, Fault> {
        let world = World::default();
        Self::with((decomposition, sources), store, (processor, &world), false)
    }

    fn with(
        (decomposition, sources): (Decomposition, Sources),
        store: &mut Store,
        (processor, world): (&Processor, &World),
        trains: bool,
    ) -> Result<Self, Fault> {
        let shards = decomposition.run.train.blocks();
        store.hold_blocks(world.blocks(shards), shards);
        world.expect(gather::piece_elements(store));
        store.transient(HALT, &[2]);
        let seed = decomposition.run.seed;
        let executor = |b: &Builder| {
            let mut executor = Executor::planned(b, processor);
            executor.parameters.seed = seed;
            executor
        };
        let program = if trains {
            let program = decomposition.step_program(store)?;
            BatchProgram::planned(&program, store, "step", world, executor)
        } else {
            BatchProgram::whole(executor(&Builder::new()))
        };
        let evaluation = Evaluation::new(&decomposition, store, true, world, executor)?;
        let has_slow = decomposition.run.eval.metrics.has_slow();
        let cheap_evaluation = if trains && has_slow {
            Some(Evaluation::new(
                &decomposition,
                store,
                false,
                world,
                executor,
            )?)
        } else {
            None
        };
        let probe = decomposition.probe_program(store)?;
        let probe = probe.map(|program| executor(&program));
        let figures = executor(&decomposition.figures_program(store)?);
        let removal = if shows_components(&decomposition) {
            Some(executor(&decomposition.removal_program(store)?))
        } else {
            None
        };
        let climbing = Climbing::new(&decomposition, store, world, executor)?;
        let warmup = decomposition.run.train.faithfulness_warmup;
        let warmup = if trains && warmup.steps > 0 {
            Some(executor(&decomposition.warmup_program(store, &warmup)?))
        } else {
            None
        };
        Ok(Self {
            decomposition,
            processor: processor.clone(),
            arena: Arena::default(),
            program,
            evaluation,
            cheap_evaluation,
            probe,
            warmup,
            figures,
            importances: Vec::new(),
            removal,
            climbing,
            sources,
            world: world.clone(),
        })
    }

    /// Held-out rows.
    pub(crate) fn held_out(&self) -> &Source {
        &self.sources.eval
    }

    /// The norm of the last step's gradient of each site's components and importance function:
    /// group, site, norm.
    pub(crate) fn site_norms(&self, store: &Store) -> Vec<(Group, usize, f64)> {
        let decomposition = &self.decomposition;
        let mut all = Vec::new();
        for group in [Group::Components, Group::Importance] {
            let output = format!("norms/{}", group.name());
            let Some(squares) = self.program.output(&output, store, &self.arena) else {
                continue;
            };
            let names: Vec<&str> = decomposition.parameters.names(store, group).collect();
            for (index, own) in decomposition.site_tensors(group).iter().enumerate() {
                let of_site = names
                    .iter()
                    .zip(squares)
                    .filter(|(name, _)| own.iter().any(|own| own == *name));
                let of_site: Vec<f64> = of_site.map(|(_, &square)| square.into()).collect();
                // A tied site has no components of its own.
                if !of_site.is_empty() {
                    all.push((group, index, of_site.iter().sum::<f64>().sqrt()));
                }
            }
        }
        all
    }

    /// Makes the arena, and what the ranks share.
    pub(crate) fn make_room(&mut self) -> Result<(), Fault> {
        self.arena = self.processor.arena(arena_bytes(self.programs()))?;
        if let Some(ranks) = self.world.ranks() {
            ranks.make_room()?;
        }
        Ok(())
    }

    /// The programs on batches.
    fn on_batches(&self) -> impl Iterator<Item = &BatchProgram> + Clone {
        let cheap = self.cheap_evaluation.as_ref();
        let evaluations = [&self.evaluation].into_iter().chain(cheap);
        let climbing = self.climbing.iter().map(|climbing| &climbing.gradient);
        [&self.program]
            .into_iter()
            .chain(evaluations.map(|evaluation| &evaluation.program))
            .chain(climbing)
    }

    fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        let steps = self.climbing.iter().map(|climbing| &climbing.step);
        self.fed().chain(&self.removal).chain(steps)
    }

    /// The programs that read whole batches, or rows of one feature each.
    fn fed(&self) -> impl Iterator<Item = &Executor> + Clone {
        let others = [&self.figures].into_iter().chain(&self.warmup);
        let others = others.chain(&self.probe);
        self.on_batches()
            .flat_map(BatchProgram::programs)
            .chain(others)
    }

    /// Peak memory on a GPU, if it runs on one.
    pub(crate) fn gpu_memory(&self, store: &Store) -> Option<Memory> {
        Memory::on_gpu(&self.processor, store, self.programs())
    }

    /// Peak memory of a rank on this machine.
    pub(crate) fn memory(&self, store: &Store) -> Memory {
        let blocks = self.program.blocks();
        // A program on batches reads a block at a time.
        let on_batches = self.on_batches().flat_map(BatchProgram::programs);
        let batch = input_bytes(self.fed()).max(blocks * input_bytes(on_batches));
        let mut memory = Memory::of_task(&self.processor, store, batch, self.programs());
        let elements = self.on_batches().map(BatchProgram::all_reduced_elements);
        let elements = elements.chain([gather::piece_elements(store)]);
        match self.world.bytes_of_sums(elements.max().unwrap_or(0)) {
            0 => {}
            sums => memory.parts.push(("sums over ranks", sums)),
        }
        let whole = gather::whole_bytes(store);
        if whole > 0 && self.world.is_first() {
            // With the copy that is being written.
            memory.parts.push((gather::GATHERED, 2 * whole));
        }
        match shown_bytes(&self.decomposition, &self.sources.eval) {
            0 => {}
            shown => memory.parts.push(("components", shown)),
        }
        memory
    }
}
