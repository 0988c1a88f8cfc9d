//! Training a decomposition: the step program, the faithfulness warm-up, the evaluation.

mod training;

use spd_configs::{Data, FaithfulnessWarmup, OutputLoss};
use spd_dataloader::Source;
use spd_engine::{Builder, Executor, Processor, Store, Type, Value};

use crate::data::Sources;
use crate::decomposition::{CleanPass, Decomposition, Masking, SampleId, mask_values};
use crate::fault::Fault;
use crate::losses::{USUAL_MASKS, divergence, divergence_and_cross_entropy};
use crate::memory::Memory;
use crate::parameters::{Group, HALT, Update};
use crate::task::make_arena;

const BETA2: f64 = 0.999;

/// A decomposition in training.
pub(crate) struct DecompositionTask {
    pub(crate) decomposition: Decomposition,
    processor: Processor,
    program: Executor,
    eval_program: Executor,
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
        let eval_program = executor(&decomposition.eval_program(store)?);
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
            eval_program,
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

    /// The program that has the arena, and that of the evaluation.
    pub(crate) fn for_evaluation(&mut self) -> (&mut Executor, &mut Executor) {
        (&mut self.program, &mut self.eval_program)
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
        let others = [&self.eval_program, &self.figures].into_iter();
        make_arena(
            &self.processor,
            &mut self.program,
            others.chain(&self.warmup),
        )
    }

    fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        let programs = [&self.program, &self.eval_program, &self.figures];
        programs.into_iter().chain(&self.warmup)
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

impl Decomposition {
    /// The step: clean pass, importances, every loss forward and backward, clipping, update. A GPU stores it in the precision of
    /// the run; evaluations are in f32, as are the reference's.
    ///
    /// Outputs: `loss/<term>`, `loss/total`, `l0/<site>`, `norms/<group>`. Step scalars: `lr`, `p` and AdamW's corrections.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn step_program(&self, store: &Store) -> spd_engine::Result<Builder> {
        let mut b = Builder::with_precision(self.precision());
        let shape = self.shape(self.run.train.batch_size);
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        b.part("losses");
        let losses = self.losses(&mut b, store, &clean_pass, self.draws)?;
        let total = b.weighted_sum(
            &losses
                .iter()
                .map(|l| (l.coeff, l.value))
                .collect::<Vec<_>>(),
        )?;
        for loss in &losses {
            b.output(format!("loss/{}", loss.name), loss.value);
        }
        b.output("loss/total", total);
        self.active(&mut b, &clean_pass, "");
        b.part("update");
        let train = &self.run.train;
        self.parameters
            .update(&mut b, store, total, |group| Update {
                beta2: BETA2,
                decay: 0.0,
                decay_vectors: true,
                clip: match group {
                    Group::Components => train.clip_components,
                    _ => train.clip_importance,
                },
            })?;
        Ok(b)
    }

    /// Updates of the components on faithfulness alone.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn warmup_program(
        &self,
        store: &Store,
        warmup: &FaithfulnessWarmup,
    ) -> spd_engine::Result<Builder> {
        let mut b = Builder::new();
        let loss = self.faithfulness(&mut b, store)?;
        b.output(WARMUP_LOSS, loss);
        let decay = warmup.weight_decay;
        let update = Update {
            beta2: BETA2,
            decay,
            decay_vectors: true,
            clip: None,
        };
        self.parameters
            .of(&[Group::Components])
            .update(&mut b, store, loss, |_| update)?;
        Ok(b)
    }

    /// Divergence from the target under every kind of mask; the terms that are only measured; L0 of each site. All means over
    /// a batch.
    ///
    /// Outputs for tokens: `eval/kl/<mask>`, nats a position, and `eval/ce/<mask>`, nats a label, the target's own as
    /// `eval/ce/target`. A row of `seq_len` inputs has `seq_len` labels: the label of its last input is the token behind it.
    /// The SPD reference has `seq_len - 1`, as it takes labels from among the inputs, so its cross-entropies are of one label
    /// a row fewer. Outputs for features, and for tokens where `output_loss = "mse"`: `eval/mse/<mask>`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn eval_program(&self, store: &Store) -> spd_engine::Result<Builder> {
        let mut b = Builder::new();
        let shape = self.shape(self.run.eval.batch_size);
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let labels = match self.run.data {
            Data::Tokens { .. } => {
                Some(b.input("labels", &Type::u32(&[shape.rows, shape.positions]))?)
            }
            Data::SparseFeatures { .. } => None,
        };
        let measure = |b: &mut Builder, name: &str, output: Value| -> spd_engine::Result<()> {
            if self.run.train.output_loss == OutputLoss::Mse && output != clean_pass.output {
                let mse = divergence(b, OutputLoss::Mse, clean_pass.output, output)?;
                b.output(format!("eval/mse/{name}"), mse);
            }
            let Some(labels) = labels else {
                return Ok(());
            };
            if output == clean_pass.output {
                let ce = b.cross_entropy(output, labels)?;
                b.output(format!("eval/ce/{name}"), ce);
                return Ok(());
            }
            let [kl, ce] = divergence_and_cross_entropy(b, clean_pass.output, output, labels)?;
            b.output(format!("eval/ce/{name}"), ce);
            b.output(format!("eval/kl/{name}"), kl);
            Ok(())
        };
        measure(&mut b, "target", clean_pass.output)?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a threshold is rounded to f32"
        )]
        let rounded = Masking::Rounded(self.run.eval.rounding_threshold as f32);
        let kinds = [
            ("unmasked", Masking::Ones),
            ("ci_masked", Masking::Importance),
            ("rounded", rounded),
            ("stochastic", Masking::Stochastic),
            ("zero", Masking::Zeros),
        ];
        let sample = SampleId {
            number: USUAL_MASKS,
            name: "eval".into(),
        };
        for (name, masking) in kinds {
            let how = (
                masking,
                self.run.importance.sampling,
                self.run.decomposition.delta,
            );
            let mut masked = Vec::new();
            for (index, site) in self.sites.iter().enumerate() {
                let draws = (self.draws, &sample);
                masked.push((
                    index,
                    mask_values(&mut b, &clean_pass, (index, site), how, draws, None)?,
                ));
            }
            let pass = self.masked_pass(&mut b, &clean_pass, &masked)?;
            measure(&mut b, name, pass.output)?;
        }
        for (name, value) in self.measures(&mut b, &clean_pass, self.draws)? {
            b.output(format!("eval/loss/{name}"), value);
        }
        self.active(&mut b, &clean_pass, "eval/");
        let faithfulness = self.faithfulness(&mut b, store)?;
        b.output("eval/faithfulness", faithfulness);
        Ok(b)
    }

    /// The importances of all sites on held-out batches; outputs `importance <site>` and `logits <site>`.
    fn figures_program(&self, store: &Store) -> spd_engine::Result<Builder> {
        let mut b = Builder::new();
        let shape = self.shape(self.run.eval.batch_size);
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        for (site, values) in self.sites.iter().zip(&clean_pass.sites) {
            b.output(format!("importance {}", site.path()), values.importance);
            b.output(format!("logits {}", site.path()), values.logits);
        }
        Ok(b)
    }

    fn active(&self, b: &mut Builder, clean_pass: &CleanPass, prefix: &str) {
        for (site, values) in self.sites.iter().zip(&clean_pass.sites) {
            b.output(format!("{prefix}l0/{}", site.path()), values.active);
        }
    }
}

/// The loss of the warm-up, in its program and in messages.
const WARMUP_LOSS: &str = "loss/faithfulness";
