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
//! # Keys of `[eval]`
//!
//! - `rounding_threshold` | 0 | `rounding_threshold` of `CEandKLLosses` | importance above which
//!   rounded masks keep a component, from 0 to 1

use serde::Serialize;
use spd_configs::{reader::Table, values::Number};
use spd_engine::{Builder, Result};

use super::{Before, Evaluated, Mean, Measured, Metric};
use crate::component_model::Masking;
use crate::losses::{divergence, divergence_and_cross_entropy, hidden_acts_errors};
use crate::rounded::rounded;
use crate::run_file::OutputLoss;

/// The output under every kind of mask.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MaskedOutput {
    /// Rounded masks are 1 above this importance.
    pub rounding_threshold: f64,
}

impl Metric for MaskedOutput {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let rounding_threshold = table.or("rounding_threshold", Number::FRACTION, 0.0)?;
        Some(Self { rounding_threshold })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let (model, clean_pass) = (on.from.model, on.from.clean_pass);
        let mut means = Vec::new();
        let mut add = |name, value| means.push(on.mean(name, value));
        let target = clean_pass.output;
        if let Some(labels) = on.labels {
            add("ce/target".into(), b.cross_entropy(target, labels)?);
        }
        let kinds = [
            ("unmasked", Masking::Ones),
            ("ci_masked", Masking::Importance),
            (
                "rounded",
                Masking::Rounded(rounded(self.rounding_threshold)),
            ),
            ("stochastic", Masking::Stochastic),
            ("random", Masking::Random),
            ("zero", Masking::Zeros),
        ];
        for (kind, masking) in kinds {
            let masked = on.masks(b, masking)?;
            let pass = model.masked_pass(b, clean_pass, &masked)?;
            let output = pass.output;
            if on.is_slow && [Masking::Importance, Masking::Stochastic].contains(&masking) {
                for error in hidden_acts_errors(b, clean_pass, &pass)? {
                    let site = model.sites[error.site].path();
                    add(format!("hidden_acts/{kind}/{site}"), error.mean);
                }
            }
            if on.from.output_loss == OutputLoss::Mse {
                let mse = divergence(b, OutputLoss::Mse, target, output)?;
                add(format!("mse/{kind}"), mse);
            }
            if let Some(labels) = on.labels {
                let [kl, ce] = divergence_and_cross_entropy(b, target, output, labels)?;
                add(format!("ce/{kind}"), ce);
                add(format!("kl/{kind}"), kl);
            }
        }
        Ok(means)
    }

    fn derived(&self, means: &[(String, f64)]) -> Measured {
        let mut derived = Measured::new();
        let Some((target, unrecovered)) = unrecovered(means) else {
            return derived;
        };
        for (name, ce) in means {
            if let Some(kind) = name.strip_prefix("eval/ce/")
                && !["target", "zero"].contains(&kind)
            {
                derived.push((format!("eval/ce_difference/{kind}"), ce - target));
                derived.push((format!("eval/ce_unrecovered/{kind}"), unrecovered(*ce)));
            }
        }
        derived
    }
}

/// Of a language model: its target's cross-entropy, and the part of the target's performance that
/// another one has lost, 1 without components.
pub(super) fn unrecovered(means: &[(String, f64)]) -> Option<(f64, impl Fn(f64) -> f64)> {
    let of = |name: &str| Some(means.iter().find(|(known, _)| known == name)?.1);
    let (target, zero) = (of("eval/ce/target")?, of("eval/ce/zero")?);
    Some((target, move |ce| (ce - target) / (zero - target)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_of_means() {
        let metric = MaskedOutput {
            rounding_threshold: 0.0,
        };
        let means = [
            ("eval/ce/target", 2.0),
            ("eval/ce/stochastic", 2.5),
            ("eval/ce/zero", 6.0),
            ("eval/kl/stochastic", 0.5),
        ];
        let derived = metric.derived(&means.map(|(name, mean)| (name.to_owned(), mean)));
        let derived: Vec<(&str, f64)> = derived.iter().map(|(n, v)| (&**n, *v)).collect();
        let expected = [
            ("eval/ce_difference/stochastic", 0.5),
            ("eval/ce_unrecovered/stochastic", 0.125),
        ];
        assert_eq!(derived, expected);
        let of_toy = [("eval/mse/zero".to_owned(), 1.0)];
        assert!(metric.derived(&of_toy).is_empty());
    }
}
