//! A run of ours as files of the SPD reference, the way back: `final_config.yaml`, from which its
//! `ComponentModel.from_pretrained` opens a checkpoint, and the files of the target that this one
//! names.
//!
//! Sites are written by their paths, since a pattern of the reference also matches the modules
//! around a layer. A setting that the reference has no word for is left out, and told.

mod metrics;
mod target;
mod yaml;

use std::path::Path;

use serde_json::{Value, json};

use crate::networks::Model;
use crate::run_file::{Active, ComponentStart, Data, Decay, Precision, Run, Schedule};

pub use target::{TargetFiles, WeightsFile};

/// The files of the reference for one run.
#[derive(Debug, Clone)]
pub struct Written {
    /// The text of `final_config.yaml`.
    pub config: String,
    /// The files of the target.
    pub target: TargetFiles,
    /// Keys of the run that the reference has no word for.
    pub left_out: Vec<String>,
}

impl Run {
    /// The files that the reference opens a checkpoint of this run by.
    ///
    /// - `sites`: paths of the decomposed layers and their numbers of components, in the order of
    ///   the run
    /// - `identity`: the same of layers that an identity matrix stands before
    /// - `target_dir`: an absolute path; the reference takes others from the root of its repository
    ///
    /// # Errors
    ///
    /// Why the reference cannot open it: it has no such network.
    pub fn for_reference(
        &self,
        sites: &[(&str, usize)],
        identity: &[(&str, usize)],
        target_dir: &Path,
    ) -> Result<Written, String> {
        let target = target::of(self)?;
        let mut left_out = Vec::new();
        let mut config = Vec::new();
        self.put_general(&mut config, &mut left_out);
        let patterns = |all: &[(&str, usize)]| -> Value {
            let row = |(path, c): &(&str, usize)| json!({ "module_pattern": path, "C": c });
            all.iter().map(row).collect()
        };
        config.push(json!({
            "module_info": patterns(sites),
            "identity_module_info": if identity.is_empty() { Value::Null } else { patterns(identity) },
            "use_delta_component": self.decomposition.delta,
            "loss_metric_configs": metrics::losses(&self.losses, &mut left_out),
        }));
        self.put_training(&mut config, &mut left_out);
        self.put_evaluation(&mut config, &mut left_out);
        let place = target_dir.join(target.named);
        let place = place.to_string_lossy();
        let (path, name) = match target.by_name {
            false => (json!(place), Value::Null),
            true => (Value::Null, json!(place)),
        };
        config.push(json!({
            "pretrained_model_class": target.class,
            "pretrained_model_path": path,
            "pretrained_model_name": name,
            "pretrained_model_output_attr": target.output,
            "tokenizer_name": null,
            "task_config": self.task(target.class, &mut left_out),
        }));
        Ok(Written {
            config: yaml::text(&config),
            target: target.files,
            left_out,
        })
    }

    fn put_general(&self, config: &mut Vec<Value>, left_out: &mut Vec<String>) {
        if self.precision == Precision::Tf32 {
            left_out.push("precision".into());
        }
        if self.decomposition.start != ComponentStart::Random {
            left_out.push("decomposition.start".into());
        }
        if self.nontarget.is_some() {
            left_out.push("nontarget".into());
        }
        if self.train.muon.is_some() {
            left_out.push("train.muon".into());
        }
        let importance = &self.importance;
        config.push(json!({
            "wandb_project": null,
            "wandb_run_name": self.name,
            "wandb_run_name_prefix": "",
            "seed": self.seed,
            "autocast_bf16": self.precision == Precision::Bf16,
            "n_mask_samples": self.train.mask_samples,
        }));
        match importance.kind.to_reference() {
            Value::Null => left_out.push("importance.kind".into()),
            keys => config.push(keys),
        }
        if importance.conditioning.is_some() {
            left_out.push("importance.conditioning".into());
        }
        config.push(json!({ "sampling": importance.sampling, "sigmoid_type": importance.sigmoid }));
    }

