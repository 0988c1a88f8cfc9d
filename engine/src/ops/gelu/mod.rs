//! `y = x Phi(x)` with the normal distribution function `Phi`, or GPT-2's approximation of it.
//!
//! ```text
//! exact   y = x Phi(x)                  y' = Phi(x) + x phi(x)
//! tanh    y = x s,  s = logistic(2 u)   y' = s + x s (1 - s) 2 u'     u = sqrt(2 / pi) (x + 0.044715 x^3)
//! ```
//!
//! `x` gets `y'` times the gradient of `y`, from `x` alone: `y` need not be kept.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, ExpensiveOps, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either};
use crate::value::{Type, Value};

/// Which of the two functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GeluKind {
    /// By the normal distribution: PyTorch's default.
    Exact,
    /// By a hyperbolic tangent: GPT-2's `gelu_new`.
    Tanh,
}

/// GELU, element by element.
#[derive(Debug, Clone, Copy)]
pub struct Gelu {
    /// Which of the two functions.
    pub kind: GeluKind,
}

/// Gradient of [`Gelu`]: `x` and the gradient of `y` to the gradient of `x`.
#[derive(Debug, Clone, Copy)]
struct GeluGrad {
    kind: GeluKind,
}

impl Builder {
    /// GELU of each element, f32 of any shape.
    ///
    /// # Errors
    ///
    /// Never: it takes every shape.
    pub fn gelu(&mut self, x: Value, kind: GeluKind) -> Result<Value> {
        self.op1(Gelu { kind }, &[x])
    }
}

impl Op for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
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
        let x = node.inputs[0];
        gradients.emit(GeluGrad { kind: self.kind }, &[x, g], &[Some(x)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self.kind, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self.kind, to);
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        ExpensiveOps {
            gelus: inputs[0].len() as u64,
            ..ExpensiveOps::default()
        }
    }
}

impl Op for GeluGrad {
    fn name(&self) -> &'static str {
        "gelu_grad"
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
        cpu::run_gradient(self.kind, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(self.kind, to);
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        ExpensiveOps {
            gelu_slopes: inputs[0].len() as u64,
            ..ExpensiveOps::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

    use super::GeluKind;
    use crate::ops::oracle::{Oracle, random};

    // The functions are within 6e-7, times a gradient below 4, of which two are added.
    const TOLERANCE: f32 = 3e-6;

    #[test]
    fn exact_form_agrees_with_candle() {
        Oracle::new(&[random(&[3, 7, 11], 1)])
            .ours(|b, v| {
                let y = b.gelu(v[0], GeluKind::Exact)?;
                b.add(y, v[0])
            })
            .candle(|v| {
                let x = &v[0];
                let y = (x * ((x * FRAC_1_SQRT_2)?.erf()? + 1.0)?)? * 0.5;
                y? + x
            })
            .agree(TOLERANCE);
    }

    #[test]
    fn tanh_form_agrees_with_candle() {
        Oracle::new(&[random(&[3, 7, 11], 1)])
            .ours(|b, v| {
                let y = b.gelu(v[0], GeluKind::Tanh)?;
                b.add(y, v[0])
            })
            .candle(|v| {
                let x = &v[0];
                let u = ((x + (x.powf(3.0)? * 0.044_715)?)? * FRAC_2_PI.sqrt())?;
                let y = (x * (u.tanh()? + 1.0)?)? * 0.5;
                y? + x
            })
            .agree(TOLERANCE);
    }
}
