//! Training a decomposition: its programs.

mod task;

use spd_dataloader::Source;
use spd_engine::{Builder, Executor, Processor, Store};

use crate::data::Sources;
use crate::decomposition::Decomposition;
use crate::evaluation::Evaluation;
use crate::fault::Fault;
use crate::memory::Memory;
use crate::parameters::{Group, HALT};
use crate::task::make_arena;

/// A decomposition in training.
pub(crate) struct DecompositionTask {
    pub(crate) decomposition: Decomposition,
    processor: Processor,
    program: Executor,
    evaluation: Evaluation,
    /// The evaluation without its slow terms, where there are any.
    cheap_evaluation: Option<Evaluation>,
    /// What a toy answers to inputs of one feature each.
    probe: Option<Executor>,
    warmup: Option<Executor>,
    /// The importances behind the figures.
    figures: Executor,
    sources: Sources,
}

impl DecompositionTask {
    /// Builds the programs; [`make_room`](Self::make_room) is to come before the first is run.
    pub(crate) fn new(
        decomposition: Decomposition,
        sources: Sources,
        store: &mut Store,
        processor: &Processor,
    ) -> Result<Self, Fault> {
        store.zeros(HALT, &[2]);
        let seed = decomposition.run.seed;
        let executor = |b: &Builder| {
            let mut executor = Executor::planned(b, processor);
            executor.parameters().seed = seed;
            executor
        };
        let program = executor(&decomposition.step_program(store)?);
        let evaluation = Evaluation::new(&decomposition, store, true, executor)?;
        let has_slow = decomposition.run.eval.losses.iter().any(|term| term.slow);
        let cheap_evaluation = if has_slow {
            Some(Evaluation::new(&decomposition, store, false, executor)?)
        } else {
            None
        };
        let probe = decomposition.probe_program(store)?;
        let probe = probe.map(|program| executor(&program));
        let figures = executor(&decomposition.figures_program(store)?);
        let warmup = decomposition.run.train.faithfulness_warmup;
        let warmup = if warmup.steps > 0 {
            Some(executor(&decomposition.warmup_program(store, &warmup)?))
        } else {
            None
        };
        Ok(Self {
            decomposition,
            processor: processor.clone(),
            program,
            evaluation,
            cheap_evaluation,
            probe,
            warmup,
            figures,
            sources,
        })
    }

    /// Held-out rows.
    pub(crate) fn held_out(&self) -> &Source {
        &self.sources.eval
    }

    /// The program that has the arena, and the one behind the figures.
    pub(crate) fn for_figures(&mut self) -> (&mut Executor, &mut Executor) {
        (&mut self.program, &mut self.figures)
    }

    /// The program that has the arena, and the evaluation.
    pub(crate) fn for_evaluation(&mut self) -> (&mut Executor, &mut Evaluation) {
        (&mut self.program, &mut self.evaluation)
    }

    /// The program that has the arena, and the one that probes a toy.
    pub(crate) fn for_probe(&mut self) -> (&mut Executor, Option<&mut Executor>) {
        (&mut self.program, self.probe.as_mut())
    }

    /// The norm of the last step's gradient of each site's components and importance function: group, site, norm.
    pub(crate) fn site_norms(&self, store: &Store) -> Vec<(Group, usize, f64)> {
        let decomposition = &self.decomposition;
        let mut all = Vec::new();
        for (group, kind) in [
            (Group::Components, "_components"),
            (Group::Importance, "_ci_fns"),
        ] {
            let output = format!("norms/{}", group.name());
            if !self.program.output_names().any(|name| name == output) {
                continue;
            }
            let squares = self.program.output(&output, store);
            let names: Vec<&str> = decomposition.parameters.names(store, group).collect();
            for (index, site) in decomposition.sites.iter().enumerate() {
                let own = format!("{kind}.{}.", site.dashed());
                let of_site = names
                    .iter()
                    .zip(squares)
                    .filter(|(name, _)| name.starts_with(&own));
                let of_site: Vec<f64> = of_site.map(|(_, &square)| square.into()).collect();
                // A tied site has no components of its own.
                if !of_site.is_empty() {
                    all.push((group, index, of_site.iter().sum::<f64>().sqrt()));
                }
            }
        }
        all
    }

    /// Where its programs run.
    pub(crate) fn processor(&self) -> &Processor {
        &self.processor
    }

    /// Makes the arena that the programs share: no two of them run at the same time.
    pub(crate) fn make_room(&mut self) -> Result<(), Fault> {
        let others = [&self.evaluation.program, &self.figures].into_iter();
        let others = others.chain(&self.warmup).chain(&self.probe);
        let cheap = self.cheap_evaluation.as_ref();
        let others = others.chain(cheap.map(|cheap| &cheap.program));
        make_arena(&self.processor, &mut self.program, others)
    }

    fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        let programs = [&self.program, &self.evaluation.program, &self.figures].into_iter();
        let cheap = self.cheap_evaluation.as_ref();
        let programs = programs.chain(&self.warmup).chain(&self.probe);
        programs.chain(cheap.map(|cheap| &cheap.program))
    }

    /// What it will hold at its fullest on a GPU, if it runs on one.
    pub(crate) fn gpu_memory(&self, store: &Store) -> Option<Memory> {
        Memory::on_gpu(&self.processor, store, self.programs())
    }

    /// What it will hold at its fullest on this machine.
    pub(crate) fn memory(&self, store: &Store) -> Memory {
        Memory::of_task(&self.processor, store, self.programs())
    }
}
