//! Norms of rows, layer normalisation and root-mean-square normalisation.
//!
//! ```text
//! layer    y = n w + b    n = (x - mean) r    r = 1 / sqrt(variance + eps)
//! rms      y = n w        n = x r             r = 1 / sqrt(mean(x^2) + eps)
//! ```
//!
//! The variance is over all `d` columns, not `d - 1`. With `g` the gradient of `y` and `h = g w`:
//! since `mean` and `r` depend on `x` too, in `rms` by `dr/dx_i = -r^3 x_i / d`,
//!
//! ```text
//! x: r (h - mean(h) - n mean(h n))      in `rms` without mean(h)
//! w: sum over rows of g n               b: sum over rows of g
//! ```
//!
//! `mean` and `r` of each row are kept for it; the mean is 0 in `rms`. `w` and `b` get their
//! gradients from an op of its own, which a frozen model does not run. Zhang and Sennrich, "Root
//! mean square layer normalization", 2019.

mod cpu;
pub(crate) mod cuda;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::ops::row_chunks;
use crate::value::{Type, Value};

/// The norm of each row over the last dimension: `x`, weight and bias if it has one to `y`, and the
/// statistics of each row, f32 `[rows, 2]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    kind: Kind,
    eps: f32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Layer,
    Rms,
}

/// Gradient of [`Norm`]'s `x`, from `x`, weight, statistics and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct NormGrad(Kind);

/// Gradients of [`Norm`]'s weight and bias, from `x`, statistics and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct NormParameterGrad(Kind);

impl Builder {
    /// Layer normalisation over the last dimension: f32 `[.., d]`, `[d]` and `[d]` to `[.., d]`.
    /// The gradient flows to all three.
    ///
    /// # Errors
    ///
    /// When weight or bias is not `[d]`.
    pub fn layer_norm(&mut self, x: Value, weight: Value, bias: Value, eps: f32) -> Result<Value> {
        let kind = Kind::Layer;
        self.op1(Norm { kind, eps }, &[x, weight, bias])
    }

    /// Root-mean-square normalisation over the last dimension: f32 `[.., d]` and `[d]` to
    /// `[.., d]`. The gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the weight is not `[d]`.
    pub fn rms_norm(&mut self, x: Value, weight: Value, eps: f32) -> Result<Value> {
        let kind = Kind::Rms;
        self.op1(Norm { kind, eps }, &[x, weight])
    }
}

impl Kind {
    /// Whether rows have a mean, and a bias.
    fn is_centred(self) -> bool {
        self == Self::Layer
    }

    /// One of two, as the norm is.
    fn either<T>(self, layer: T, rms: T) -> T {
        match self {
            Self::Layer => layer,
            Self::Rms => rms,
        }
    }
}

impl Op for Norm {
    op! {
        name(self) self.kind.either("layer_norm", "rms_norm");
        formats [Either, Full] => [Either, Full];
        kernels(self) cpu::run(self.kind.is_centred(), self.eps), cuda::value(self, false);
        flops(self, inputs) self.kind.either(7, 4) * inputs[0].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let x = inputs[0];
        for (what, ty) in ["weight", "bias"].into_iter().zip(&inputs[1..]) {
            if ty.dims != [x.columns()] {
                return refuse!(self, "{what} is {ty}, not [{}] as for {x}", x.columns());
            }
        }
        Ok(vec![x.clone(), Type::f32(&[x.rows(), 2])])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (x, weight, statistics) = (node.inputs[0], node.inputs[1], node.outputs[1]);
        gradients.emit(NormGrad(self.kind), &[x, weight, statistics, g], &[x])?;
        let (op, parameters) = (NormParameterGrad(self.kind), &node.inputs[1..]);
        gradients.emit(op, &[x, statistics, g], parameters)
    }
}

impl Op for NormGrad {
    op! {
        name(self) self.0.either("layer_norm_grad", "rms_norm_grad");
        formats [Either, Full, Full, Either] => [Either]; accumulates;
        kernels(self) cpu::run_gradient(self.0.is_centred()), cuda::gradient(self.0);
        flops(self, inputs) self.0.either(15, 8) * inputs[0].len() as u64;
    }
}

impl NormParameterGrad {
    /// Number of parameters.
    fn count(&self) -> usize {
        self.0.either(2, 1)
    }
}

impl Op for NormParameterGrad {
    op! {
        name(self) self.0.either("layer_norm_parameter_grad", "rms_norm_weight_grad");
        formats [Either, Full, Either] => [Full]; accumulates;
        results(self, inputs) vec![Type::f32(&[inputs[0].columns()]); self.count()];
        kernels(self)
            cpu::run_parameter_gradient(self.0.is_centred()), cuda::parameter_gradient(*self);
        scratch_bytes(self, inputs)
            4 * self.count() * row_chunks(inputs[0]) * inputs[0].columns();
        flops(self, inputs) self.0.either(5, 3) * inputs[0].len() as u64;
    }
}

#[cfg(test)]
mod tests;
