//! The programs that train: a step, and an update of the faithfulness warm-up.

use spd_engine::{Builder, Result, Store, Value};

use crate::decomposition::{CleanPass, Decomposition, configure, over_blocks};
use crate::losses::{self, Faithfulness};
use crate::parameters::{Group, LR, LR_IMPORTANCE, Objective, Update};
use crate::run_file::{FaithfulnessWarmup, Recompute};

/// The loss of the warm-up, in its program and in messages.
pub(crate) const WARMUP_LOSS: &str = "loss/faithfulness";

impl Decomposition {
    /// The step on a [block](spd_engine::blocks) of a batch of each stream of data: clean pass,
    /// importances, every loss forward and backward, clipping, update. A GPU stores it in the
    /// precision of the run; evaluations are in f32, as are the reference's.
    ///
    /// Outputs: `loss/<term>`, `loss/total`, `l0/<site>`, `norms/<group>`; those of the non-target
    /// stream behind `nontarget/`. Step scalars: learning rates, those of losses, such as `p`, and
    /// what AdamW or Muon need at the number of the step.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn step_program(&self, store: &Store) -> Result<Builder> {
        let mut b = Builder::with_precision(self.precision());
        configure(&mut b, &self.run.train);
        let shapes = self.streams.iter().map(|of| of.extent.shape);
        let passes = shapes.map(|shape| self.clean_pass(&mut b, store, shape, &self.draws));
        let passes = passes.collect::<Result<Vec<CleanPass>>>()?;
        b.part("losses");
        let inputs = self.inputs_of_streams(store, &passes);
        let streams = || inputs.iter().zip(&self.streams);
        let mut losses = Vec::new();
        for (from, of) in streams() {
            losses.extend(from.losses(&mut b, &of.losses)?);
        }
        let parts: Vec<(String, Value)> =
            losses.iter().flat_map(|loss| loss.parts.clone()).collect();
        let values = losses.iter().map(|loss| loss.value);
        let values = values.chain(parts.iter().map(|(_, value)| *value));
        let sites = passes.iter().flat_map(|pass| &pass.sites);
        let active = sites.map(|site| site.active);
        let means: Vec<Value> = values.chain(active).collect();
        let mut means = over_blocks(&mut b, &means)?.into_iter();
        for (loss, mean) in losses.iter_mut().zip(&mut means) {
            loss.value = mean;
        }
        for ((name, _), mean) in parts.into_iter().zip(&mut means) {
            b.output(name, mean);
        }
        let total = losses::total(&mut b, &losses)?;
        for loss in &losses {
            b.output(loss.name.clone(), loss.value);
        }
        b.output("loss/total", total);
        for pass in &passes {
            for (site, active) in self.sites.iter().zip(&mut means) {
                let name = format!("l0/{}", site.path());
                b.output(pass.shape.stream.name(&name), active);
            }
        }
        b.part("update");
        let train = &self.run.train;
        let (loss, seeds) = losses::gradients_to_make(&mut b, &losses)?;
        let objective = Objective {
            total,
            loss,
            seeds: &seeds,
        };
        let guards = self
            .parameters
            .update(&mut b, store, objective, |group| Update {
                clip: match group {
                    Group::Components => train.clip_components,
                    _ => train.clip_importance,
                },
                lr: match (group, &train.lr_importance) {
                    (Group::Importance, Some(_)) => LR_IMPORTANCE,
                    _ => LR,
                },
                muon: train.muon,
                ..Update::default()
            })?;
        self.decay_components(&mut b, store, &passes, &guards)?;
        for (from, of) in streams() {
            from.update(&mut b, &of.losses, &guards)?;
        }
        for attack in losses.iter().filter_map(|loss| loss.attack.as_ref()) {
            attack.keep(&mut b, &guards)?;
        }
        if train.recompute == Recompute::Always {
            b.recompute();
        }
        b.check_blocks()?;
        Ok(b)
    }

    /// Updates of the components on faithfulness alone.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn warmup_program(&self, store: &Store, warmup: &FaithfulnessWarmup) -> Result<Builder> {
        let mut b = Builder::new();
        let faithfulness = Faithfulness::of_run(&self.run.losses);
        let loss = faithfulness.of(&mut b, self, store)?;
        b.output(WARMUP_LOSS, loss);
        let decay = warmup.weight_decay;
        let update = Update {
            decay,
            ..Update::default()
        };
        self.parameters
            .of(&[Group::Components])
            .update(&mut b, store, loss, |_| update)?;
        Ok(b)
    }
}
