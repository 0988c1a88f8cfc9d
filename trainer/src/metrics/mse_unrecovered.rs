//! How much of the output is lost, where outputs are compared by squared errors.
//! `mse_unrecovered/<mask>`.
//!
//! The mean squared error of a mask over that of `zero`, each a mean over all batches: 0 where
//! nothing is lost, and 1 where as much is as without components. `1 - mse_unrecovered` is the part
//! of the target's output that the components explain. Language models have `ce_unrecovered`.
//! Unlike a squared error, it compares across targets whose outputs differ in size. It is left out
//! where the components make no difference, as the quotient has no meaning there.

use serde::Serialize;
use spd_configs::reader::Table;

use super::{Before, Measured, Metric};

/// The part of the output that is lost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MseUnrecovered;

impl Metric for MseUnrecovered {
    fn read(_: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        Some(Self)
    }

    fn derived(&self, means: &[(String, f64)]) -> Measured {
        let errors = means
            .iter()
            .filter_map(|(name, mse)| Some((name.strip_prefix("eval/mse/")?, *mse)));
        let mut zeros = errors.clone().filter(|(mask, _)| *mask == "zero");
        let Some((_, zero)) = zeros.next().filter(|(_, zero)| *zero > 0.0) else {
            return Vec::new();
        };
        errors
            .filter(|(mask, _)| *mask != "zero")
            .map(|(mask, mse)| (format!("eval/mse_unrecovered/{mask}"), mse / zero))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand: 0.5 / 2 and 0 / 2.
    #[test]
    fn errors_are_parts_of_the_error_without_components() {
        let means = |zero| {
            let means = [
                ("eval/mse/stochastic", 0.5),
                ("eval/kl/stochastic", 3.0),
                ("eval/mse/unmasked", 0.0),
                ("eval/mse/zero", zero),
            ];
            means.map(|(name, mean)| (name.to_owned(), mean))
        };
        let expected = [
            ("eval/mse_unrecovered/stochastic".to_owned(), 0.25),
            ("eval/mse_unrecovered/unmasked".to_owned(), 0.0),
        ];
        assert_eq!(MseUnrecovered.derived(&means(2.0)), expected);
        assert!(MseUnrecovered.derived(&means(0.0)).is_empty());
        assert!(MseUnrecovered.derived(&means(2.0)[..3]).is_empty());
    }
}
