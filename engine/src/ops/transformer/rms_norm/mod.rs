//! `y = n w` with each row brought to a mean square of 1: `n = x r`,
//! `r = 1 / sqrt(mean(x^2) + eps)`.
//!
//! With `g` the gradient of `y` and `h = g w`: since `r` depends on `x` too,
//! `dr/dx_i = -r^3 x_i / d` over the `d` columns,
//!
//! ```text
//! x: r (h - n mean(h n))      w: sum over rows of g n
//! ```
//!
//! `r` of each row is kept for it. `w` gets its gradient from an op of its own, which a frozen
//! model does not run. Zhang and Sennrich, "Root mean square layer normalization", 2019.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::ops::grain_rows;
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Root-mean-square normalisation over the last dimension: `x` and weight to `y`, and f32 `[rows]`,
/// the factor of each row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

/// Gradient of [`RmsNorm`]'s `x`, from `x`, weight, row factors and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RmsNormGrad;

/// Gradient of [`RmsNorm`]'s weight, from `x`, row factors and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RmsNormWeightGrad;

impl Builder {
    /// Root-mean-square normalisation over the last dimension: f32 `[.., d]` and `[d]` to
    /// `[.., d]`. The gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the weight is not `[d]`.
    pub fn rms_norm(&mut self, x: Value, weight: Value, eps: f32) -> Result<Value> {
        self.op1(RmsNorm { eps }, &[x, weight])
    }
}

impl RmsNorm {
    /// Lowers the norm of a sum of two values: they take the place of its first operand, and the
    /// sum comes before its results.
    pub(crate) fn cuda_of_sum(&self, to: &mut Lowering<'_>) {
        cuda::value(self, true, to);
    }
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full], &[Either, Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (x, weight) = (inputs[0], inputs[1]);
        if weight.dims != [x.columns()] {
            let reason = format!("weight is {weight}, not [{}] as for {x}", x.columns());
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![x.clone(), Type::f32(&[x.rows()])])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let (x, weight, factors) = (node.inputs[0], node.inputs[1], node.outputs[1]);
        gradients.emit(RmsNormGrad, &[x, weight, factors, g], &[Some(x)])?;
        gradients.emit(RmsNormWeightGrad, &[x, factors, g], &[Some(weight)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, false, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        4 * inputs[0].len() as u64
    }
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full, Full, Either], &[Either]]
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_gradient(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        8 * inputs[0].len() as u64
    }
}

impl Op for RmsNormWeightGrad {
    fn name(&self) -> &'static str {
        "rms_norm_weight_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full, Either], &[Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::f32(&[inputs[0].columns()])])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let (rows, columns) = (inputs[0].rows(), inputs[0].columns());
        4 * chunks(rows, grain_rows(columns)) * columns
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_weight_gradient(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::weight_gradient(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        3 * inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    const EPS: f32 = 1e-2;

    fn reference(v: &[Tensor]) -> candle_core::Result<Tensor> {
        let square = v[0].sqr()?.mean_keepdim(v[0].rank() - 1)?;
        let normal = v[0].broadcast_div(&(square + f64::from(EPS))?.sqrt()?)?;
        normal.broadcast_mul(&v[1])
    }

    #[test]
    fn value_and_gradients_agree_with_candle() {
        // One row, short rows, and rows in several chunks.
        for dims in [&[1, 5][..], &[2, 3, 33], &[700, 100]] {
            let d = dims[dims.len() - 1];
            Oracle::new(&[random(dims, 1), random(&[d], 2)])
                .ours(|b, v| b.rms_norm(v[0], v[1], EPS))
                .candle(reference)
                // Means of d numbers, and sums over 700 rows in the weight's gradient.
                .agree(1e-5);
        }
    }

    #[test]
    fn a_second_use_adds_to_the_gradients() {
        Oracle::new(&[random(&[4, 9], 1), random(&[9], 2)])
            .ours(|b, v| {
                let y = b.rms_norm(v[0], v[1], EPS)?;
                let y = b.add(y, v[0])?;
                b.rms_norm(y, v[1], EPS)
            })
            .candle(|v| {
                let y = (reference(v)? + &v[0])?;
                reference(&[y, v[1].clone()])
            })
            // As above, twice.
            .agree(1e-5);
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let mut zeros = random(&[2, 7], 1);
        zeros.values.fill(0.0);
        Oracle::new(&[zeros, random(&[7], 2)])
            .ours(|b, v| b.rms_norm(v[0], v[1], EPS))
            .candle(reference)
            // The gradient is w / sqrt(eps).
            .agree(1e-6);
    }

    #[test]
    fn a_weight_of_another_length_is_refused() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 3])).unwrap();
        let w = b.input("w", &Type::f32(&[4])).unwrap();
        assert_eq!(
            b.rms_norm(x, w, EPS).unwrap_err().to_string(),
            "rms_norm: weight is f32 [4], not [3] as for f32 [2, 3]"
        );
    }
}
