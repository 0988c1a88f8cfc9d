//! `y = silu(a) b`, `silu(a) = a s` with `s = 1 / (1 + e^-a)`: an MLP's gate `a` and what it lets through, `b`.
//!
//! Since `s' = s (1 - s)`, with `g` the gradient of `y`:
//!
//! ```text
//! a: g b s (1 + a (1 - s))        b: g a s
//! ```
//!
//! Both from `a` and `b` alone, in one pass: `s` is computed again, `y` need not be kept. Shazeer, "GLU variants improve
//! transformer", 2020.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either};
use crate::value::{Type, Value};

/// SwiGLU, element by element.
#[derive(Debug, Clone, Copy)]
pub struct SwiGlu;

/// Gradients of [`SwiGlu`]'s operands, from them and the gradient of `y`.
#[derive(Debug, Clone, Copy)]
struct SwiGluGrad;

impl Builder {
    /// `silu(gate) * up`, f32 of one shape. The gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the shapes differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        self.op1(SwiGlu, &[gate, up])
    }
}

impl Op for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0] != inputs[1] {
            let reason = format!("{} and {} differ", inputs[0], inputs[1]);
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let (gate, up) = (node.inputs[0], node.inputs[1]);
        gradients.emit(SwiGluGrad, &[gate, up, g], &[Some(gate), Some(up)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        // Some 20 for an exponential.
        23 * inputs[0].len() as u64
    }
}

impl Op for SwiGluGrad {
    fn name(&self) -> &'static str {
        "swiglu_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[0].clone(); 2])
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
        30 * inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    // The logistic function is within 1.5e-7, times products of three normal numbers.
    const TOLERANCE: f32 = 2e-6;

    fn reference(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
        a.silu()? * b
    }

    #[test]
    fn value_and_gradients_are_those_of_candle() {
        for dims in [&[3, 7][..], &[2, 90, 100]] {
            Oracle::new(&[random(dims, 1), random(dims, 2)])
                .ours(|b, v| b.swiglu(v[0], v[1]))
                .candle(|v| reference(&v[0], &v[1]))
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn a_second_use_adds_to_the_gradients() {
        Oracle::new(&[random(&[5, 9], 1), random(&[5, 9], 2)])
            .ours(|b, v| {
                let y = b.swiglu(v[0], v[1])?;
                let z = b.swiglu(v[1], v[0])?;
                b.add(y, z)
            })
            .candle(|v| reference(&v[0], &v[1])? + reference(&v[1], &v[0])?)
            .agree(TOLERANCE);
    }

    // One value gets both gradients.
    #[test]
    fn a_gate_may_let_itself_through() {
        Oracle::new(&[random(&[5, 9], 1)])
            .ours(|b, v| {
                let x = b.add(v[0], v[0])?;
                let y = b.swiglu(x, x)?;
                b.add(y, x)
            })
            .candle(|v| {
                let x = (&v[0] * 2.0)?;
                reference(&x, &x)? + x
            })
            // As above, of numbers twice as large.
            .agree(4.0 * TOLERANCE);
    }

    #[test]
    fn operands_of_two_shapes_are_refused() {
        let mut b = Builder::new();
        let gate = b.input("gate", &Type::f32(&[2, 3])).unwrap();
        let up = b.input("up", &Type::f32(&[2, 4])).unwrap();
        assert_eq!(
            b.swiglu(gate, up).unwrap_err().to_string(),
            "swiglu: f32 [2, 3] and f32 [2, 4] differ"
        );
    }
}
