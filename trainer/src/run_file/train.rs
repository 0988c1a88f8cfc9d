//! `[train]`: the training loop of the decomposition.

use spd_configs::{
    reader::Table,
    values::{Clip, Number, OneOf, Size, Whole},
};

use crate::run_file::{
    losses::{Loss, SAMPLES},
    run::{FaithfulnessWarmup, OutputLoss, Reduction, Run, Train},
    schedule,
    target::Facts,
};

const OUTPUT_LOSSES: OneOf<OutputLoss> = OneOf(&[("kl", OutputLoss::Kl), ("mse", OutputLoss::Mse)]);

const REDUCTIONS: OneOf<Reduction> =
    OneOf(&[("exact", Reduction::Exact), ("fast", Reduction::Fast)]);

pub(crate) fn read(
    table: &mut Table<'_>,
    target: &Facts,
    losses: Option<&[Loss]>,
) -> Option<Train> {
    let steps = table.need("steps", Whole::at_least(1));
    let batch_size = table.need("batch_size", Size::at_least(1));
    let shards = table.maybe("shards", Size::at_least(1));
    let reduction = table.or("reduction", REDUCTIONS, Reduction::Exact);
    let mask_samples = table.or("mask_samples", Size::at_least(1), 1);
    let natural_loss = match target.of_tokens() {
        Some(_) => OutputLoss::Kl,
        None => OutputLoss::Mse,
    };
    let output_loss = table.or("output_loss", OUTPUT_LOSSES, natural_loss);
    let lr = schedule::read(table, "lr");
    let clip_components = table.or("clip_components", Clip, None);
    let clip_importance = table.or("clip_importance", Clip, None);
    let faithfulness_warmup = table.table_or_empty("faithfulness_warmup", read_warmup);

    if let (Some(Some(shards)), Some(rows)) = (shards, batch_size)
        && let Some(message) = no_shards(shards, rows)
    {
        table.refuse::<()>("shards", message);
    }
    if let (Some(name), Some(OutputLoss::Kl)) = (target.of_features(), output_loss) {
        let message = format!(
            "expected \"mse\" for a {name} target, whose outputs are no logits, found \"kl\""
        );
        table.refuse::<()>("output_loss", message);
    }
    if let (Some(samples @ 2..), Some(losses)) = (mask_samples, losses) {
        let most = SAMPLES / losses.len();
        if !losses.iter().any(|loss| loss.term.is_stochastic()) {
            let message = format!("expected 1 without a stochastic loss, found {samples}");
            table.refuse::<()>("mask_samples", message);
        } else if samples > most {
            let message = format!(
                "expected at most {most} for {} losses, found {samples}",
                losses.len()
            );
            table.refuse::<()>("mask_samples", message);
        }
    }
    Some(Train {
        steps: steps?,
        batch_size: batch_size?,
        shards: shards?,
        reduction: reduction?,
        mask_samples: mask_samples?,
        output_loss: output_loss?,
        lr: lr?,
        clip_components: clip_components?,
        clip_importance: clip_importance?,
        faithfulness_warmup: faithfulness_warmup?,
    })
}

/// Why a batch cannot be cut into so many equal blocks, if so.
pub(crate) fn no_shards(shards: usize, rows: usize) -> Option<String> {
    (!rows.is_multiple_of(shards)).then(|| {
        format!("expected a divisor of the rows of a batch, batch_size = {rows}, found {shards}")
    })
}

impl Train {
    /// Blocks of samples that each batch is cut into.
    pub fn blocks(&self) -> usize {
        self.shards.unwrap_or(1)
    }

    /// Why its batches cannot be cut into so many shards, if so.
    pub fn refuses_shards(&self, shards: usize) -> Option<String> {
        no_shards(shards, self.batch_size)
    }
}

impl Run {
    /// Why its batches, those of evaluations too, cannot be cut into so many shards, if so.
    pub fn refuses_shards(&self, shards: usize) -> Option<String> {
        self.train.refuses_shards(shards).or_else(|| {
            let of_eval = no_shards(shards, self.eval.batch_size)?;
            Some(of_eval.replacen("batch_size", "eval.batch_size", 1))
        })
    }
}

fn read_warmup(table: &mut Table<'_>) -> Option<FaithfulnessWarmup> {
    let steps = table.or("steps", Whole::at_least(0), 0);
    let lr = table.or("lr", Number::NOT_NEGATIVE, 1e-3);
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, 0.0);
    Some(FaithfulnessWarmup {
        steps: steps?,
        lr: lr?,
        weight_decay: weight_decay?,
    })
}
