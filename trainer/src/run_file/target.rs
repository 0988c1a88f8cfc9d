//! `[target]`: the frozen network, and where its weights come from.
//!
//! # Keys of `[target]`
//!
//! - `weights` | | `pretrained_model_path`, `pretrained_model_name` | a safetensors file or one of
//!   `torch.save`, of f32, f16, bf16 or f64; or a directory, or `"hf://OWNER/NAME@REVISION"`, see
//!   below; or else a table `[target.train]`
//! - `commit` | what the revision is when the run begins | | of `hf://`: 40 hexadecimal digits; the
//!   run's own `config.toml` keeps it
//! - `dtype` | `"f32"` | | what the weights are held in while the network is decomposed; `"bf16"`
//!   rounds them and takes half the memory
//! - `allow_leak` | false | | decompose a network whose logits depend on later tokens, which is
//!   refused without; its plan, page, lists of runs, summary and trackers then say LEAKY
//!
//! # Keys of `[target.train]`
//!
//! - `steps`, `batch_size`, `lr` | | | `lr` is a learning rate
//! - `seed` | 0 | | of the target alone, so that runs of several seeds take the same network apart
//! - `beta2`, `weight_decay`, `decay_vectors`, `clip` | toys: 0.999, 0.01, true, false; language
//!   models: 0.95, 0.1, false, 1.0 | | AdamW

use std::path::{Path, PathBuf};

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Clip, Flag, Location, Number, Size, Text, Whole},
    words,
};

use crate::networks::{KINDS, Kind, Model, Reads, Traits};
use crate::run_file::schedule::{self, Schedule};

/// The frozen network and where its weights come from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Target {
    /// Which network, and its sizes.
    #[serde(flatten)]
    pub model: Model,
    /// A file with the weights, of safetensors or PyTorch, a directory of them in Hugging Face's
    /// layout, or `hf://OWNER/NAME@REVISION`; `None` when they are trained here.
    pub weights: Option<PathBuf>,
    /// The commit of the revision of `hf://` when the run began; `None` for files and directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Dtype of its weights while it is decomposed.
    pub dtype: Dtype,
    /// Whether its logits may depend on later tokens; true for no causal network.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_leak: bool,
    /// How the target is trained when it has no `weights`.
    pub train: Option<TargetTrain>,
}

words! {
    /// Dtype of frozen weights.
    pub enum Dtype {
        /// 32 bits.
        F32 = "f32",
        /// The upper 16 bits of an f32, rounded to the nearest.
        Bf16 = "bf16",
    }
}

/// How a target is trained: AdamW on its own loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetTrain {
    /// Keys starting values and batches of the target, whatever the seed of the run.
    pub seed: u64,
    /// Updates.
    pub steps: u64,
    /// Rows per step.
    pub batch_size: usize,
    /// Learning rate.
    pub lr: Schedule,
    /// AdamW's second decay.
    pub beta2: f64,
    /// AdamW's weight decay.
    pub weight_decay: f64,
    /// Whether the decay falls on vectors (biases, norms) too.
    pub decay_vectors: bool,
    /// Largest gradient norm; `None` does not clip.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub clip: Option<f64>,
}

/// How names of weights on the hub of Hugging Face begin.
pub(super) const SCHEME: &str = "hf://";

/// Whether weights are on the hub.
fn is_on_hub(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.starts_with(SCHEME))
}

/// Facts of the target that other tables are checked against, as far as they could be read.
#[derive(Default, Clone, Copy)]
pub(crate) struct Facts {
    /// Which network it is, and what it reads.
    pub(crate) network: Option<(Kind, Reads)>,
    /// Whether the target is to be trained, and its data are its lessons.
    pub(crate) trained_here: bool,
}

impl Facts {
    /// The word for a network of features, which has no logits.
    pub(crate) fn of_features(&self) -> Option<&'static str> {
        let (kind, reads) = self.network?;
        matches!(reads, Reads::Features(_)).then(|| kind.name())
    }

    /// The word for a network of tokens.
    pub(crate) fn of_tokens(&self) -> Option<&'static str> {
        let (kind, reads) = self.network?;
        matches!(reads, Reads::Tokens { .. }).then(|| kind.name())
    }

    pub(crate) fn traits(&self) -> Option<Traits> {
        self.network.map(|(kind, _)| kind.traits())
    }

    pub(crate) fn n_features(&self) -> Option<usize> {
        match self.network?.1 {
            Reads::Features(n_features) => n_features,
            Reads::Tokens { .. } => None,
        }
    }

    pub(crate) fn n_ctx(&self) -> Option<usize> {
        match self.network?.1 {
            Reads::Tokens { n_ctx } => n_ctx,
            Reads::Features(_) => None,
        }
    }
}

pub(crate) fn read(table: &mut Table<'_>, facts: &mut Facts) -> Option<Target> {
    let kind = table.need_kind("kind", KINDS)?;
    let (reads, model) = kind.read(table);
    facts.network = Some((kind, reads));
    facts.trained_here = table.has("train");
    let weights = table.maybe("weights", Location);
    let commit = table.maybe("commit", Text::COMMIT);
    let commit = match (&weights, commit) {
        (Some(weights), Some(Some(_))) if !weights.as_ref().is_some_and(|path| is_on_hub(path)) => {
            table.refuse(
                "commit",
                "expected `weights = \"hf://OWNER/NAME\"` beside it",
            )
        }
        (_, commit) => commit,
    };
    let dtype = table.or("dtype", Dtype::WORDS, Dtype::F32);
    let allow_leak = table.or("allow_leak", Flag, false);
    let train = table.maybe_table("train", |train| read_train(train, reads));
    match (table.has("weights"), table.has("train")) {
        (true, true) => table.refuse(
            "weights",
            "expected either `weights` or [target.train], found both",
        ),
        (false, false) => table.refuse_table(
            "expected `weights = \"FILE.safetensors\"` or a table [target.train], found neither",
        ),
        _ => Some(()),
    };
    all_read! { Target: model, weights, commit, dtype, allow_leak, train }
}

/// Defaults are those of the reference: PyTorch's AdamW for a toy, its one recipe for language
/// models.
fn read_train(table: &mut Table<'_>, reads: Reads) -> Option<TargetTrain> {
    let (beta2, weight_decay, decay_vectors, clip) = match reads {
        Reads::Features(_) => (0.999, 0.01, true, None),
        Reads::Tokens { .. } => (0.95, 0.1, false, Some(1.0)),
    };
    let seed = table.or("seed", Whole::ANY, 0);
    let steps = table.need("steps", Whole::at_least(1));
    let batch_size = table.need("batch_size", Size::at_least(1));
    let lr = schedule::read_rate(table, "lr");
    let beta2 = table.or("beta2", Number::DECAY, beta2);
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, weight_decay);
    let decay_vectors = table.or("decay_vectors", Flag, decay_vectors);
    let clip = table.or("clip", Clip, clip);
    all_read! { TargetTrain: seed, steps, batch_size, lr, beta2, weight_decay, decay_vectors, clip }
}
