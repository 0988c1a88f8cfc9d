//! The evaluation: what every metric measures on held-out batches. Means are taken once, over all
//! of them.

use std::slice;

use spd_dataloader::{Batch, Feed, Source};
use spd_engine::{Arena, Builder, Executor, Given, Result, StepParameters, Store, Type, Value};

use crate::batch_program::BatchProgram;
use crate::decomposition::{BatchShape, Decomposition, configure, over_blocks};
use crate::fault::Interrupt;
use crate::losses::adversary::{HELD_OUT_ROW, SOURCE_ROW};
use crate::metrics::Evaluated;
use crate::networks::Input;
use crate::rounded::drawn;
use crate::run_file::Data;
use crate::task::{CheckStop, Measured};
use crate::world::World;

/// The evaluation of a decomposition, or of a target in training.
pub(crate) struct Evaluation {
    pub(crate) program: BatchProgram,
    /// For each output of the program, of how many things it is the mean.
    counts: Vec<f64>,
    /// Rows of a block of a training batch, whose sources held-out rows may take.
    source_rows: usize,
}

impl Evaluation {
    /// The metrics of a decomposition, slow ones too if it `is_slow`.
    pub(crate) fn new(
        decomposition: &Decomposition,
        store: &mut Store,
        is_slow: bool,
        world: &World,
        executor: impl Fn(&Builder) -> Executor,
    ) -> Result<Self> {
        let (program, counts) = decomposition.eval_program(store, is_slow)?;
        let name = if is_slow { "eval" } else { "cheap_eval" };
        Ok(Self {
            program: BatchProgram::planned(&program, store, name, world, executor),
            counts,
            source_rows: decomposition
                .block_shape(decomposition.run.train.batch_size)
                .rows,
        })
    }

    /// One output, a mean over equally many things in each batch.
    pub(crate) fn of_one(program: Executor) -> Self {
        Self {
            program: BatchProgram::whole(program),
            counts: vec![1.0],
            source_rows: 0,
        }
    }

    /// The means over some batches.
    ///
    /// - `held_out`: where batches come from, how they are read, and how many
    pub(crate) fn measure(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        held_out: (&Source, &Feed, u64),
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt> {
        let (source, feed, batches) = held_out;
        let (program, counts) = (&mut self.program, &self.counts);
        let source_rows = self.source_rows;
        let mut sums = vec![0.0; counts.len()];
        let mut batch = Batch::default();
        for index in 0..batches {
            check_stop()?;
            source.fill(feed, index * feed.rows as u64, &mut batch)?;
            program.run(store, arena, slice::from_ref(&batch), &|given| {
                given.parameters.step = u32::try_from(index).unwrap_or(u32::MAX);
                draw_source_rows(given, source_rows);
            })?;
            program.fetch(store, arena)?;
            let means = program.outputs(store, arena);
            for ((sum, count), (_, mean)) in sums.iter_mut().zip(counts).zip(means) {
                *sum += f64::from(mean[0]) * count;
            }
        }
        let outputs = program.outputs(store, arena);
        let names = outputs.map(|(name, _)| name.to_owned());
        let means = sums.iter().zip(counts);
        let means = means.map(|(sum, count)| sum / (count * batches as f64));
        Ok(names.zip(means).collect())
    }
}

/// Draws the row of training whose sources each held-out one takes, where a program asks for it:
/// one of so many, the same whichever rank has the block.
fn draw_source_rows(given: &mut Given, of: usize) {
    if !given.has_input(SOURCE_ROW) {
        return;
    }
    let StepParameters {
        seed, step, block, ..
    } = given.parameters;
    let rows = given.input_u32(SOURCE_ROW);
    let first = block as usize * rows.len();
    for (row, to) in (first..).zip(rows) {
        let row = u32::try_from(row).expect("a batch has fewer than 2^32 rows");
        *to = drawn(HELD_OUT_ROW.uniform(seed, step, row, 0), of);
    }
}

impl Decomposition {
    /// All metrics on one batch, slow ones if it `is_slow`, each a scalar output `eval/<name>`; and
    /// of how many things each is a mean. In f32, as are the reference's.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn eval_program(&self, store: &Store, is_slow: bool) -> Result<(Builder, Vec<f64>)> {
        let mut b = Builder::new();
        configure(&mut b, &self.run.train);
        let shape = self.block_shape(self.run.eval.batch_size);
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let labels = match self.run.data {
            Data::Tokens { .. } => {
                Some(b.input("labels", &Type::u32(&[shape.rows, shape.positions]))?)
            }
            Data::SparseFeatures { .. } => None,
        };
        let on = Evaluated {
            from: self.loss_inputs(store, &clean_pass, self.draws),
            losses: &self.run.losses,
            labels,
            is_slow,
        };
        let means = self.run.eval.metrics.means(&mut b, &on)?;
        let values: Vec<Value> = means.iter().map(|mean| mean.value).collect();
        let values = over_blocks(&mut b, &values)?;
        let counts = means.iter().map(|mean| mean.count as f64).collect();
        for (mean, value) in means.into_iter().zip(values) {
            b.output(format!("eval/{}", mean.name), value);
        }
        b.check_blocks()?;
        Ok((b, counts))
    }

    /// The importances of all sites on held-out batches; outputs `importance <site>` and
    /// `logits <site>`, and `activations <site>` where the scales of conditioned logits follow from
    /// them.
    pub(crate) fn figures_program(&self, store: &Store) -> Result<Builder> {
        self.importances_program(store, self.shape(self.run.eval.batch_size))
    }

    /// The same on rows of one feature each, for a toy whose rows are no sequences.
    pub(crate) fn probe_program(&self, store: &Store) -> Result<Option<Builder>> {
        match self.target.input() {
            Input::Features(features) if self.target.positions() == 1 => {
                let shape = self.shape(features);
                self.importances_program(store, shape).map(Some)
            }
            Input::Features(_) | Input::Tokens { .. } => Ok(None),
        }
    }

    /// The same on a batch of any shape.
    pub(crate) fn importances_program(&self, store: &Store, shape: BatchShape) -> Result<Builder> {
        let mut b = Builder::new();
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let conditioning = self.settings.importance.conditioning;
        for (index, (site, values)) in self.sites.iter().zip(&clean_pass.sites).enumerate() {
            b.output(format!("importance {}", site.path()), values.importance);
            b.output(format!("logits {}", site.path()), values.logits);
            if conditioning.is_some_and(|said| said.min_tokens.is_some()) {
                let activations = self.activations(&mut b, &clean_pass, index)?;
                b.output(format!("activations {}", site.path()), activations);
            }
        }
        Ok(b)
    }
}
