//! Training a decomposition: the step program, the faithfulness warm-up, the evaluation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spd_configs::{FaithfulnessWarmup, OutputLoss, Term};
use spd_dataloader::{Feed, Source};
use spd_engine::{Builder, Executor, Pool, Store, Type, Value};

use crate::data::{Sources, eval_feed, training_feed};
use crate::decomposition::{Decomposition, Draws, Front, Masking, SampleId, mask_values};
use crate::fault::Fault;
use crate::losses::{USUAL_MASKS, divergence};
use crate::parameters::{BETA1, Group, HALT, Update};
use crate::schedule::{exponent, learning_rate};
use crate::task::{Measured, Task, evaluate_batches};

const BETA2: f64 = 0.999;

/// A decomposition in training.
pub(crate) struct DecompositionTask {
    pub(crate) decomposition: Decomposition,
    program: Executor,
    eval_program: Executor,
    warmup: Option<Executor>,
    sources: Sources,
}

impl DecompositionTask {
    /// Builds the programs.
    pub(crate) fn new(
        decomposition: Decomposition,
        sources: Sources,
        store: &mut Store,
        pool: &Arc<Pool>,
    ) -> Result<Self, Fault> {
        store.zeros(HALT, &[2]);
        let seed = decomposition.run.seed;
        let executor = |b: &Builder| {
            let mut executor = Executor::new(b, Arc::clone(pool));
            executor.parameters.seed = seed;
            executor
        };
        let program = executor(&decomposition.step_program(store)?);
        let eval_program = executor(&decomposition.eval_program(store)?);
        let warmup = decomposition.run.train.faithfulness_warmup;
        let warmup = if warmup.steps > 0 {
            Some(executor(&decomposition.warmup_program(store, &warmup)?))
        } else {
            None
        };
        Ok(Self {
            decomposition,
            program,
            eval_program,
            warmup,
            sources,
        })
    }

    /// The threads of its programs.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        self.program.pool()
    }

    /// Bytes of all arenas.
    pub(crate) fn arena_bytes(&self) -> usize {
        [
            Some(&self.program),
            Some(&self.eval_program),
            self.warmup.as_ref(),
        ]
        .into_iter()
        .flatten()
        .map(|executor| executor.plan().arena_bytes())
        .sum()
    }
}

impl Decomposition {
    /// The step: clean pass, importances, every loss forward and backward, clipping, update.
    ///
    /// Outputs: `loss/<term>`, `loss/total`, `l0/<site>`, `norms/<group>`. Step scalars: `lr`, `p` and AdamW's corrections.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn step_program(&self, store: &Store) -> spd_engine::Result<Builder> {
        let mut b = Builder::new();
        let shape = self.shape(self.run.train.batch_size);
        let front = self.front(&mut b, store, shape, &Draws::Counters)?;
        let losses = self.losses(&mut b, store, &front, Draws::Counters)?;
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
        self.active(&mut b, &front, "")?;
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

    /// Divergence from the target, and for tokens the cross-entropy, of the target itself and under every kind of mask; the
    /// terms that are only measured; L0 of each site. All means over a batch.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn eval_program(&self, store: &Store) -> spd_engine::Result<Builder> {
        let mut b = Builder::new();
        let shape = self.shape(self.run.eval.batch_size);
        let front = self.front(&mut b, store, shape, &Draws::Counters)?;
        let is_tokens = self.run.train.output_loss == OutputLoss::Kl;
        let labels = if is_tokens {
            Some(b.input("labels", &Type::u32(&[shape.rows, shape.positions]))?)
        } else {
            None
        };
        let measure = |b: &mut Builder, name: &str, output: Value| -> spd_engine::Result<()> {
            if let Some(labels) = labels {
                let ce = b.cross_entropy(output, labels)?;
                b.output(format!("eval/ce/{name}"), ce);
            }
            if output != front.output {
                let distance = divergence(b, self.run.train.output_loss, front.output, output)?;
                let kind = if is_tokens { "kl" } else { "mse" };
                b.output(format!("eval/{kind}/{name}"), distance);
            }
            Ok(())
        };
        measure(&mut b, "target", front.output)?;
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
                let draws = (Draws::Counters, &sample);
                masked.push((
                    index,
                    mask_values(&mut b, &front, (index, site), how, draws, None)?,
                ));
            }
            let pass = self.masked_pass(&mut b, &front, &masked)?;
            measure(&mut b, name, pass.output)?;
        }
        for (name, value) in self.measures(&mut b, &front, Draws::Counters)? {
            b.output(format!("eval/loss/{name}"), value);
        }
        self.active(&mut b, &front, "eval/")?;
        let faithfulness = self.faithfulness(&mut b, store)?;
        b.output("eval/faithfulness", faithfulness);
        Ok(b)
    }

    fn active(&self, b: &mut Builder, front: &Front, prefix: &str) -> spd_engine::Result<()> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a threshold is rounded to f32"
        )]
        let threshold = self.run.eval.alive_threshold as f32;
        for (site, values) in self.sites.iter().zip(&front.sites) {
            let active = b.active_counts(values.importance, threshold)?;
            b.output(format!("{prefix}l0/{}", site.path()), active);
        }
        Ok(())
    }
}