    fn put_training(&self, config: &mut Vec<Value>, left_out: &mut Vec<String>) {
        let train = &self.train;
        if matches!(train.lr, Schedule::Knots(_)) {
            left_out.push("train.lr".into());
        }
        if train.lr_importance.is_some() {
            left_out.push("train.lr_importance".into());
        }
        let warmup = &train.faithfulness_warmup;
        config.push(json!({
            "output_loss_type": train.output_loss,
            "lr_schedule": schedule(&train.lr),
            "steps": train.steps,
            "batch_size": train.batch_size,
            "grad_clip_norm_components": train.clip_components,
            "grad_clip_norm_ci_fns": train.clip_importance,
            "faithfulness_warmup_steps": warmup.steps,
            "faithfulness_warmup_lr": warmup.lr,
            "faithfulness_warmup_weight_decay": warmup.weight_decay,
        }));
    }

    fn put_evaluation(&self, config: &mut Vec<Value>, left_out: &mut Vec<String>) {
        let eval = &self.eval;
        // The reference has no interval 0: evaluations of the ends alone are every `steps` steps.
        let whole = self.train.steps.max(1);
        let every = if eval.every == 0 { whole } else { eval.every };
        let slow = if eval.slow_every == 0 {
            whole
        } else {
            eval.slow_every
        };
        config.push(json!({
            "train_log_freq": self.log.every,
            "eval_freq": every,
            "eval_batch_size": eval.batch_size,
            "slow_eval_freq": slow.div_ceil(every).saturating_mul(every),
            "n_eval_steps": eval.batches,
            "save_freq": self.checkpoint.every,
            "ci_alive_threshold": eval.metrics.active.alive_threshold,
            "eval_metric_configs": metrics::evals(self, left_out),
        }));
    }

    fn task(&self, class: &str, left_out: &mut Vec<String>) -> Value {
        match &self.data {
            // Ours, since where the reference finds its own is not told.
            Data::Tokens { train, seq_len, .. } => json!({
                "task_name": "lm",
                "max_seq_len": seq_len,
                "dataset_name": train.to_string_lossy(),
                "is_tokenized": true,
            }),
            Data::SparseFeatures { .. } => {
                let (probability, generation) = features(self, left_out);
                let name = if class.ends_with("TMSModel") {
                    "tms"
                } else {
                    "resid_mlp"
                };
                json!({
                    "task_name": name,
                    "feature_probability": probability,
                    "data_generation_type": generation,
                })
            }
        }
    }
}

/// The chance that a feature is on, and how vectors are drawn.
fn features(run: &Run, left_out: &mut Vec<String>) -> (f64, &'static str) {
    let Data::SparseFeatures { active, .. } = &run.data else {
        return (1.0, "at_least_zero_active");
    };
    let is_tms = matches!(run.target.model, Model::Tms(_));
    match active {
        Active::ByChance {
            probability,
            synced_inputs,
        } => {
            if !synced_inputs.is_empty() {
                left_out.push("data.synced_inputs".into());
            }
            (*probability, "at_least_zero_active")
        }
        // There, the chance is asked for and not read.
        Active::Exactly { exactly_active: 1 } => (1.0, "exactly_one_active"),
        Active::Exactly { exactly_active: 2 } if !is_tms => (1.0, "exactly_two_active"),
        Active::Exactly { .. } => {
            left_out.push("data.exactly_active".into());
            (1.0, "at_least_zero_active")
        }
    }
}

/// A learning rate. In the place of knots, for which there is no word, stands the first value.
pub(crate) fn schedule(lr: &Schedule) -> Value {
    let lr = match lr {
        Schedule::Decay(decay) => *decay,
        Schedule::Constant(_) | Schedule::Knots(_) => Decay::constant(lr.at(0, 1)),
    };
    json!({
        "start_val": lr.start,
        "warmup_pct": lr.warmup,
        "final_val_frac": lr.final_fraction,
        "fn_type": lr.shape,
    })
}
