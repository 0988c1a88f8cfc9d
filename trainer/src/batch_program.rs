//! A program on a batch, of which a rank has some blocks: it runs as it is on one block, and in
//! stages on several.

use spd_dataloader::Batch;
use spd_engine::{Builder, Executor, Stages, Store};

use crate::arena::InArena;
use crate::data::fill_block;
use crate::fault::Fault;
use crate::world::World;

/// A program on a batch. Its outputs are those of `program`.
pub(crate) struct BatchProgram {
    /// The program, or its last stage.
    pub(crate) program: Executor,
    stages: Stages,
    /// Blocks of this rank.
    blocks: usize,
}

impl InArena for BatchProgram {
    fn executor(&mut self) -> &mut Executor {
        &mut self.program
    }
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
        let (mut stages, mut program) = if blocks == 1 {
            (Stages::default(), planned(b))
        } else {
            Stages::planned(b, store, name, planned)
        };
        if let Some(ranks) = world.ranks() {
            stages.meet(ranks.clone());
            program.meet(ranks);
        }
        Self {
            program,
            stages,
            blocks,
        }
    }

    /// A program on a batch that is one block.
    pub(crate) fn whole(program: Executor) -> Self {
        Self {
            program,
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
        self.stages.programs().chain([&self.program])
    }

    /// Bytes of the sums that are added up beside the store.
    pub(crate) fn running_bytes(&self) -> usize {
        self.stages.running_bytes(self.blocks)
    }

    /// Bytes that they take on a GPU, on a rank of `ranks`.
    pub(crate) fn gpu_bytes(&self, ranks: usize) -> usize {
        self.stages.gpu_bytes(self.blocks, ranks)
    }

    /// Elements of the sums over ranks at a time.
    pub(crate) fn all_reduced_elements(&self) -> usize {
        let of_stages = self.stages.most_elements();
        of_stages.max(self.program.all_reduced_elements())
    }

    /// One replay on this rank's rows of a batch.
    ///
    /// - `set`: gives a program its numbers
    ///
    /// # Errors
    ///
    /// When a GPU refuses, or failed before.
    pub(crate) fn run(
        &mut self,
        store: &mut Store,
        batch: &Batch,
        set: &dyn Fn(&mut Executor),
    ) -> Result<(), Fault> {
        let Self {
            program,
            stages,
            blocks,
        } = self;
        let fill = |program: &mut Executor, block| {
            fill_block(program, batch, block, *blocks);
            set(program);
        };
        if *blocks == 1 {
            fill(program, 0);
        } else {
            stages.run(program, store, *blocks, fill)?;
            set(program);
        }
        Ok(program.run(store)?)
    }
}
