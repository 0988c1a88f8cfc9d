//! `y = max(x, 0)`; `x` gets the gradient of `y` where `y > 0`, and nothing at 0, as in PyTorch.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either};
use crate::value::{Type, Value};

/// Positive part, element by element.
#[derive(Debug, Clone, Copy)]
pub struct Relu;

/// Gradient of [`Relu`]: `y` and its gradient to the gradient of `x`.
#[derive(Debug, Clone, Copy)]
struct ReluGrad;

impl Builder {
    /// Positive part of each element, f32 of any shape; NaN stays NaN.
    ///
    /// # Errors
    ///
    /// Never: it takes every shape.
    pub fn relu(&mut self, x: Value) -> Result<Value> {
        self.op1(Relu, &[x])
    }
}

impl Op for Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        gradients.emit(ReluGrad, &[node.outputs[0], g], &[Some(node.inputs[0])])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }
}

impl Op for ReluGrad {
    fn name(&self) -> &'static str {
        "relu_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[0].clone()])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_gradient(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(to);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use crate::ops::oracle::{Oracle, Sample, random};

    #[test]
    fn value_and_gradient_are_those_of_candle() {
        Oracle::new(&[random(&[3, 7, 11], 1)])
            .ours(|b, v| {
                let y = b.relu(v[0])?;
                b.add(y, v[0])
            })
            .candle(|v| v[0].relu()? + &v[0])
            // Sums of two numbers.
            .agree(1e-7);
    }

    #[test]
    fn zero_gets_no_gradient() {
        let x = Sample {
            dims: vec![3],
            values: vec![-1.0, 0.0, 2.0],
        };
        Oracle::new(&[x])
            .ours(|b, v| b.relu(v[0]))
            // Candle's own passes the gradient at 0.
            .candle(|v| &v[0] * v[0].gt(0f32)?.to_dtype(DType::F32)?.detach())
            // Nothing is computed.
            .agree(0.0);
    }
}
