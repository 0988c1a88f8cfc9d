//! How far the output is from the target's under every kind of mask.
//!
//! For tokens: `kl/<mask>`, nats a position, and `ce/<mask>`, nats a label, the target's own as `ce/target`. A row of `seq_len` inputs
//! has `seq_len` labels: the label of its last input is the token behind it. The SPD reference has `seq_len - 1`, as it takes labels
//! from among the inputs, so its cross-entropies are of one label a row fewer. For features, and for tokens where
//! `output_loss = "mse"`: `mse/<mask>`.

use spd_configs::{OutputLoss, Routing};
use spd_engine::{Builder, Result};

use super::{Evaluated, Mean};
use crate::decomposition::{MaskSample, Masking};
use crate::losses::{USUAL_MASKS, divergence, divergence_and_cross_entropy};

pub(super) fn means(b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
    let Evaluated {
        decomposition,
        clean_pass,
        labels,
        ..
    } = *on;
    let run = &decomposition.run;
    let mut means = Vec::new();
    let mut add = |name: String, value| {
        means.push(Mean {
            name,
            value,
            count: clean_pass.shape.examples(),
        });
    };
    let target = clean_pass.output;
    if let Some(labels) = labels {
        add("ce/target".into(), b.cross_entropy(target, labels)?);
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a threshold is rounded to f32"
    )]
    let rounded = Masking::Rounded(run.eval.rounding_threshold as f32);
    let kinds = [
        ("unmasked", Masking::Ones),
        ("ci_masked", Masking::Importance),
        ("rounded", rounded),
        ("stochastic", Masking::Stochastic),
        ("zero", Masking::Zeros),
    ];
    let sample = MaskSample {
        draws: decomposition.draws,
        number: USUAL_MASKS,
        name: "eval".into(),
    };
    for (kind, masking) in kinds {
        let masked = decomposition.masks(b, clean_pass, masking, Routing::All, &sample)?;
        let output = decomposition.masked_pass(b, clean_pass, &masked)?.output;
        if run.train.output_loss == OutputLoss::Mse {
            let mse = divergence(b, OutputLoss::Mse, target, output)?;
            add(format!("mse/{kind}"), mse);
        }
        if let Some(labels) = labels {
            let [kl, ce] = divergence_and_cross_entropy(b, target, output, labels)?;
            add(format!("ce/{kind}"), ce);
            add(format!("kl/{kind}"), kl);
        }
    }
    Ok(means)
}
