//! `y = n w + b` with each row brought to mean 0 and variance 1: `n = (x - mean) rstd`,
//! `rstd = 1 / sqrt(variance + eps)`, the variance over all `d` columns, not `d - 1`.
//!
//! With `g` the gradient of `y` and `h = g w`: since `mean` and `rstd` depend on `x` too,
//!
//! ```text
//! x: rstd (h - mean(h) - n mean(h n))      w: sum over rows of g n      b: sum over rows of g
//! ```
//!
//! `mean` and `rstd` of each row are kept for it. `w` and `b` get theirs from an op of its own,
//! which a frozen model does not run.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::ops::grain_rows;
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Layer normalisation over the last dimension: `x`, weight and bias to `y`, and f32 `[rows, 2]`,
/// the mean and the inverse deviation of each row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

/// Gradient of [`LayerNorm`]'s `x`, from `x`, weight, row statistics and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LayerNormGrad;

/// Gradients of [`LayerNorm`]'s weight and bias, from `x`, row statistics and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LayerNormParameterGrad;

impl Builder {
    /// Layer normalisation over the last dimension: f32 `[.., d]`, `[d]` and `[d]` to `[.., d]`.
    /// The gradient flows to all three.
    ///
    /// # Errors
    ///
    /// When weight or bias is not `[d]`.
    pub fn layer_norm(&mut self, x: Value, weight: Value, bias: Value, eps: f32) -> Result<Value> {
        self.op1(LayerNorm { eps }, &[x, weight, bias])
    }
}

impl LayerNorm {
    /// Lowers the norm of a sum of two values: they take the place of its first operand, and the
    /// sum comes before its results.
    pub(crate) fn cuda_of_sum(&self, to: &mut Lowering<'_>) {
        cuda::value(self, true, to);
    }
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full], &[Either, Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let x = inputs[0];
        for (what, ty) in [("weight", inputs[1]), ("bias", inputs[2])] {
            if ty.dims != [x.columns()] {
                let reason = format!("{what} is {ty}, not [{}] as for {x}", x.columns());
                return Err(BuildError::new(self.name(), reason));
            }
        }
        Ok(vec![x.clone(), Type::f32(&[x.rows(), 2])])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let [x, weight, bias] = node.inputs[..] else {
            unreachable!("the shape rule asks for three inputs");
        };
        let stats = node.outputs[1];
        gradients.emit(LayerNormGrad, &[x, weight, stats, g], &[Some(x)])?;
        let targets = [Some(weight), Some(bias)];
        gradients.emit(LayerNormParameterGrad, &[x, stats, g], &targets)
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, false, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        7 * inputs[0].len() as u64
    }
}

impl Op for LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
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
        15 * inputs[0].len() as u64
    }
}

impl Op for LayerNormParameterGrad {
    fn name(&self) -> &'static str {
        "layer_norm_parameter_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full, Either], &[Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let ty = Type::f32(&[inputs[0].columns()]);
        Ok(vec![ty.clone(), ty])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let (rows, columns) = (inputs[0].rows(), inputs[0].columns());
        2 * 4 * chunks(rows, grain_rows(columns)) * columns
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_parameter_gradient(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::parameter_gradient(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        5 * inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    const EPS: f32 = 1e-5;

    fn reference(v: &[Tensor]) -> candle_core::Result<Tensor> {
        let last = v[0].rank() - 1;
        let centred = v[0].broadcast_sub(&v[0].mean_keepdim(last)?)?;
        let variance = centred.sqr()?.mean_keepdim(last)?;
        let normal = centred.broadcast_div(&(variance + f64::from(EPS))?.sqrt()?)?;
        normal.broadcast_mul(&v[1])?.broadcast_add(&v[2])
    }

    #[test]
    fn value_and_gradients_agree_with_candle() {
        // One row, short rows, and rows in several chunks.
        for dims in [&[1, 5][..], &[2, 3, 33], &[700, 100]] {
            let d = dims[dims.len() - 1];
            Oracle::new(&[random(dims, 1), random(&[d], 2), random(&[d], 3)])
                .ours(|b, v| b.layer_norm(v[0], v[1], v[2], EPS))
                .candle(reference)
                // Means of d numbers, and sums over 700 rows in the parameters' gradients.
                .agree(1e-5);
        }
    }

    #[test]
    fn a_second_use_adds_to_the_gradients() {
        let samples = [random(&[4, 9], 1), random(&[9], 2), random(&[9], 3)];
        Oracle::new(&samples)
            .ours(|b, v| {
                let y = b.layer_norm(v[0], v[1], v[2], EPS)?;
                let y = b.add(y, v[0])?;
                b.layer_norm(y, v[1], v[2], EPS)
            })
            .candle(|v| {
                let y = (reference(v)? + &v[0])?;
                reference(&[y, v[1].clone(), v[2].clone()])
            })
            // As above, twice.
            .agree(1e-5);
    }

    #[test]
    fn a_weight_of_another_length_is_refused() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 3])).unwrap();
        let w = b.input("w", &Type::f32(&[4])).unwrap();
        assert_eq!(
            b.layer_norm(x, w, w, EPS).unwrap_err().to_string(),
            "layer_norm: weight is f32 [4], not [3] as for f32 [2, 3]"
        );
    }
}
