//! What a run is, as plain values: one struct a table of the file, checked before anyone sees them.
//!
//! Every default is filled in here, so that a resolved run can be printed, hashed and stored whole.
//! A run is made by reading a file, never by serde; it serialises to the tables a user would write.

use std::path::PathBuf;

use serde::Serialize;

use spd_configs::tracker::Tracker;

use crate::run_file::{
    losses::{Loss, Measure},
    networks::Model,
    pattern::pattern_matches,
};

/// One run: which network is taken apart, on what data, how, and what is written down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Names the run directory `runs/<name>`; letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// Keys every random number of the run.
    pub seed: u64,
    /// Arithmetic of the step.
    pub precision: Precision,
    /// The frozen network.
    pub target: Target,
    /// Where batches come from.
    pub data: Data,
    /// Which matrices are decomposed, and into how many components.
    pub decomposition: Decomposition,
    /// The causal-importance functions.
    pub importance: Importance,
    /// The terms of the total loss, in the order of the file.
    #[serde(rename = "loss")]
    pub losses: Vec<Loss>,
    /// The training loop of the decomposition.
    pub train: Train,
    /// What is measured on held-out batches.
    pub eval: Eval,
    /// When states are saved, and how many stay.
    pub checkpoint: Checkpoint,
    /// When training rows are written.
    pub log: Log,
    /// Where metrics are sent. It is no part of what makes two runs the same.
    #[serde(skip_serializing_if = "Tracker::is_default")]
    pub tracker: Tracker,
}

/// Arithmetic of the step (DESIGN 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// GEMM operands in TF32, on a GPU alone; the rest in f32.
    Tf32,
    /// GEMM operands in bf16, and on a GPU stored activations; the rest in f32.
    Bf16,
}

/// The frozen network and where its weights come from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Target {
    /// Which network, and its sizes.
    #[serde(flatten)]
    pub model: Model,
    /// A file with the weights, of safetensors or PyTorch, a directory of them in Hugging Face's layout, or `hf://OWNER/NAME@REVISION`;
    /// `None` when they are trained here.
    pub weights: Option<PathBuf>,
    /// What the revision of `hf://` was when the run began; `None` for files and directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// What its weights are held in while it is decomposed.
    pub dtype: Dtype,
    /// How the target is trained when it has no `weights`.
    pub train: Option<TargetTrain>,
}

/// What numbers are held in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// The upper 16 bits of an f32, rounded to the nearest.
    Bf16,
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

/// A learning rate over time: `warmup` of the steps rise from zero, the rest follow `shape`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Schedule {
    /// Value after the warm-up.
    pub start: f64,
    /// Course after the warm-up.
    pub shape: Shape,
    /// Fraction of the steps spent rising, in `[0, 1]`.
    pub warmup: f64,
    /// Last value as a fraction of `start`; must be 1 for a constant.
    pub final_fraction: f64,
}

/// Course of a learning rate after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Stays.
    Constant,
    /// Straight to `final_fraction`.
    Linear,
    /// Half a cosine to `final_fraction`.
    Cosine,
}

/// Where batches come from.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Data {
    /// Generated vectors: some features are on, uniform in `[low, high)`, the others are 0.
    SparseFeatures {
        /// Which features are on.
        #[serde(flatten)]
        active: Active,
        /// Smallest value.
        low: f64,
        /// Value never reached.
        high: f64,
    },
    /// Windows of a token dataset.
    Tokens {
        /// The training split: a dataset directory, or files of ids of nanoGPT, llm.c or Megatron.
        train: PathBuf,
        /// The held-out split.
        eval: EvalData,
        /// Tokens per row.
        seq_len: usize,
        /// How ids are stored, where the files do not say.
        #[serde(skip_serializing_if = "Option::is_none")]
        dtype: Option<Ids>,
        /// Whether documents may begin and end inside of a row.
        cross_documents: bool,
        /// The id that ends each document, where the format does not list them and rows do not cross them.
        #[serde(skip_serializing_if = "Option::is_none")]
        document_end: Option<usize>,
        /// The command that makes the datasets; printed when one is missing.
        make: Option<String>,
    },
}

