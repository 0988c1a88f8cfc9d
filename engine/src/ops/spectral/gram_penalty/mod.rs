//! How far the columns of a basis are from orthogonal: with `n_k = max(|phi_k|, 1e-12)`, the norm
//! over `t`, and `q = phi / n`,
//!
//! ```text
//! G_b = q_b^T q_b [k, k]        y = 1 / (b k^2) sum_b |G_b - I|^2
//! ```
//!
//! With `E = G - I`, `u` the gradient of `y`, and `c = 4 u / (b k^2)`:
//!
//! ```text
//! q: p = c q E         phi_tk: (p_tk - q_tk sum_t q_tk p_tk) / n_k
//! sum_t q_tk p_tk = c (G E)_kk
//! ```
//!
//! The second term is that of the norm, and is absent where the norm is not above 1e-12. `G` and
//! `n` are kept. A column is compared with itself too: its entry of `E` is 0, or -1 for a column of
//! zeros.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// The least norm that a column is divided by.
const LEAST: f32 = 1e-12;

/// Mean square of the elements of `G - I`, to a scalar; the matrices `G` `[b, k, k]`; and the norms
/// `[b, k]`, 1e-12 at least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GramPenalty;

/// Gradient of [`GramPenalty`], from its input, its matrices and norms, and the gradient of its
/// result.
#[derive(Debug, Clone, Copy, PartialEq)]
struct GramPenaltyGrad;

impl Builder {
    /// Mean square of the elements of `q^T q - I` for each matrix of f32 `[b, t, k]`, whose columns
    /// are divided by their norms: a scalar, from 0 for orthogonal columns to `1 - 1 / k` for equal
    /// ones. The gradient flows to `phi`.
    ///
    /// # Errors
    ///
    /// When `phi` is not f32 `[b, t, k]`.
    pub fn gram_penalty(&mut self, phi: Value) -> Result<Value> {
        self.op1(GramPenalty, &[phi])
    }
}

/// Sizes of a basis.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    columns: usize,
}

impl Sizes {
    fn new(phi: &Type) -> Self {
        Self {
            batch: phi.dims[0],
            positions: phi.dims[1],
            columns: phi.dims[2],
        }
    }

    /// Elements of all matrices.
    fn elements(self) -> usize {
        self.batch * self.columns * self.columns
    }
}

impl Op for GramPenalty {
    op! {
        name "gram_penalty";
        kernels(self) cpu::run(), cuda::value();
        scratch_bytes(self, inputs) 4 * inputs[0].dims[0];
        flops(self, inputs) 2 * (inputs[0].len() * inputs[0].columns()) as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let ty = inputs[0];
        match ty.dims[..] {
            [b, t, k] if b > 0 && k > 0 && *ty == Type::f32(&[b, t, k]) => Ok(vec![
                Type::scalar(),
                Type::f32(&[b, k, k]),
                Type::f32(&[b, k]),
            ]),
            _ => refuse!(self, "needs f32 [b, t, k], found {ty}"),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let phi = node.inputs[0];
        let inputs = [phi, node.outputs[1], node.outputs[2], g];
        gradients.emit(GramPenaltyGrad, &inputs, &[phi])
    }
}

impl Op for GramPenaltyGrad {
    op! {
        name "gram_penalty_grad"; accumulates;
        kernels(self) cpu::run_gradient(), cuda::gradient();
        scratch_bytes(self, inputs) 4 * inputs[0].dims[0] * 3 * inputs[0].columns();
        flops(self, inputs) 2 * (inputs[0].len() * inputs[0].columns()) as u64;
    }
}
