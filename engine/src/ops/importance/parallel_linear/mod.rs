//! A linear layer for each component: `y_co = sum_i x_ci W_cio + b_co`.
//!
//! With `G` the gradient of `y`: `x: sum_o G_co W_cio`, `W: sum over rows of x_ci G_co`,
//! `b: sum over rows of G_co`.

mod cpu;
mod cuda;

use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::ops::SumRows;
use crate::value::{Type, Value};

/// A linear layer for each component: f32 `[.., c i]`, `[c, i, o]`, `[c, o]` to `[.., c o]`;
/// component by component in the columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParallelLinear;

/// Gradient of `x`: inputs `G`, `W`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct InputGrad;

/// Gradient of `W`: inputs `G`, `x`; the weight's shape.
#[derive(Debug, Clone, Copy, PartialEq)]
struct WeightGrad {
    dims: [usize; 3],
}

impl Builder {
    /// A linear layer for each component: f32 `[.., c i]`, `[c, i, o]` and `[c, o]` to `[.., c o]`.
    ///
    /// # Errors
    ///
    /// When the shapes do not fit.
    pub fn parallel_linear(&mut self, x: Value, w: Value, bias: Value) -> Result<Value> {
        self.op1(ParallelLinear, &[x, w, bias])
    }
}

impl Op for ParallelLinear {
    op! {
        name "parallel_linear"; formats [Factor, Factor, Full] => [Either];
        kernels(self) cpu::forward(), cuda::value();
        flops(self, inputs) 2 * (inputs[0].rows() * inputs[1].len()) as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match (
            <[usize; 3]>::try_from(&inputs[1].dims[..]),
            &inputs[2].dims[..],
        ) {
            (Ok([c, i, o]), bias)
                if inputs[0].columns() == c * i && bias.iter().product::<usize>() == c * o =>
            {
                Ok(vec![inputs[0].with_columns(c * o)])
            }
            _ => refuse!(self, "{} do not fit", listed(inputs)),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (x, w, bias) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        gradients.emit(InputGrad, &[g, w], &[x])?;
        let dims = gradients.builder().ty(w).dims.clone();
        let dims = dims
            .try_into()
            .map_err(|_| BuildError::new(self.name(), "a weight has 3 dimensions"))?;
        gradients.emit(WeightGrad { dims }, &[g, x], &[w])?;
        let dims = gradients.builder().ty(bias).dims.clone();
        gradients.emit(SumRows { dims }, &[g], &[bias])?;
        Ok(())
    }
}

impl Op for InputGrad {
    op! {
        name "parallel_linear_input_grad"; formats [Factor] => [Either]; accumulates;
        kernels(self) cpu::input_grad(), cuda::input_gradient();
        results(self, inputs) {
            let weight = &inputs[1].dims;
            vec![inputs[0].with_columns(weight[0] * weight[1])]
        };
    }
}

impl Op for WeightGrad {
    op! {
        name "parallel_linear_weight_grad"; formats [Factor] => [Either]; accumulates;
        results(self, _inputs) vec![Type::f32(&self.dims)];
        kernels(self) cpu::weight_grad(self.dims), cuda::weight_gradient(self.dims);
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn layers_agree_with_candle() {
        // With one result for each component, vectors of 8, 4 and 1 inputs, and several blocks.
        let thin = [
            (6, 5, 7, 1),
            (300, 140, 12, 1),
            (5, 6, 8, 1),
            (3, 8, 1, 1),
            (2, 3, 40, 1),
        ];
        for (rows, c, i, o) in [(4, 3, 2, 5), (2, 4, 1, 3)].into_iter().chain(thin) {
            let point = [
                random(&[rows, c * i], 1),
                random(&[c, i, o], 2),
                random(&[c, o], 3),
            ];
            Oracle::new(&point)
                .ours(|b, v| b.parallel_linear(v[0], v[1], v[2]))
                .candle(|v| {
                    let x = v[0].reshape((rows, c, i))?.transpose(0, 1)?.contiguous()?;
                    let y = x.matmul(&v[1])?.transpose(0, 1)?.broadcast_add(&v[2])?;
                    y.reshape((rows, c * o))
                })
                // Sums of up to 40 products, and over 300 rows in the weights' gradients.
                .agree(1e-5);
        }
    }
}