/// What is evaluated on.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EvalData {
    /// A dataset of its own.
    Dataset(PathBuf),
    /// The end of the training data, which is then not trained on.
    HeldOut {
        /// Its part of the rows, above 0 and below 1.
        held_out: f64,
    },
}

/// How ids are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    /// Two bytes an id.
    U16,
    /// Four bytes an id.
    U32,
}

/// Which features of a generated vector are on.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Active {
    /// Each by chance.
    ByChance {
        /// Chance that a feature is on.
        probability: f64,
        /// Groups of features that are all on where any of them is.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        synced_inputs: Vec<Vec<usize>>,
    },
    /// Equally many in each vector, any of them.
    Exactly {
        /// How many.
        exactly_active: usize,
    },
}

/// Which matrices are decomposed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decomposition {
    /// In order: sites are numbered by pattern, then by their place in the model.
    pub sites: Vec<SitePattern>,
    /// Layers that an identity matrix is put before, which becomes the site `<layer>.pre_identity`; numbered after `sites`.
    pub identity: Vec<SitePattern>,
    /// Whether the weight delta takes part as one more component of importance 0.
    pub delta: bool,
    /// Whether the sites `linear1` and `linear2` of a TMS share their components (`V2 = U1^T`, `U2 = V1^T`).
    pub tied: bool,
    /// How a step moves what they share. Left out of the file where it says what every older file means.
    #[serde(skip_serializing_if = "TiedUpdate::is_summed")]
    pub tied_update: TiedUpdate,
}

/// Updates of components that two sites share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TiedUpdate {
    /// One, by the sum of both gradients.
    Summed,
    /// Two, one after the other, each by the gradient and the moments of one site, as in the SPD reference.
    Separate,
}

impl TiedUpdate {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    fn is_summed(&self) -> bool {
        *self == Self::Summed
    }
}

/// Sites by name, and their number of components.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SitePattern {
    /// Shell-style pattern over module paths: `*`, `?` and `[...]`, where `*` also crosses dots.
    pub pattern: String,
    /// Components of each site that matches.
    #[serde(rename = "C")]
    pub components: usize,
}

/// The causal-importance functions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Importance {
    /// What the functions see and how they are wired.
    pub kind: ImportanceKind,
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// From logits to importances.
    pub sigmoid: Sigmoid,
    /// How masks are drawn.
    pub sampling: Sampling,
}

/// Wiring of the importance functions: one for each site, or one for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceKind {
    /// Per component a scalar MLP of its own activation `x V`.
    Mlp,
    /// Per component an MLP of the site's input `x`.
    VectorMlp,
    /// One MLP from `x` to all components.
    SharedMlp,
    /// One MLP from the inputs of all sites, side by side, to the components of all sites.
    GlobalSharedMlp,
}

/// From logits to importances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sigmoid {
    /// Lower-leaky for masks, upper-leaky for the penalty.
    LeakyHard,
    /// Logistic.
    Normal,
    /// `clamp(z, 0, 1)`.
    Hard,
    /// Upper-leaky for both.
    UpperLeakyHard,
    /// Smooth hard sigmoid made of two swishes.
    SwishHard,
}

/// How masks are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Uniform sources.
    Continuous,
    /// Fair coins, and noise on the logits.
    Binomial,
}

