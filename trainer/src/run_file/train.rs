//! `[train]`: the training loop of the decomposition.
//!
//! # Keys of `[train]`
//!
//! - `steps`, `batch_size`, `lr` | | `steps`, `batch_size`, `lr_schedule`: `start_val`, `fn_type`,
//!   `warmup_pct`, `final_val_frac` | `lr` is a learning rate
//! - `lr_importance` | `lr` | | the learning rate of importance functions, where it is another one
//!   than that of components
//! - `shards` | the ranks at the first start | | equal blocks of samples that each batch is cut
//!   into. Sums over samples are sums within blocks, then along one tree over the blocks: any
//!   number of ranks that divides them, if they are a power of two, gives the same bits; another
//!   number of blocks takes one rank, or one for each block
//! - `reduction` | `"exact"` | | how several GPUs add up the shards, one each: `"exact"` along that
//!   tree; `"fast"` as NCCL does, which gives other bits for another number of GPUs. CPUs, and a
//!   rank that has several shards, add along the tree either way
//! - `mask_samples` | 1 | `n_mask_samples` | draws per stochastic loss; times the number of losses
//!   at most 127
//! - `output_loss` | toys: `"mse"`, language models: `"kl"` | `output_loss_type` | distance between
//!   outputs
//! - `clip_components`, `clip_importance` | false | `grad_clip_norm_components`,
//!   `grad_clip_norm_ci_fns` | clips
//! - `muon` | none | | `{ beta, rms, weight_decay, iterations }`, 0.95, 0.2, 0 and 5 by default,
//!   `rms = false` to scale an update by its shape: matrices are updated by Muon, in the place of
//!   AdamW; importance functions are those over all sites, whose other tensors take Nesterov's Adam
//! - `recompute` | `"auto"` | | whether gradients make again what each block of a masked pass, and
//!   the importance functions, made, in the place of keeping it: `"always"`, `"never"`, or
//!   `"auto"`, where the run would not fit into memory otherwise. It costs up to one more forward
//!   pass of each kind, and no bit, but that bf16 on a GPU may have other last bits
//! - `streamed_kl` | false | | whether the divergence makes the target's logits a few rows at a
//!   time, whenever it needs them: if the head is no site, logits of all positions and the whole
//!   vocabulary are never stored. It costs one more product by the head for each masked pass, and
//!   other last bits
//! - `faithfulness_warmup` | `{ steps = 0, lr = 1e-3, weight_decay = 0.0 }` |
//!   `faithfulness_warmup_steps`, `..._lr`, `..._weight_decay` | updates on faithfulness alone,
//!   first

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Clip, Flag, Number, Size, Whole, is_default},
    words,
};

use crate::component_model::SAMPLES;
use crate::muon::{self, Muon};
use crate::run_file::{
    schedule::{self, Schedule},
    target::Facts,
};

/// The training loop of the decomposition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// Updates.
    pub steps: u64,
    /// Rows per step.
    pub batch_size: usize,
    /// Equal blocks of samples that each batch is cut into, whose sums are added in one order on
    /// any number of ranks. Left out of the file where that is not decided yet: one, or one a rank
    /// at the first start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<usize>,
    /// In which order several GPUs add up blocks.
    pub reduction: Reduction,
    /// Mask draws per stochastic term.
    pub mask_samples: usize,
    /// Distance between outputs.
    pub output_loss: OutputLoss,
    /// Learning rate of the components, and of the importance functions unless they have their own.
    pub lr: Schedule,
    /// Learning rate of the importance functions alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_importance: Option<Schedule>,
    /// Largest gradient norm of the components; `None` does not clip.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub clip_components: Option<f64>,
    /// Largest gradient norm of the importance functions; `None` does not clip.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub clip_importance: Option<f64>,
    /// Settings of Muon, if it takes the place of AdamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon: Option<Muon>,
    /// Whether gradients make intermediates again.
    #[serde(skip_serializing_if = "is_default")]
    pub recompute: Recompute,
    /// Whether divergences make the target's logits a few rows at a time.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub streamed_kl: bool,
    /// Updates on faithfulness alone before the first step.
    pub faithfulness_warmup: FaithfulnessWarmup,
}

words! {
    /// In which order several GPUs add up blocks of samples.
    #[derive(Default)]
    pub enum Reduction {
        /// Along one tree: any number of ranks gives the same bits.
        #[default]
        Exact = "exact",
        /// As NCCL adds them: another number of GPUs gives other bits. Everything else adds along
        /// the tree as before.
        Fast = "fast",
    }
}

words! {
    /// Whether gradients make the intermediates of the forward pass again, in the place of keeping
    /// them.
    #[derive(Default)]
    pub enum Recompute {
        /// If the run would not fit into memory otherwise, as the launcher decides.
        #[default]
        Auto = "auto",
        /// Always.
        Always = "always",
        /// Never.
        Never = "never",
    }
}

