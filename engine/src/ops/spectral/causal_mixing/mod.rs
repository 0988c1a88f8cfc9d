//! A long causal convolution of each column: `y_t = sum_{l <= min(t, L - 1)} h_l x_{t - l} + bias`,
//! with a kernel `h` of `L` lags.
//!
//! With `g` the gradient of `y`, each for one column:
//!
//! ```text
//! x_s: sum_{l < min(L, T - s)} h_l g_{s + l}     h_l: sum_{b, s < T - l} x_s g_{s + l}
//! bias: sum_{b, t} g_t
//! ```
//!
//! All three sums over positions are of one form, `sum_j a_|i - j| b_j`, over `j <= i` for the
//! value and over `j >= i` for the gradients. They are taken directly and in the order of `j`, so a
//! result has the same bits whatever follows and however long the sequence is. A transform would
//! cost less for many thousand positions, but would round later positions into earlier ones.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::ops::SumRows;
use crate::value::{Type, Value};

/// Causal convolution of the columns of f32 `[b, t, d]`, or its gradient to these. Inputs: `x` or
/// `g`, `h` f32 `[lags, d]`, and the bias `[d]` of a convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CausalMixing {
    /// Whether sums are over a position and those after it, as in the gradient.
    is_ahead: bool,
}

/// Gradient of [`CausalMixing`] to `h`, f32 `[lags, d]`, from `x` and `g`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CausalMixingKernelGrad {
    lags: usize,
}

const BACK: CausalMixing = CausalMixing { is_ahead: false };
const AHEAD: CausalMixing = CausalMixing { is_ahead: true };

impl Builder {
    /// `y_t = sum_l h_l x_{t - l} + bias` for each column of `x`, f32 `[b, t, d]`, with a kernel
    /// `h`, f32 `[lags, d]`, of fewer or more lags than there are positions, and a bias `[d]`. A
    /// result depends on no later position, bit for bit. The gradient flows to all three. It
    /// becomes [circular](Self::circular_mixing) where [masks are removed](Self::remove_masks).
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn causal_mixing(&mut self, x: Value, h: Value, bias: Value) -> Result<Value> {
        if self.keeps_mask() {
            self.op1(BACK, &[x, h, bias])
        } else {
            self.circular_mixing(x, h, bias)
        }
    }

    /// `y_t = sum_{l < T} h_l x_{(t - l) mod T} + bias` for each column of `x`, f32 `[b, T, d]`,
    /// with a kernel and a bias as in [`causal_mixing`](Self::causal_mixing): every result depends
    /// on every position. It is the second half of a causal convolution of `x` twice. The gradient
    /// flows to all three.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn circular_mixing(&mut self, x: Value, h: Value, bias: Value) -> Result<Value> {
        BACK.outputs(&[x, h, bias].map(|value| self.ty(value)))?;
        let Sizes {
            batch,
            positions,
            lags,
            columns,
        } = Sizes::new(self.ty(x), self.ty(h).dims[0]);
        let len = positions * columns;
        let rows = self.reshape(x, &[batch, len])?;
        let twice = self.concatenate(&[rows, rows])?;
        let twice = self.reshape(twice, &[batch, 2 * positions, columns])?;
        let h = if lags > positions {
            let row = self.reshape(h, &[lags * columns])?;
            let first = self.slice(row, 0..len)?;
            self.reshape(first, &[positions, columns])?
        } else {
            h
        };
        let y = self.op1(BACK, &[twice, h, bias])?;
        let rows = self.reshape(y, &[batch, 2 * len])?;
        let second = self.slice(rows, len..2 * len)?;
        self.reshape(second, &[batch, positions, columns])
    }
}

/// Sizes of one convolution.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    lags: usize,
    columns: usize,
}

impl Sizes {
    /// Of `x`, f32 `[b, t, d]`.
    fn new(x: &Type, lags: usize) -> Self {
        Self {
            batch: x.dims[0],
            positions: x.dims[1],
            lags,
            columns: x.dims[2],
        }
    }

    /// Multiplications and additions of one run.
    fn flops(self) -> u64 {
        let lags = self.lags.min(self.positions);
        let pairs = lags * self.positions - lags * lags.saturating_sub(1) / 2;
        2 * (self.batch * self.columns * pairs) as u64
    }
}

impl Op for CausalMixing {
    op! {
        name(self) if self.is_ahead { "causal_mixing_grad" } else { "causal_mixing" };
        formats [Either, Full] => [Either]; accumulates(self) self.is_ahead;
        kernels(self) cpu::run(*self), cuda::value(*self);
        flops(self, inputs) Sizes::new(inputs[0], inputs[1].dims[0]).flops();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.is_ahead {
            return Ok(vec![inputs[0].clone()]);
        }
        let [x, h, bias] = inputs else {
            unreachable!("three operands");
        };
        let fits = match (&x.dims[..], &h.dims[..]) {
            (&[b, t, d], &[lags, _]) => {
                d > 0
                    && **x == Type::f32(&[b, t, d])
                    && **h == Type::f32(&[lags, d])
                    && **bias == Type::f32(&[d])
            }
            _ => false,
        };
        if !fits {
            return refuse!(
                self,
                "needs f32 [b, t, d], [lags, d] and [d], found {x}, {h}, {bias}"
            );
        }
        Ok(vec![(*x).clone()])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let [x, h, bias] = *node.inputs else {
            return refuse!(self, "has no gradient");
        };
        let h_ty = gradients.builder().ty(h);
        let (lags, dims) = (h_ty.dims[0], vec![h_ty.columns()]);
        gradients.emit(AHEAD, &[g, h], &[x])?;
        gradients.emit(CausalMixingKernelGrad { lags }, &[x, g], &[h])?;
        gradients.emit(SumRows { dims }, &[g], &[bias])
    }
}

impl Op for CausalMixingKernelGrad {
    op! {
        name "causal_mixing_kernel_grad"; formats [Either] => [Full]; accumulates;
        results(self, inputs) vec![Type::f32(&[self.lags, inputs[0].columns()])];
        kernels(self) cpu::run_kernel_gradient(self.lags), cuda::kernel_gradient(self.lags);
        flops(self, inputs) Sizes::new(inputs[0], self.lags).flops();
    }
}
