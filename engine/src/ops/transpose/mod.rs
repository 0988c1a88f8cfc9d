//! `y[b, a, ..] = x[a, b, ..]`. Its own gradient, applied to the gradient.

mod cpu;

use crate::builder::Builder;
use crate::cpu::Frame;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// Exchange of the first two dimensions, f32 `[a, b]` or `[a, b, d]`.
#[derive(Debug, Clone, Copy)]
pub struct Transpose;

impl Builder {
    /// Exchanges the first two dimensions, f32 `[a, b]` or `[a, b, d]`.
    ///
    /// # Errors
    ///
    /// When there are fewer than two dimensions, or more than three.
    pub fn transpose(&mut self, x: Value) -> Result<Value> {
        self.op1(Transpose, &[x])
    }
}

impl Op for Transpose {
    fn name(&self) -> &'static str {
        "transpose"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match inputs[0].dims[..] {
            [a, b] => Ok(vec![Type::f32(&[b, a])]),
            [a, b, d] => Ok(vec![Type::f32(&[b, a, d])]),
            _ => Err(BuildError::new(
                self.name(),
                format!("needs 2 or 3 dimensions, found {}", inputs[0]),
            )),
        }
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(gradient) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        gradients.emit(Self, &[gradient], &[Some(node.inputs[0])])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn two_and_three_dimensions_agree_with_candle() {
        for dims in [&[3, 5][..], &[3, 5, 2], &[70, 33]] {
            Oracle::new(&[random(dims, 1)])
                .ours(|b, v| b.transpose(v[0]))
                .candle(|v| v[0].transpose(0, 1)?.contiguous())
                // Nothing is computed.
                .agree(0.0);
        }
    }
}