words! {
    /// Distance between outputs.
    pub enum OutputLoss {
        /// `KL(target || masked)`, mean over positions.
        Kl = "kl",
        /// Squared error, mean over elements.
        Mse = "mse",
    }
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

/// Facts of the losses of all streams that `[train]` is checked against.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) count: usize,
    /// Samples that they take with one mask sample each.
    pub(crate) samples: usize,
    /// Whether masks are drawn for any of them.
    pub(crate) are_stochastic: bool,
    /// Rows of a batch of the non-target stream, if there is one.
    pub(crate) nontarget_rows: Option<usize>,
}

pub(crate) fn read(
    table: &mut Table<'_>,
    target: &Facts,
    losses: Option<Terms>,
    no_muon: Option<String>,
) -> Option<Train> {
    let steps = table.need("steps", Whole::at_least(1));
    let batch_size = table.need("batch_size", Size::at_least(1));
    let shards = table.maybe("shards", Size::at_least(1));
    let reduction = table.or("reduction", Reduction::WORDS, Reduction::Exact);
    let mask_samples = table.or("mask_samples", Size::at_least(1), 1);
    let natural_loss = match target.of_tokens() {
        Some(_) => OutputLoss::Kl,
        None => OutputLoss::Mse,
    };
    let output_loss = table.or("output_loss", OutputLoss::WORDS, natural_loss);
    let lr = schedule::read_rate(table, "lr");
    let lr_importance = schedule::read_rate_or_none(table, "lr_importance");
    let clip_components = table.or("clip_components", Clip, None);
    let clip_importance = table.or("clip_importance", Clip, None);
    let muon = table.maybe_table_such_as("muon", "{ beta = 0.95 }", muon::read);
    let recompute = table.or("recompute", Recompute::WORDS, Recompute::Auto);
    let streamed_kl = table.or("streamed_kl", Flag, false);
    let faithfulness_warmup = table.table_or_empty("faithfulness_warmup", read_warmup);

    if let (Some(Some(_)), Some(message)) = (muon, no_muon) {
        table.refuse::<()>("muon", message);
    }
    let nontarget_rows = losses.and_then(|terms| terms.nontarget_rows);
    for (key, rows) in [
        ("batch_size", batch_size),
        ("nontarget.batch_size", nontarget_rows),
    ] {
        if let (Some(Some(shards)), Some(rows)) = (shards, rows)
            && let Some(message) = no_shards(key, shards, rows)
        {
            table.refuse::<()>("shards", message);
        }
    }
    if let (Some(name), Some(OutputLoss::Kl)) = (target.of_features(), output_loss) {
        let message = format!(
            "expected \"mse\" for a {name} target, whose outputs are no logits, found \"kl\""
        );
        table.refuse::<()>("output_loss", message);
    }
    if let (Some(true), Some(OutputLoss::Mse)) = (streamed_kl, output_loss) {
        let message = "expected false with output_loss = \"mse\", which compares outputs as they are, found true";
        table.refuse::<()>("streamed_kl", message);
    }
    if let (Some(samples @ 2..), Some(losses)) = (mask_samples, losses) {
        // Adversaries that live on take as many whatever is said here.
        let most = SAMPLES.saturating_sub(losses.samples) / losses.count + 1;
        if !losses.are_stochastic {
            let message = format!("expected 1 without a stochastic loss, found {samples}");
            table.refuse::<()>("mask_samples", message);
        } else if samples > most {
            let message = format!(
                "expected at most {most} for {} losses, found {samples}",
                losses.count
            );
            table.refuse::<()>("mask_samples", message);
        }
    }
    all_read! {
        Train: steps, batch_size, shards, reduction, mask_samples, output_loss, lr, lr_importance,
            clip_components, clip_importance, muon, recompute, streamed_kl, faithfulness_warmup
    }
}

/// Why a batch of the rows that a key says cannot be cut into so many equal blocks, if so.
pub(crate) fn no_shards(key: &str, shards: usize, rows: usize) -> Option<String> {
    (!rows.is_multiple_of(shards)).then(|| {
        format!("expected a divisor of the rows of a batch, {key} = {rows}, found {shards}")
    })
}

impl Train {
    /// Blocks of samples that each batch is cut into.
    pub fn blocks(&self) -> usize {
        self.shards.unwrap_or(1)
    }

    /// Why its batches cannot be cut into so many shards, if so.
    pub fn refuses_shards(&self, shards: usize) -> Option<String> {
        no_shards("batch_size", shards, self.batch_size)
    }
}

fn read_warmup(table: &mut Table<'_>) -> Option<FaithfulnessWarmup> {
    let steps = table.or("steps", Whole::at_least(0), 0);
    let lr = table.or("lr", Number::NOT_NEGATIVE, 1e-3);
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, 0.0);
    all_read! { FaithfulnessWarmup: steps, lr, weight_decay }
}
