//! Attention with the scores themselves as weights: `y_i = s sum_{j <= i} (q_i . k_j) v_j` for each
//! head of `size` columns, with `s = 1 / sqrt(size)`. It is not divided by a sum of weights.
//!
//! With `S_i = sum_{j <= i} k_j v_j^T`, `y_i = s q_i^T S_i`: `size^2` numbers hold all earlier
//! positions. With `g` the gradient of `y`,
//!
//! ```text
//! q_i: s sum_{j <= i} (g_i . v_j) k_j
//! k_j: s sum_{i >= j} (v_j . g_i) q_i        v_j: s sum_{i >= j} (k_j . q_i) g_i
//! ```
//!
//! so each gradient is the same op on other operands: the first towards the past, the others
//! towards the future. A device takes 32 positions at a time: their scores directly, and the state
//! of all positions before them.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::pool::{chunks, rows_with_scratch};
use crate::op::{Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::value::{Type, Value};

/// Attention without a softmax, of `q`, `k` and `v`, f32 `[b, t, heads size]` each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearAttention {
    heads: usize,
    /// Whether a query attends to its own position and those after it, rather than before it.
    is_ahead: bool,
}

impl Builder {
    /// `y_i = sum_{j <= i} (q_i . k_j) v_j / sqrt(size)` for each head, f32 `[b, t, heads size]`
    /// from three of this shape. The gradient flows to all three. The sum is over all `j` where
    /// [masks are removed](Builder::remove_masks).
    ///
    /// # Errors
    ///
    /// When the shapes differ, or the columns are no multiple of the heads.
    pub fn linear_attention(&mut self, qkv: [Value; 3], heads: usize) -> Result<Value> {
        let [back, ahead] = [false, true].map(|is_ahead| LinearAttention { heads, is_ahead });
        let y = self.op1(back, &qkv)?;
        if self.keeps_mask() {
            return Ok(y);
        }
        let later = self.op1(ahead, &qkv)?;
        // Both have the term of a position itself, which is the whole result of a sequence of one.
        let dims = self.ty(y).dims.clone();
        let alone = [dims[0] * dims[1], 1, dims[2]];
        let mut own = qkv;
        for value in &mut own {
            *value = self.reshape(*value, &alone)?;
        }
        let own = self.op1(back, &own)?;
        let own = self.reshape(own, &dims)?;
        let names = ["every_key", "every_key_grad"];
        self.elementwise(names, [y, later, own], |[y, later, own]| y + later - own)
    }
}

/// Sizes of one attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    heads: usize,
    /// Columns of a head.
    size: usize,
}

impl Sizes {
    /// Batch rows times heads: the independent units of work.
    fn units(self) -> usize {
        self.batch * self.heads
    }
}

impl LinearAttention {
    fn sizes(self, q: &Type) -> Sizes {
        Sizes {
            batch: q.dims[0],
            positions: q.dims[1],
            heads: self.heads,
            size: q.dims[2] / self.heads,
        }
    }
}

impl Op for LinearAttention {
    op! {
        name "linear_attention"; formats [Either] => [Either]; accumulates;
        kernels(self) cpu::run(*self), cuda::value(*self);
        flops(self, inputs) 4 * (inputs[0].len() * self.sizes(inputs[0]).size) as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let q = inputs[0];
        let fits = match q.dims[..] {
            [b, t, d] => {
                d > 0
                    && self.heads > 0
                    && d.is_multiple_of(self.heads)
                    && inputs.iter().all(|ty| **ty == Type::f32(&[b, t, d]))
            }
            _ => false,
        };
        if !fits {
            let (heads, found) = (self.heads, listed(inputs));
            return refuse!(
                self,
                "needs three f32 [b, t, d] with d a multiple of {heads} heads, found {found}"
            );
        }
        Ok(vec![q.clone()])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = self.sizes(inputs[0]);
        let units = sizes.units();
        4 * chunks(units, rows_with_scratch(units)) * (sizes.size + 1) * sizes.size
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let [q, k, v] = [0, 1, 2].map(|at| node.inputs[at]);
        let back = Self {
            is_ahead: !self.is_ahead,
            ..*self
        };
        gradients.emit(*self, &[g, v, k], &[q])?;
        gradients.emit(back, &[v, g, q], &[k])?;
        gradients.emit(back, &[k, q, g], &[v])
    }
}
