//! `y[b, a, ..] = x[a, b, ..]`. The gradient is exchanged back.

mod cpu;
mod cuda;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Exchange of the first two dimensions, f32 `[a, b]` or `[a, b, d]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Transpose {
    /// The dimensions `a`, `b` and `d` (1 for a matrix).
    from: [usize; 3],
    /// Shape of the result: `b` first, then the others.
    dims: Vec<usize>,
}

impl Builder {
    /// Exchanges the dimensions of a matrix, f32 `[a, b]` to `[b, a]`; the gradient flows back.
    ///
    /// # Errors
    ///
    /// When `x` is no matrix.
    pub fn transpose(&mut self, x: Value) -> Result<Value> {
        let (a, b) = (self.ty(x).rows(), self.ty(x).columns());
        self.op1(
            Transpose {
                from: [a, b, 1],
                dims: vec![b, a],
            },
            &[x],
        )
    }

    /// Moves the second dimension to the front and joins the others, f32 `[a, b, d]` to `[b, a d]`;
    /// the gradient flows back.
    ///
    /// # Errors
    ///
    /// When `x` does not have three dimensions.
    pub fn second_first(&mut self, x: Value) -> Result<Value> {
        let [a, b, d] = self.ty(x).dims[..] else {
            return refuse!("transpose", "needs 3 dimensions, found {}", self.ty(x));
        };
        self.op1(
            Transpose {
                from: [a, b, d],
                dims: vec![b, a * d],
            },
            &[x],
        )
    }
}

impl Op for Transpose {
    op! {
        name "transpose"; formats [Either] => [Either]; accumulates; carries;
        kernels(self) cpu::run(self.from), cuda::value(self.from);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let len: usize = self.from.iter().product();
        if inputs[0].len() != len || self.dims.iter().product::<usize>() != len {
            return refuse!(self, "{} does not fit {self:?}", inputs[0]);
        }
        Ok(vec![Type::f32(&self.dims)])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let dims = gradients.builder().ty(node.inputs[0]).dims.clone();
        let [a, b, d] = self.from;
        let from = [b, a, d];
        gradients.emit(Self { from, dims }, &[g], &[node.inputs[0]])
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn transposed_matrices_agree_with_candle() {
        for dims in [&[3, 5][..], &[70, 33]] {
            Oracle::new(&[random(dims, 1)])
                .ours(|b, v| b.transpose(v[0]))
                .candle(|v| v[0].t()?.contiguous())
                // Nothing is rounded.
                .agree(0.0);
        }
    }

    #[test]
    fn second_dimension_first_agrees_with_candle() {
        Oracle::new(&[random(&[3, 5, 2], 1)])
            .ours(|b, v| b.second_first(v[0]))
            .candle(|v| v[0].transpose(0, 1)?.contiguous()?.reshape((5, 6)))
            .agree(0.0);
    }
}
