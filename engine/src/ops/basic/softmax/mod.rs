//! `y_v = e^(x_v) / sum_w e^(x_w)` over the last axis. With `g` the gradient of `y`, `x_v` gets
//! `y_v (g_v - sum_w g_w y_w)`: from `y` alone, so that `x` need not be kept.

mod cpu;
mod cuda;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{DType, Type, Value};

/// Softmax over the last axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Softmax;

/// Gradient of [`Softmax`], from its result and the gradient of that.
#[derive(Debug, Clone, Copy, PartialEq)]
struct SoftmaxGrad;

impl Builder {
    /// Softmax over the last axis, f32 `[.., v]`; the gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// When `x` is a scalar or no f32.
    pub fn softmax(&mut self, x: Value) -> Result<Value> {
        self.op1(Softmax, &[x])
    }
}

impl Op for Softmax {
    op! {
        name "softmax"; formats [Either] => [Either];
        kernels(self) cpu::run(), cuda::value();
        // Some 20 flops for an exponential.
        flops(self, inputs) 22 * inputs[0].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0].dims.is_empty() || inputs[0].dtype != DType::F32 {
            return refuse!(self, "needs f32 [.., v], found {}", inputs[0]);
        }
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        gradients.emit(SoftmaxGrad, &[node.outputs[0], g], &[node.inputs[0]])
    }
}

impl Op for SoftmaxGrad {
    op! {
        name "softmax_grad"; formats [Either] => [Either]; accumulates;
        kernels(self) cpu::run_gradient(), cuda::gradient();
        flops(self, inputs) 4 * inputs[0].len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, Sample, random};
    use crate::value::Type;

    #[test]
    fn value_and_gradient_agree_with_candle() {
        for dims in [&[7][..], &[2, 3, 65], &[30, 1200]] {
            Oracle::new(&[random(dims, 1)])
                .ours(|b, v| {
                    let y = b.softmax(v[0])?;
                    b.add(y, v[0])
                })
                .candle(|v| {
                    let x = v[0].exp()?;
                    let sum = x.sum_keepdim(x.rank() - 1)?;
                    x.broadcast_div(&sum)? + &v[0]
                })
                // Sums of 1200 powers.
                .agree(2e-6);
        }
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        let x = Sample {
            dims: vec![2],
            values: vec![1000.0, 1000.0],
        };
        Oracle::new(&[x])
            .ours(|b, v| b.softmax(v[0]))
            // By hand: halves; the gradient is that of a logistic function of the difference.
            .candle(|v| ((&v[0] - v[0].flip(&[0])?)? * 0.25)? + 0.5)
            .agree(1e-6);
    }

    #[test]
    fn a_scalar_has_no_axis() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::scalar()).unwrap();
        let error = b.softmax(x).unwrap_err().to_string();
        assert_eq!(error, "softmax: needs f32 [.., v], found f32 []");
    }
}