impl Task for DecompositionTask {
    fn phase(&self) -> &'static str {
        "train"
    }

    fn steps(&self) -> u64 {
        self.decomposition.run.train.steps
    }

    fn eval_every(&self) -> u64 {
        self.decomposition.run.eval.every
    }

    fn program(&mut self) -> &mut Executor {
        &mut self.program
    }

    fn source(&self) -> (Source, Feed) {
        let run = &self.decomposition.run;
        (
            self.sources.train.clone(),
            training_feed(run.seed, run.train.batch_size),
        )
    }

    fn beta2(&self) -> f64 {
        BETA2
    }

    fn scalars(&self, step: u64) -> Vec<(&'static str, f64)> {
        let run = &self.decomposition.run;
        let steps = run.train.steps;
        let mut scalars = vec![("lr", learning_rate(&run.train.lr, step, steps))];
        for loss in &run.losses {
            if let Term::ImportanceMinimality {
                p,
                p_final,
                anneal_start,
                anneal_end,
                ..
            } = loss.term
            {
                let fraction = step as f64 / steps as f64;
                scalars.push((
                    "p",
                    exponent(p, p_final, (anneal_start, anneal_end), fraction),
                ));
            }
        }
        scalars
    }

    fn begin(&mut self, store: &mut Store, stop: &AtomicBool) -> Result<Option<Measured>, Fault> {
        self.decomposition.initialise(store);
        let before = self.evaluate(store)?;
        let settings = self.decomposition.run.train.faithfulness_warmup;
        let Some(program) = &mut self.warmup else {
            return Ok(Some(before));
        };
        for step in 1..=settings.steps {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let power = i32::try_from(step).unwrap_or(i32::MAX);
            #[expect(clippy::cast_possible_truncation, reason = "f64 settings to f32")]
            for (name, value) in [
                ("lr", settings.lr),
                ("correction1", 1.0 - BETA1.powi(power)),
                ("correction2", 1.0 - BETA2.powi(power)),
            ] {
                program.set_scalar(name, value as f32);
            }
            program.run(store);
        }
        self.decomposition.parameters.forget(store);
        Ok(Some(before))
    }

    fn observe(&self, store: &Store) -> Vec<(String, f64)> {
        let program = &self.program;
        let mut seen = Vec::new();
        for name in program.output_names() {
            match name.strip_prefix("norms/") {
                None => seen.push((
                    name.to_owned(),
                    f64::from(program.scalar_output(name, store)),
                )),
                Some(group) => {
                    let norms = program.output(name, store);
                    let total = f64::from(norms.last().copied().unwrap_or(0.0)).sqrt();
                    seen.push((format!("grad_norm/{group}"), total));
                }
            }
        }
        seen
    }

    fn evaluate(&mut self, store: &mut Store) -> Result<Vec<(String, f64)>, Fault> {
        let run = &self.decomposition.run;
        let feed = eval_feed(run.seed, run.eval.batch_size);
        evaluate_batches(
            &mut self.eval_program,
            store,
            (&self.sources.eval, &feed),
            run.eval.batches,
        )
    }
}
