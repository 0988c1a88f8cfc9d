//! The target of a run as the reference, or Hugging Face's library, opens it: the class, the files of its sizes, and where its weights lie.

use serde_json::{Value, json};

use super::{features, schedule, yaml};
use crate::run_file::{
    Gpt2, LlamaSimple, Model, ResidMlp, Run, Schedule, Shape, Tms, networks::OfTransformers,
};

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
    let hf = |found: OfTransformers| Opened {
        class: found.class,
        output: Some("logits"),
        by_name: true,
        named: "",
        files: TargetFiles {
            texts: vec![("config.json", format!("{:#}\n", found.config))],
            weights: WeightsFile::Safetensors,
        },
    };
    Ok(match &run.target.model {
        Model::Tms(tms) => toy(
            run,
            "spd.experiments.tms.models.TMSModel",
            "tms",
            tms.sizes(),
        ),
        Model::ResidMlp(mlp) => {
            let class = "spd.experiments.resid_mlp.models.ResidMLP";
            let mut opened = toy(run, class, "resid_mlp", mlp.sizes());
            // Labels are `x + activation(x)` here.
            let ones = format!("{}\n", json!(vec![1.0; mlp.n_features]));
            opened.files.texts.push(("label_coeffs.json", ones));
            opened
        }
        Model::Gpt2Simple(gpt2) => {
            let fits = gpt2.d_mlp == 4 * gpt2.d_model && gpt2.is_usual();
            if !fits {
                return Err(
                    "its GPT2Simple has an MLP of width 4 d_model, a tanh GELU and norms of eps 1e-5"
                        .into(),
                );
            }
            simple("spd.pretrain.models.gpt2_simple.GPT2Simple", gpt2.sizes())
        }
        Model::LlamaSimple(llama) => simple(
            "spd.pretrain.models.llama_simple.LlamaSimple",
            llama.sizes("LlamaSimple"),
        ),
        Model::LlamaSimpleMlp(llama) => simple(
            "spd.pretrain.models.llama_simple_mlp.LlamaSimpleMLP",
            llama.sizes("LlamaSimpleMLP"),
        ),
        Model::Gpt2(gpt2) => hf(gpt2.of_transformers()),
        Model::GptNeo(neo) => hf(neo.of_transformers()),
        Model::GptNeoX(neox) => hf(neox.of_transformers()),
        Model::Llama(llama) => hf(llama.of_transformers()?),
        Model::Custom(_) => return Err("it has no class for a network of kind \"custom\"".into()),
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
                ("model_config.yaml", text(sizes)),
            ],
            weights: WeightsFile::Torch("checkpoints/model_step_0.pt".to_owned()),
        },
    }
}

/// A toy of the reference, whose file of sizes also says how it was trained.
fn toy(run: &Run, class: &'static str, kind: &'static str, sizes: Value) -> Opened {
    let (file, named) = match kind {
        "tms" => ("tms_train_config.yaml", "tms.pth"),
        _ => ("resid_mlp_train_config.yaml", "resid_mlp.pth"),
    };
    let (probability, generation) = features(run, &mut Vec::new());
    let train = run.target.train.as_ref();
    let constant = Schedule {
        start: 1e-3,
        shape: Shape::Constant,
        warmup: 0.0,
        final_fraction: 1.0,
    };
    let mut config = json!({
        format!("{kind}_model_config"): sizes,
        "feature_probability": probability,
        "data_generation_type": generation,
        "batch_size": train.map_or(1, |train| train.batch_size),
        "steps": train.map_or(1, |train| train.steps),
        "seed": train.map_or(0, |train| train.seed),
        "lr_schedule": schedule(train.map_or(&constant, |train| &train.lr)),
    });
    let more = match kind {
        "tms" => {
            let hidden = matches!(&run.target.model, Model::Tms(tms) if tms.n_hidden_layers > 0);
            json!({ "fixed_identity_hidden_layers": hidden && train.is_some() })
        }
        _ => json!({
            "use_trivial_label_coeffs": true,
            "print_freq": 100,
            "fixed_random_embedding": true,
        }),
    };
    if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
        config.extend(more);
    }
    let mut text = text(config);
    if train.is_none() {
        text.insert_str(
            0,
            "# How this network was trained is not known: batch_size, steps and lr_schedule stand here because they have to.\n",
        );
    }
    Opened {
        class,
        output: None,
        by_name: false,
        named,
        files: TargetFiles {
            texts: vec![(file, text)],
            weights: WeightsFile::Torch(named.to_owned()),
        },
    }
}

fn text(table: Value) -> String {
    match table {
        Value::Object(table) => yaml::text(&table),
        _ => String::new(),
    }
}

impl Tms {
    fn sizes(&self) -> Value {
        json!({
            "n_features": self.n_features,
            "n_hidden": self.n_hidden,
            "n_hidden_layers": self.n_hidden_layers,
            "tied_weights": true,
            "init_bias_to_zero": self.zero_bias,
            "device": "cpu",
        })
    }
}

impl ResidMlp {
    fn sizes(&self) -> Value {
        json!({
            "n_features": self.n_features,
            "d_embed": self.d_embed,
            "d_mlp": self.d_mlp,
            "n_layers": self.n_layer,
            "act_fn_name": self.activation,
            "in_bias": self.in_bias,
            "out_bias": self.out_bias,
        })
    }
}

impl Gpt2 {
    fn sizes(&self) -> Value {
        json!({
            "model_type": "GPT2Simple",
            "block_size": self.n_ctx,
            "vocab_size": self.vocab,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.d_model,
        })
    }
}

impl LlamaSimple {
    fn sizes(&self, model_type: &str) -> Value {
        json!({
            "model_type": model_type,
            "block_size": self.n_ctx,
            "vocab_size": self.vocab,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.d_model,
            "n_intermediate": self.d_mlp,
            "rotary_dim": self.d_model / self.n_head,
            "n_ctx": self.n_ctx,
            "n_key_value_heads": self.n_kv_head,
            "use_grouped_query_attention": true,
        })
    }
}
