//! `y = mean of x`, a scalar; each of the `n` elements gets `G / n`.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::ops::GRAIN;
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Mean of all elements.
#[derive(Debug, Clone, Copy)]
pub struct Mean;

/// `G / n` everywhere, from the scalar `G`.
#[derive(Debug, Clone)]
struct MeanGrad {
    dims: Vec<usize>,
}

impl Builder {
    /// Mean of all elements, a scalar; the gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// When there is no element.
    pub fn mean(&mut self, x: Value) -> Result<Value> {
        self.op1(Mean, &[x])
    }
}

impl Op for Mean {
    fn name(&self) -> &'static str {
        "mean"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0].is_empty() {
            let reason = format!("{} has no element", inputs[0]);
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
        let x = node.inputs[0];
        let dims = gradients.builder().ty(x).dims.clone();
        gradients.emit(MeanGrad { dims }, &[g], &[Some(x)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs[0].len() as u64
    }
}

impl Op for MeanGrad {
    fn name(&self) -> &'static str {
        "mean_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Full], &[Either]]
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::f32(&self.dims)])
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
    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    #[test]
    fn value_and_gradient_are_those_of_candle() {
        for dims in [&[1][..], &[3, 7], &[150, 131]] {
            Oracle::new(&[random(dims, 1)])
                .ours(|b, v| {
                    let twice = b.add(v[0], v[0])?;
                    let (once, twice) = (b.mean(v[0])?, b.mean(twice)?);
                    b.add(once, twice)
                })
                .candle(|v| v[0].mean_all()? * 3.0)
                // A mean of 2e4 numbers below 5, whose sums candle rounds as we do.
                .agree(1e-6);
        }
    }

    #[test]
    fn nothing_has_no_mean() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 0])).unwrap();
        assert_eq!(
            b.mean(x).unwrap_err().to_string(),
            "mean: f32 [2, 0] has no element"
        );
    }
}