/// The training loop of the decomposition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// Updates.
    pub steps: u64,
    /// Rows per step.
    pub batch_size: usize,
    /// Equal blocks of samples that each batch is cut into, whose sums are added in one order on any number of ranks. Left out of the
    /// file where that is not decided yet: one, or one a rank at the first start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<usize>,
    /// In which order several GPUs add up blocks.
    pub reduction: Reduction,
    /// Mask draws per stochastic term.
    pub mask_samples: usize,
    /// Distance between outputs.
    pub output_loss: OutputLoss,
    /// Learning rate of components and importance functions.
    pub lr: Schedule,
    /// Largest gradient norm of the components; `None` does not clip.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub clip_components: Option<f64>,
    /// Largest gradient norm of the importance functions; `None` does not clip.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub clip_importance: Option<f64>,
    /// Updates on faithfulness alone before the first step.
    pub faithfulness_warmup: FaithfulnessWarmup,
}

/// In which order several GPUs add up blocks of samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Along one tree: any number of ranks gives the same bits.
    #[default]
    Exact,
    /// As NCCL adds them: another number of GPUs gives other bits. Everything else adds along the tree as before.
    Fast,
}

/// Distance between outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputLoss {
    /// `KL(target || masked)`, mean over positions.
    Kl,
    /// Squared error, mean over elements.
    Mse,
}

/// Updates on faithfulness alone before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FaithfulnessWarmup {
    /// Updates; 0 for none.
    pub steps: u64,
    /// Constant learning rate.
    pub lr: f64,
    /// AdamW's weight decay.
    pub weight_decay: f64,
}

/// What is measured on held-out batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Eval {
    /// Steps between evaluations; 0 evaluates at the start and the end only.
    pub every: u64,
    /// Batches per evaluation.
    pub batches: u64,
    /// Rows per batch.
    pub batch_size: usize,
    /// Steps between slow evaluations, which draw figures and measure slow terms too; 0 makes them at the ends only.
    pub slow_every: u64,
    /// Components of a site that slow evaluations show in contexts, the most important ones; 0 for none, and for toys.
    pub components: usize,
    /// A component counts as active above this importance.
    pub alive_threshold: f64,
    /// Rounded masks are 1 above this importance.
    pub rounding_threshold: f64,
    /// Known solutions to compare importances with.
    pub known: Vec<KnownImportance>,
    /// Reconstruction terms that are measured beside the usual masks.
    #[serde(rename = "loss")]
    pub losses: Vec<Measure>,
    /// Sites that are measured together.
    #[serde(rename = "subset", skip_serializing_if = "Vec::is_empty")]
    pub subsets: Vec<Subset>,
}

/// Some of the sites, which are measured together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Subset {
    /// Its name in metrics, `eval/l0/<name>` and `eval/subset/<name>/...`.
    pub name: String,
    /// Patterns of its sites, as in `SitePattern`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sites: Vec<String>,
    /// Instead of those, patterns of the sites that are not in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub all_but: Vec<String>,
    /// Whether a pass is made in which its sites alone are masked; not only L0 is summed then.
    pub masked: bool,
}

impl Subset {
    /// Whether a site is in it.
    pub fn has(&self, path: &str) -> bool {
        let any = |patterns: &[String]| {
            let mut patterns = patterns.iter();
            patterns.any(|pattern| pattern_matches(pattern, path))
        };
        if self.all_but.is_empty() {
            any(&self.sites)
        } else {
            !any(&self.all_but)
        }
    }
}

/// What the importances of a site should look like on single-feature inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(into = "crate::run_file::eval::KnownRow")]
pub struct KnownImportance {
    /// Sites, as in `SitePattern`.
    pub pattern: String,
    /// The known solution.
    pub solution: KnownSolution,
}

/// A known pattern of importances, rows are features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownSolution {
    /// One component a feature, up to a permutation.
    Identity {
        /// Features.
        n: usize,
    },
    /// The `k` largest columns are in use, the others are off.
    Dense {
        /// Columns in use.
        k: usize,
    },
}

/// When states are saved, and how many stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// Steps between checkpoints.
    pub every: u64,
    /// Newest checkpoints kept; at least 1.
    pub keep: usize,
}

/// When training rows are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Log {
    /// Steps between rows.
    pub every: u64,
}
