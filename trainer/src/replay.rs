//! The programs of a run, one replay at a time, on numbers that the caller has: a batch, weights,
//! and draws where the programs take them as inputs
//! ([`Draws::Inputs`](crate::decomposition::Draws::Inputs)).

#[cfg(test)]
mod adversaries;

use std::slice;

use spd_dataloader::{Batch, Features, Source};
use spd_engine::{Given, Processor, Store};

use crate::data::Sources;
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt, Outcome};
use crate::metrics::ladder::Climbed;
use crate::networks::shipped;
use crate::run_file::Run;
use crate::target_task::{Lessons, TargetTask};
use crate::task::{Task as _, run_step};
use crate::world::World;

/// The warm-up, the step and the evaluation of a decomposition, as training runs them.
pub struct Replay {
    task: DecompositionTask,
}

impl Replay {
    /// Builds the programs, whose parameters are those of `store`.
    ///
    /// # Errors
    ///
    /// When a program cannot be built, or its memory cannot be had.
    pub fn new(
        decomposition: &Decomposition,
        store: &mut Store,
        processor: &Processor,
    ) -> Result<Self, Fault> {
        let mut task = DecompositionTask::new(
            decomposition.clone(),
            no_data()?,
            store,
            processor,
            &World::default(),
        )?;
        task.make_room()?;
        Ok(Self { task })
    }

    /// The inputs and numbers of the next step.
    pub fn given(&mut self) -> &mut Given {
        self.task.program.given()
    }

    /// One more update of the warm-up, of which `made` are made. The last one discards the moments.
    ///
    /// # Errors
    ///
    /// When the loss or a gradient is not finite, or a GPU refuses.
    pub fn warm_up(&mut self, store: &mut Store, made: u64) -> Result<(), Fault> {
        let mut check_stop = |now| Interrupt::when(now > made);
        Outcome::of(self.task.warm_up(store, made, &mut check_stop))?;
        Ok(store.fetch()?)
    }

    /// One step.
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub fn step(&mut self, store: &mut Store, batch: &Batch, step: u64) -> Result<(), Fault> {
        self.step_of(store, slice::from_ref(batch), step)
    }

    /// One step on a batch of each stream of data.
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub fn step_of(
        &mut self,
        store: &mut Store,
        batches: &[Batch],
        step: u64,
    ) -> Result<(), Fault> {
        run_step(&mut self.task, store, batches, step)?;
        self.task.fetch(store)?;
        Ok(store.fetch()?)
    }

    /// Step scalars by name: `lr`, and those of losses, such as `p`.
    pub fn scalars(&self, step: u64) -> Vec<(String, f64)> {
        self.task.scalars(step)
    }

    /// An output of the last step.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        let found = self.task.program.output(name, store, &self.task.arena);
        found.unwrap_or_else(|| panic!("the step has an output `{name}`"))
    }

    /// The training row of the last step, by name.
    pub fn observe(&self, store: &Store) -> Vec<(String, f64)> {
        self.task.observe(store)
    }

    /// The evaluation of one batch, by name.
    ///
    /// - `feed`: gives the program its draws
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub fn evaluate(
        &mut self,
        store: &mut Store,
        batch: &Batch,
        feed: impl Fn(&mut Given),
    ) -> Result<Vec<(String, f64)>, Fault> {
        let DecompositionTask {
            evaluation, arena, ..
        } = &mut self.task;
        let program = &mut evaluation.program;
        program.run(store, arena, slice::from_ref(batch), &feed)?;
        program.fetch(store, arena)?;
        Ok(program.observe(store, arena))
    }

    /// The losses of the rungs of the run's ladder, by name.
    ///
    /// - `feed`: gives the pass of a step and a batch its draws
    /// - `start`: puts the sources, `ladder.sources.<site>` and `ladder.delta_sources.<site>`, into
    ///   the store
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    ///
    /// # Panics
    ///
    /// When the run has no ladder, or one of more batches.
    pub fn climb(
        &mut self,
        store: &mut Store,
        batches: &[Batch],
        feed: impl Fn(&mut Given, usize, u64),
        start: impl Fn(&mut Store),
    ) -> Result<Vec<(String, f64)>, Fault> {
        let DecompositionTask {
            climbing, arena, ..
        } = &mut self.task;
        let climbing = climbing.as_mut().expect("a run with a ladder");
        let mut read = |index: u64, batch: &mut Batch| {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            batch.clone_from(&batches[index]);
            Ok(())
        };
        let mut on = Climbed {
            read: &mut read,
            feed: &feed,
            start: Some(&start),
        };
        let mut found = Vec::new();
        let climbed = climbing.climb((store, arena), &mut on, &mut |_, _| Ok(()));
        Outcome::of(climbed.map(|losses| found = losses))?;
        Ok(found)
    }
}

/// The training of a run's target.
pub struct TargetReplay {
    task: TargetTask,
}

impl TargetReplay {
    /// Builds the programs; the store gets the tensors of the target by their names, all zeros, and
    /// the moments.
    ///
    /// # Errors
    ///
    /// When the run does not train its target, a program cannot be built, or its memory cannot be
    /// had.
    pub fn new(run: &Run, store: &mut Store, processor: &Processor) -> Result<Self, Fault> {
        let settings = run.target.train.as_ref();
        let lessons = Lessons {
            run,
            network: &shipped(&run.target.model)?,
            settings: settings.ok_or_else(|| Fault::BadInput("[target]: no table train".into()))?,
        };
        let mut task = TargetTask::new(lessons, no_data()?, store, processor)?;
        task.make_room()?;
        Ok(Self { task })
    }

    /// One step. Gives its training row, by name.
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub fn step(
        &mut self,
        store: &mut Store,
        batch: &Batch,
        step: u64,
    ) -> Result<Vec<(String, f64)>, Fault> {
        run_step(&mut self.task, store, slice::from_ref(batch), step)?;
        self.task.fetch(store)?;
        store.fetch()?;
        Ok(self.task.observe(store))
    }
}

/// Sources that nothing is read from.
fn no_data() -> Result<Sources, Fault> {
    let none = Source::Features(Features::new(1, 1.0, 0.0, 1.0)?);
    Ok(Sources {
        train: none.clone(),
        eval: none,
        nontarget: None,
    })
}
