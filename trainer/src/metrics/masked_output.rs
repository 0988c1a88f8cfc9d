//! How far the output is from the target's under every kind of mask.
//!
//! For tokens: `kl/<mask>`, nats a position, and `ce/<mask>`, nats a label, the target's own as
//! `ce/target`. A row of `seq_len` inputs has `seq_len` labels: the label of its last input is the
//! token behind it. The SPD reference has `seq_len - 1`, as it takes labels from among the inputs,
//! so its cross-entropies are of one label a row fewer. For features, and for tokens where
//! `output_loss = "mse"`: `mse/<mask>`.
//!
//! Slow evaluations: `hidden_acts/<mask>/<site>` for the masks `ci_masked` and `stochastic`, by how
//! much what goes into the site differs from what goes into it in the clean pass, a mean of squares
//! over elements. A site that no other lies before has none.
//!
//! From their means over all batches: `ce_difference/<mask>`, by how much a cross-entropy is above
//! the target's own, and `ce_unrecovered/<mask>`, that by the difference of `zero`: 0 where nothing
//! is lost, and 1 where as much is as without components. The SPD reference takes the quotient on
//! each batch, and the mean of those.
//!
//! For each masked `[[eval.subset]]`: `subset/<name>/kl`, `.../ce` and `.../ce_unrecovered`, of a
//! pass whose sites in the subset are stochastically masked and whose others are the target's; and
//! `subset_worst/...`, the largest of each.

use spd_engine::{Builder, Result};

use super::{Evaluated, Mean, Metric};
use crate::component_model::Routing;
use crate::component_model::USUAL_MASKS;
use crate::decomposition::{MaskSample, Masking};
use crate::losses::{divergence, divergence_and_cross_entropy, hidden_acts_errors};
use crate::run_file::OutputLoss;
use crate::task::Measured;

pub(super) const METRIC: Metric = Metric {
    means,
    derived: |means, _| derived(means),
};

fn means(b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
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
        ("random", Masking::Random),
        ("zero", Masking::Zeros),
    ];
    let sample = MaskSample {
        draws: decomposition.draws,
        number: USUAL_MASKS,
        name: "eval".into(),
    };
    let mut stochastic = Vec::new();
    for (kind, masking) in kinds {
        let masked = decomposition.masks(b, clean_pass, masking, Routing::All, &sample)?;
        if masking == Masking::Stochastic {
            stochastic.clone_from(&masked);
        }
        let pass = decomposition.masked_pass(b, clean_pass, &masked)?;
        let output = pass.output;
        if on.is_slow && [Masking::Importance, Masking::Stochastic].contains(&masking) {
            for error in hidden_acts_errors(b, clean_pass, &pass)? {
                let site = decomposition.sites[error.site].path();
                add(format!("hidden_acts/{kind}/{site}"), error.mean);
            }
        }
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
    for subset in run.eval.subsets.iter().filter(|subset| subset.masked) {
        let Some(labels) = labels else { continue };
        let mut masked = stochastic.clone();
        masked.retain(|(site, _)| subset.has(decomposition.sites[*site].path()));
        let output = decomposition.masked_pass(b, clean_pass, &masked)?.output;
        let [kl, ce] = divergence_and_cross_entropy(b, target, output, labels)?;
        add(format!("subset/{}/ce", subset.name), ce);
        add(format!("subset/{}/kl", subset.name), kl);
    }
    Ok(means)
}

/// Metrics derived from the means over all batches.
fn derived(means: &[(String, f64)]) -> Measured {
    let of = |name: &str| {
        let mut means = means.iter();
        means
            .find(|(known, _)| known == name)
            .map(|(_, mean)| *mean)
    };
    let (Some(target), Some(zero)) = (of("eval/ce/target"), of("eval/ce/zero")) else {
        return Vec::new();
    };
    let unrecovered = |ce: f64| (ce - target) / (zero - target);
    let mut derived = Measured::new();
    for (name, ce) in means {
        if let Some(kind) = name.strip_prefix("eval/ce/")
            && !["target", "zero"].contains(&kind)
        {
            derived.push((format!("eval/ce_difference/{kind}"), ce - target));
            derived.push((format!("eval/ce_unrecovered/{kind}"), unrecovered(*ce)));
        }
    }
    let mut worst = [None; 2];
    for (name, value) in means {
        let Some((subset, measure)) = name
            .strip_prefix("eval/subset/")
            .and_then(|name| name.rsplit_once('/'))
        else {
            continue;
        };
        let is_ce = measure == "ce";
        let worst = &mut worst[usize::from(is_ce)];
        *worst = Some(worst.map_or(*value, |worst: f64| worst.max(*value)));
        if is_ce {
            let name = format!("eval/subset/{subset}/ce_unrecovered");
            derived.push((name, unrecovered(*value)));
        }
    }
    if let [Some(kl), Some(ce)] = worst {
        let of_worst = [("ce", ce), ("ce_unrecovered", unrecovered(ce)), ("kl", kl)];
        let of_worst = of_worst.map(|(name, worst)| (format!("eval/subset_worst/{name}"), worst));
        derived.extend(of_worst);
    }
    derived
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_of_means_and_the_largest_of_subsets_is_reported() {
        let means = [
            ("eval/ce/target", 2.0),
            ("eval/ce/stochastic", 2.5),
            ("eval/ce/zero", 6.0),
            ("eval/kl/stochastic", 0.5),
            ("eval/subset/attn/ce", 3.0),
            ("eval/subset/attn/kl", 0.25),
            ("eval/subset/mlp/ce", 2.25),
            ("eval/subset/mlp/kl", 0.75),
        ];
        let means = means.map(|(name, mean)| (name.to_owned(), mean)).to_vec();
        let derived = derived(&means);
        let derived: Vec<(&str, f64)> = derived.iter().map(|(n, v)| (&**n, *v)).collect();
        let expected = [
            ("eval/ce_difference/stochastic", 0.5),
            ("eval/ce_unrecovered/stochastic", 0.125),
            ("eval/subset/attn/ce_unrecovered", 0.25),
            ("eval/subset/mlp/ce_unrecovered", 0.0625),
            ("eval/subset_worst/ce", 3.0),
            ("eval/subset_worst/ce_unrecovered", 0.25),
            ("eval/subset_worst/kl", 0.75),
        ];
        assert_eq!(derived, expected);
        assert!(super::derived(&[("eval/mse/zero".to_owned(), 1.0)]).is_empty());
    }
}
