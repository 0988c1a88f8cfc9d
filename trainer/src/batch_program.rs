//! A program on a batch, of which a rank has some blocks: it runs as it is on one block, and in
//! stages on several.

use std::time::Duration;

use spd_dataloader::Batch;
use spd_engine::{Arena, Builder, Executor, Given, Stages, Store};

use crate::data::fill_block;
use crate::fault::Fault;
use crate::metrics::Measured;
use crate::world::World;

/// The time of each part of a step.
pub(crate) type PartTimes = Vec<(&'static str, Duration)>;

/// A program on a batch.
pub(crate) struct BatchProgram {
    /// The program, or its last stage, which has the outputs.
    last: Executor,
    stages: Stages,
    /// Blocks of this rank.
    blocks: usize,
}

impl BatchProgram {
    /// Plans a program for a rank of a world; the sums of its stages lie in the store under `name`.
    pub(crate) fn planned(
        b: &Builder,
        store: &mut Store,
        name: &str,
        world: &World,
        planned: impl Fn(&Builder) -> Executor,
    ) -> Self {
        let blocks = world.blocks(b.blocks()).len();
        let (mut stages, mut last) = if blocks == 1 {
            (Stages::default(), planned(b))
        } else {
            Stages::planned(b, store, name, blocks, planned)
        };
        if let Some(ranks) = world.ranks() {
            stages.meet(&ranks);
            last.meet(ranks);
        }
        Self {
            last,
            stages,
            blocks,
        }
    }

    /// A program on a batch that is one block.
    pub(crate) fn whole(program: Executor) -> Self {
        Self {
            last: program,
            stages: Stages::default(),
            blocks: 1,
        }
    }

    /// Blocks of this rank.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// All its programs.
    pub(crate) fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        self.stages.programs().chain([&self.last])
    }

    /// Multiplications and additions of this rank on a batch.
    pub(crate) fn flops(&self) -> u64 {
        // Programs that add up blocks have no flops.
        let stages = self.stages.programs();
        let of_block: u64 = stages.map(|stage| stage.plan().flops()).sum();
        self.blocks as u64 * of_block + self.last.plan().flops()
    }

    /// Elements of the sums over ranks at a time.
    pub(crate) fn all_reduced_elements(&self) -> usize {
        let own = self.programs().map(|program| &program.own);
        own.map(|own| own.all_reduced_elements).max().unwrap_or(0)
    }

    /// The inputs and numbers of the program, or of its last stage.
    pub(crate) fn given(&mut self) -> &mut Given {
        &mut self.last
    }

    /// Has the parts of the next replay timed. On a GPU nothing is: the clock of the ops would cost
    /// the step its graph.
    pub(crate) fn start_clock(&mut self) {
        if let Executor::Cpu(program) = &mut self.last {
            program.start_profile();
        }
    }

    /// One replay on this rank's rows of a batch of each stream of data, in an arena.
    ///
    /// - `set`: gives a program its numbers
    ///
    /// # Errors
    ///
    /// When a GPU refuses, or failed before.
    pub(crate) fn run(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        batches: &[Batch],
        set: &dyn Fn(&mut Given),
    ) -> Result<(), Fault> {
        let Self {
            last,
            stages,
            blocks,
        } = self;
        let fill = |given: &mut Given, block| {
            fill_block(given, batches, block, *blocks);
            set(given);
        };
        if *blocks == 1 {
            fill(last, 0);
        } else {
            stages.run(store, arena, fill)?;
            set(last);
        }
        Ok(last.run(store, arena)?)
    }

    /// Waits for the last replay and fetches its outputs. Returns the time of each part, if they
    /// were timed.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub(crate) fn fetch(&mut self, store: &mut Store, arena: &Arena) -> Result<PartTimes, Fault> {
        self.last.fetch(store, arena)?;
        Ok(self.last.part_times())
    }

    /// An output of the last replay, if the program has it.
    pub(crate) fn output<'s>(
        &'s self,
        name: &str,
        store: &'s Store,
        arena: &'s Arena,
    ) -> Option<&'s [f32]> {
        let mut outputs = self.outputs(store, arena);
        outputs.find_map(|(known, values)| (known == name).then_some(values))
    }

    /// The outputs of the last replay by name, in the program's order.
    pub(crate) fn outputs<'s>(
        &'s self,
        store: &'s Store,
        arena: &'s Arena,
    ) -> impl Iterator<Item = (&'s str, &'s [f32])> {
        let names = self.last.output_names();
        names.map(move |name| (name, self.last.output(name, store, arena)))
    }

    /// The outputs as numbers of a row: scalars, and the norm of each group's gradient.
    pub(crate) fn observe(&self, store: &Store, arena: &Arena) -> Measured {
        let outputs = self.outputs(store, arena);
        outputs
            .map(|(name, values)| match name.strip_prefix("norms/") {
                None => (name.to_owned(), values[0].into()),
                Some(group) => {
                    let total = f64::from(values.last().copied().unwrap_or(0.0)).sqrt();
                    (format!("grad_norm/{group}"), total)
                }
            })
            .collect()
    }
}
