//! `y = sum of x^2`, a scalar; the gradient of `x` is `2 G x`.

pub(crate) mod cpu;
pub(crate) mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::ops::GRAIN;
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Sum of the squares of all elements.
#[derive(Debug, Clone, Copy)]
pub struct SumSquares;

/// `2 G x`. Inputs: the scalar `G`, `x`.
#[derive(Debug, Clone, Copy)]
struct SumSquaresGrad;

impl Builder {
    /// Sum of the squares of all elements, a scalar; the gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// Never: any f32 value will do.
    pub fn sum_squares(&mut self, x: Value) -> Result<Value> {
        self.op1(SumSquares, &[x])
    }
}

impl Op for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Full]]
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::scalar()])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        4 * chunks(inputs[0].len(), GRAIN)
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(gradient) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        gradients.emit(
            SumSquaresGrad,
            &[gradient, node.inputs[0]],
            &[Some(node.inputs[0])],
        )
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::forward(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        2 * inputs[0].len() as u64
    }
}

impl Op for SumSquaresGrad {
    fn name(&self) -> &'static str {
        "sum_squares_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Full, Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[1].clone()])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::backward(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs[1].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn value_and_gradient_agree_with_candle() {
        Oracle::new(&[random(&[150, 131], 1)])
            .ours(|b, v| b.sum_squares(v[0]))
            .candle(|v| v[0].sqr()?.sum_all())
            // Sums of 2e4 squares; candle adds them in f32 too.
            .agree(1e-5);
    }
}
