//! The target of a run as the reference, or Hugging Face's library, opens it: the class, the files
//! of its sizes, and where its weights lie.

use serde_json::{Value, json};

use super::{features, schedule, yaml};
use crate::networks::{Export, OfToy};
use crate::run_file::{Run, Schedule};

/// The files of a target, all of them in one directory.
#[derive(Debug, Clone)]
pub struct TargetFiles {
    /// Paths in that directory, and texts.
    pub texts: Vec<(&'static str, String)>,
    /// The place of its tensors.
    pub weights: WeightsFile,
}

/// A file of tensors in the directory of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightsFile {
    /// As `torch.save` writes it, under this path.
    Torch(String),
    /// `model.safetensors`.
    Safetensors,
}

pub(super) struct Opened {
    pub(super) class: &'static str,
    /// The field that has the logits in the output of its forward pass.
    pub(super) output: Option<&'static str>,
    /// Whether `pretrained_model_name` says where it is; otherwise `pretrained_model_path` does.
    pub(super) by_name: bool,
    /// The file of the directory that is named; empty for the directory itself.
    pub(super) named: &'static str,
    pub(super) files: TargetFiles,
}

/// How the target is opened.
///
/// # Errors
///
/// Why it is not.
pub(super) fn of(run: &Run) -> Result<Opened, String> {
    let model = &run.target.model;
    let class = model.of_reference().map_or("", |of| of.class);
    Ok(match model.export()? {
        Export::Transformers(found) => Opened {
            class: found.class,
            output: Some("logits"),
            by_name: true,
            named: "",
            files: TargetFiles {
                texts: vec![("config.json", format!("{:#}\n", found.config))],
                weights: WeightsFile::Safetensors,
            },
        },
        Export::Simple(sizes) => simple(class, sizes),
        Export::Toy(found) => toy(run, class, found),
    })
}

/// A language model of the reference, which looks for its sizes two directories above its weights.
fn simple(class: &'static str, sizes: Value) -> Opened {
    Opened {
        class,
        output: Some("idx_0"),
        by_name: true,
        named: "checkpoints/model_step_0.pt",
        files: TargetFiles {
            // How it was trained is asked for as a file and not read.
            texts: vec![
                ("final_config.yaml", "{}\n".to_owned()),
                ("model_config.yaml", yaml::text(&[sizes])),
            ],
            weights: WeightsFile::Torch("checkpoints/model_step_0.pt".to_owned()),
        },
    }
}

/// A toy of the reference, whose file of sizes also says how it was trained.
fn toy(run: &Run, class: &'static str, found: OfToy) -> Opened {
    let (file, named) = match found.kind {
        "tms" => ("tms_train_config.yaml", "tms.pth"),
        _ => ("resid_mlp_train_config.yaml", "resid_mlp.pth"),
    };
    let (probability, generation) = features(run, &mut Vec::new());
    let train = run.target.train.as_ref();
    let constant = Schedule::Constant(1e-3);
    let config = json!({
        format!("{}_model_config", found.kind): found.sizes,
        "feature_probability": probability,
        "data_generation_type": generation,
        "batch_size": train.map_or(1, |train| train.batch_size),
        "steps": train.map_or(1, |train| train.steps),
        "seed": train.map_or(0, |train| train.seed),
        "lr_schedule": schedule(train.map_or(&constant, |train| &train.lr)),
    });
    let more = match found.kind {
        "tms" => {
            json!({ "fixed_identity_hidden_layers": found.has_identities && train.is_some() })
        }
        _ => json!({
            "use_trivial_label_coeffs": true,
            "print_freq": 100,
            "fixed_random_embedding": true,
        }),
    };
    let mut text = yaml::text(&[config, more]);
    if train.is_none() {
        text.insert_str(
            0,
            "# How this network was trained is not known: batch_size, steps and lr_schedule stand here because they have to.\n",
        );
    }
    let mut texts = vec![(file, text)];
    if let Some(features) = found.has_labels {
        // Labels are `x + activation(x)` here.
        texts.push((
            "label_coeffs.json",
            format!("{}\n", json!(vec![1.0; features])),
        ));
    }
    Opened {
        class,
        output: None,
        by_name: false,
        named,
        files: TargetFiles {
            texts,
            weights: WeightsFile::Torch(named.to_owned()),
        },
    }
}
