//! `y = mean (p - t)^2`; `p` gets `2 (p - t) / len` times the gradient of `y`. The target gets none.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::ops::GRAIN;
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Mean squared error of a prediction, to a scalar.
#[derive(Debug, Clone, Copy)]
pub struct Mse;

/// Gradient of [`Mse`]'s prediction, from prediction, target and the gradient of the scalar.
#[derive(Debug, Clone, Copy)]
struct MseGrad;

impl Builder {
    /// Mean over all elements of the squared difference of two f32 of one shape, to a scalar. The gradient flows
    /// to the prediction only.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn mse(&mut self, prediction: Value, target: Value) -> Result<Value> {
        self.op1(Mse, &[prediction, target])
    }
}

impl Op for Mse {
    fn name(&self) -> &'static str {
        "mse"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (prediction, target) = (inputs[0], inputs[1]);
        if prediction != target {
            let reason = format!("prediction {prediction} and target {target} differ");
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![Type::scalar()])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        4 * chunks(inputs[0].len(), GRAIN)
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let (prediction, target) = (node.inputs[0], node.inputs[1]);
        if gradients.wants(target) {
            return Err(BuildError::new(self.name(), "the target has no gradient"));
        }
        gradients.emit(MseGrad, &[prediction, target, g], &[Some(prediction)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        3 * inputs[0].len() as u64
    }
}

impl Op for MseGrad {
    fn name(&self) -> &'static str {
        "mse_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Either, Full], &[Either]]
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

    fn flops(&self, inputs: &[&Type]) -> u64 {
        3 * inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    #[test]
    fn value_and_gradient_are_those_of_candle() {
        for dims in [&[3, 5][..], &[130, 271]] {
            Oracle::new(&[random(dims, 1), random(dims, 2)])
                .constant(1)
                .ours(|b, v| b.mse(v[0], v[1]))
                .candle(|v| (&v[0] - &v[1])?.sqr()?.mean_all())
                // Candle sums 35230 squares in f32.
                .agree(1e-5);
        }
    }

    #[test]
    fn a_second_use_adds_to_the_gradient() {
        Oracle::new(&[random(&[3, 5], 1), random(&[3, 5], 2)])
            .constant(1)
            .ours(|b, v| {
                let twice = b.add(v[1], v[1])?;
                let (first, second) = (b.mse(v[0], v[1])?, b.mse(v[0], twice)?);
                b.add(first, second)
            })
            .candle(|v| {
                let twice = (&v[1] * 2.0)?;
                (&v[0] - &v[1])?.sqr()?.mean_all()? + (&v[0] - twice)?.sqr()?.mean_all()?
            })
            // Means of 15 squares.
            .agree(1e-6);
    }

    #[test]
    fn the_target_has_no_gradient() {
        let mut b = Builder::new();
        let p = b.input("p", &Type::f32(&[2])).unwrap();
        let t = b.input("t", &Type::f32(&[2])).unwrap();
        let loss = b.mse(p, t).unwrap();
        assert_eq!(
            b.gradients(loss, &[t]).unwrap_err().to_string(),
            "mse: the target has no gradient"
        );
    }
}
