//! The importance minimality penalty with its frequency term, from penalty sums.
//!
//! ```text
//! L = sum_c f_c (a + beta log2(1 + r f_c))      f_c = s_c / n, s_c: penalty sums over n rows
//! dL/ds_c = (a + beta log2(1 + r f_c)) / n + f_c beta r / n / ((1 + r f_c) ln 2)
//! ```
//!
//! summed over components, a mean over rows, not divided by sites. `r` is a number of rows; where
//! it is that of the batch, the logarithm reads the sums themselves. The formula and its
//! normalisation are those of the reference implementation.

use crate::cpu::reduce::rounded;
use crate::op::{Builder, Result};
use crate::value::Value;

/// The penalty of one site.
#[derive(Debug, Clone, Copy)]
pub struct ImportanceMinimality {
    /// Rows that the sums run over.
    pub rows: usize,
    /// Weight of the mean alone, `a`.
    pub activity: f32,
    /// Weight of the frequency term.
    pub beta: f32,
    /// Rows that the logarithm counts, `r`.
    pub counted: u64,
}

impl ImportanceMinimality {
    /// The mean over so many rows.
    pub fn mean(rows: usize) -> Self {
        Self {
            rows,
            activity: 1.0,
            beta: 0.0,
            counted: rows as u64,
        }
    }
}

impl Builder {
    /// Penalty (a scalar) from penalty sums f32 `[c]`; the gradient flows to the sums.
    ///
    /// # Errors
    ///
    /// When the sums are no f32.
    pub fn importance_minimality(
        &mut self,
        op: ImportanceMinimality,
        sums: Value,
    ) -> Result<Value> {
        let rows = op.rows as f64;
        let [log2, counted] = [
            f64::from(op.beta) / std::f64::consts::LN_2,
            op.counted as f64 / rows,
        ]
        .map(rounded);
        let names = ["importance_minimality", "importance_minimality_grad"];
        self.elementwise_sum(names, 1.0 / rows, [sums], |[s]| {
            &s * ((&s * counted).log_1p() * log2 + op.activity)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::{Oracle, Sample};

    // The reference's unit test: importances [[1, 2], [3, 4]], p = 1, so s = [4, 6] over 2 rows.
    #[test]
    fn penalty_agrees_with_the_example_of_the_reference() {
        for (beta, expected) in [
            (0.0, 5.0),
            (1.0, 2.0 * (1.0 + 5f64.log2()) + 3.0 * (1.0 + 7f64.log2())),
        ] {
            let op = ImportanceMinimality {
                beta,
                ..ImportanceMinimality::mean(2)
            };
            let sums = Sample {
                dims: vec![2],
                values: vec![4.0, 6.0],
            };
            Oracle::new(&[sums])
                // The other test compares gradients.
                .constant(0)
                .ours(|b, v| b.importance_minimality(op, v[0]))
                .candle(|v| (v[0].sum_all()? * 0.0)? + expected)
                // A rounding of each step, of numbers below 40.
                .agree(4e-7);
        }
    }

    #[test]
    fn gradient_agrees_with_candle() {
        let sums = Sample {
            dims: vec![4],
            values: vec![0.0, 0.5, 3.0, 100.0],
        };
        for (activity, counted) in [(1.0, 7), (0.0, 1000)] {
            let op = ImportanceMinimality {
                activity,
                beta: 0.3,
                counted,
                ..ImportanceMinimality::mean(7)
            };
            Oracle::new(std::slice::from_ref(&sums))
                .ours(|b, v| b.importance_minimality(op, v[0]))
                .candle(|v| {
                    let mean = (&v[0] / 7.0)?;
                    let counts = (&mean * counted as f64)?;
                    let frequency = ((counts + 1.0)?.log()? * (0.3 / std::f64::consts::LN_2))?;
                    (&mean * (frequency + f64::from(activity))?)?.sum_all()
                })
                // candle works in f32.
                .agree(2e-6);
        }
    }
}
