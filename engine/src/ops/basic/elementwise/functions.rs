//! Element-wise functions.

use super::{Elementwise, GeluKind};
use crate::op::{Builder, Result, refuse};
use crate::value::Value;

impl Builder {
    /// `a + b`, f32 of one shape; the gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.op1(Elementwise::sum(2), &[a, b])
    }

    /// `a * b`, f32 of one shape; the gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn mul(&mut self, a: Value, b: Value) -> Result<Value> {
        if self.ty(a) != self.ty(b) {
            return refuse!("mul", "{} and {} differ", self.ty(a), self.ty(b));
        }
        self.elementwise(["mul", "mul_grad"], [a, b], |[a, b]| a * b)
    }

    /// `x * factor`, f32 of any shape and a scalar; the gradient flows to both.
    ///
    /// # Errors
    ///
    /// When `factor` is no scalar.
    pub fn scale(&mut self, x: Value, factor: Value) -> Result<Value> {
        if !self.ty(factor).dims.is_empty() {
            return refuse!(
                "scale",
                "the factor must be a scalar, found {}",
                self.ty(factor)
            );
        }
        self.elementwise(["scale", "scale_grad"], [x, factor], |[x, factor]| {
            x * factor
        })
    }

    /// `max(x, 0)`, f32 of any shape; NaN stays NaN. The gradient flows if `x > 0`, and not at 0,
    /// as in PyTorch.
    ///
    /// # Errors
    ///
    /// When `x` is no f32.
    pub fn relu(&mut self, x: Value) -> Result<Value> {
        self.elementwise(["relu", "relu_grad"], [x], |[x]| x.relu())
    }

    /// `x / (1 + e^-x)`, f32 of any shape.
    ///
    /// # Errors
    ///
    /// When `x` is no f32.
    pub fn silu(&mut self, x: Value) -> Result<Value> {
        self.elementwise(["silu", "silu_grad"], [x], |[x]| x.silu())
    }

    /// GELU of each element, `x Phi(x)` or GPT-2's approximation of it; f32 of any shape.
    ///
    /// # Errors
    ///
    /// When `x` is no f32.
    pub fn gelu(&mut self, x: Value, kind: GeluKind) -> Result<Value> {
        self.elementwise(["gelu", "gelu_grad"], [x], |[x]| x.gelu(kind))
    }

    /// `silu(gate) * up`, f32 of one shape; the gradient flows to both. Shazeer, "GLU variants
    /// improve transformer", 2020.
    ///
    /// # Errors
    ///
    /// When the shapes differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        let names = ["swiglu", "swiglu_grad"];
        self.elementwise(names, [gate, up], |[gate, up]| gate.silu() * up)
    }

    /// f32 `dims`, every element `value`.
    ///
    /// # Errors
    ///
    /// Never: it has no inputs.
    pub fn constant(&mut self, value: f32, dims: &[usize]) -> Result<Value> {
        self.op1(Elementwise::constant(value, dims), &[])
    }

    /// Mean of all elements, a scalar; the gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// When there is no element.
    pub fn mean(&mut self, x: Value) -> Result<Value> {
        let ty = self.ty(x);
        if ty.is_empty() {
            return refuse!("mean", "{ty} has no element");
        }
        let factor = 1.0 / ty.len() as f64;
        self.elementwise_sum(["mean", "mean_grad"], factor, [x], |[x]| x)
    }

    /// Mean over all elements of the squared difference of two f32 of one shape, to a scalar. The
    /// gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn mse(&mut self, prediction: Value, target: Value) -> Result<Value> {
        let (ty, other) = (self.ty(prediction), self.ty(target));
        if ty != other {
            return refuse!("mse", "prediction {ty} and target {other} differ");
        }
        let factor = 1.0 / ty.len() as f64;
        let values = [prediction, target];
        self.elementwise_sum(["mse", "mse_grad"], factor, values, |[p, t]| {
            (p - t).square()
        })
    }

    /// Sum of the squares of all elements, a scalar; the gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// When `x` is no f32.
    pub fn sum_squares(&mut self, x: Value) -> Result<Value> {
        let names = ["sum_squares", "sum_squares_grad"];
        self.elementwise_sum(names, 1.0, [x], |[x]| x.square())
    }
}
