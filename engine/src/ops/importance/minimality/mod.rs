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

mod cuda;

use crate::cpu::reduce::rounded;
use crate::cpu::{Frame, Output};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op};
use crate::value::{Type, Value};

/// The penalty of one site.
#[derive(Debug, Clone, Copy, PartialEq)]
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

/// Gradient of [`ImportanceMinimality`]. Inputs: gradient of the penalty (scalar), the sums.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ImportanceMinimalityGrad(ImportanceMinimality);

impl Builder {
    /// Penalty (a scalar) from penalty sums f32 `[c]`; the gradient flows to the sums.
    ///
    /// # Errors
    ///
    /// Never: every vector of sums is valid.
    pub fn importance_minimality(
        &mut self,
        op: ImportanceMinimality,
        sums: Value,
    ) -> Result<Value> {
        self.op1(op, &[sums])
    }
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

    /// The factor of the sums under the logarithm.
    fn scale(&self) -> f64 {
        self.counted as f64 / self.rows as f64
    }

    /// Penalty of one component and its slope.
    fn term(&self, sum: f32) -> (f64, f64) {
        let (s, n, scale) = (f64::from(sum), self.rows as f64, self.scale());
        let [activity, beta] = [self.activity, self.beta].map(f64::from);
        let frequency = activity + beta * (scale * s).ln_1p() / std::f64::consts::LN_2;
        let slope = beta * scale / ((1.0 + scale * s) * std::f64::consts::LN_2);
        (s / n * frequency, frequency / n + s / n * slope)
    }
}

impl Op for ImportanceMinimality {
    op! {
        name "importance_minimality";
        results(self, _inputs) vec![Type::scalar()];
        cuda(self) cuda::value(self);
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let sums = node.inputs[0];
        gradients.emit(ImportanceMinimalityGrad(*self), &[g, sums], &[Some(sums)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let total: f64 = frame.input(0).iter().map(|&sum| self.term(sum).0).sum();
        frame.output(0).values[0] = rounded(total);
    }
}

impl Op for ImportanceMinimalityGrad {
    op! {
        name "importance_minimality_grad"; accumulates;
        results(self, inputs) vec![inputs[1].clone()];
        cuda(self) cuda::gradient(&self.0);
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let Output { values: out, add } = frame.output(0);
        let upstream = f64::from(frame.input(0)[0]);
        for (out, &sum) in out.iter_mut().zip(frame.input(1)) {
            let term = rounded(upstream * self.0.term(sum).1);
            *out = if add { *out + term } else { term };
        }
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
            let found = op.term(4.0).0 + op.term(6.0).0;
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
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
