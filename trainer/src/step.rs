//! The programs that train: a step, and an update of the faithfulness warm-up.

use spd_engine::{Builder, Result, Store, Value};

use crate::decomposition::{Decomposition, configure, over_blocks};
use crate::losses::{self, Faithfulness};
use crate::parameters::{Group, Objective, Update};
use crate::run_file::{FaithfulnessWarmup, Recompute};

/// The loss of the warm-up, in its program and in messages.
pub(crate) const WARMUP_LOSS: &str = "loss/faithfulness";

impl Decomposition {
    /// The step on a [block](spd_engine::blocks) of a batch: clean pass, importances, every loss
    /// forward and backward, clipping, update. A GPU stores it in the precision of the run;
    /// evaluations are in f32, as are the reference's.
    ///
    /// Outputs: `loss/<term>`, `loss/total`, `l0/<site>`, `norms/<group>`. Step scalars: `lr`,
    /// those of losses, such as `p`, and AdamW's corrections.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn step_program(&self, store: &Store) -> Result<Builder> {
        let mut b = Builder::with_precision(self.precision());
        configure(&mut b, &self.run.train);
        let shape = self.block_shape(self.run.train.batch_size);
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        b.part("losses");
        let mut losses = self.losses(&mut b, store, &clean_pass, self.draws)?;
        let values = losses.iter().map(|loss| loss.value);
        let active = clean_pass.sites.iter().map(|site| site.active);
        let means: Vec<Value> = values.chain(active).collect();
        let mut means = over_blocks(&mut b, &means)?.into_iter();
        for (loss, mean) in losses.iter_mut().zip(&mut means) {
            loss.value = mean;
        }
        let total = losses::total(&mut b, &losses)?;
        for loss in &losses {
            b.output(format!("loss/{}", loss.name), loss.value);
        }
        b.output("loss/total", total);
        for (site, active) in self.sites.iter().zip(means) {
            b.output(format!("l0/{}", site.path()), active);
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
                muon: train.muon,
                ..Update::default()
            })?;
        let from = self.loss_inputs(store, &clean_pass, self.draws);
        from.update(&mut b, &self.run.losses, &guards)?;
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
