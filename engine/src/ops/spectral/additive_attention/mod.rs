//! Attention whose scores are those of a network with one hidden layer, after Bahdanau et al.,
//! "Neural machine translation by jointly learning to align and translate", 2015. With causal
//! `i >= j`, for each head:
//!
//! ```text
//! alpha_i = q_i + c_i     kappa_j = k_j + d_j     (c and d are shared by the heads)
//! x_ij = w . silu(alpha_i + kappa_j) + beta       l_ij = tanh(x_ij / 2)
//! p_ij = e^(scale l_ij) / n_i                     n_i = sum_j e^(scale l_ij)
//! y_i = sum_j p_ij v_j
//! ```
//!
//! Scores lie within `scale`, so no maximum is subtracted: f32 holds their powers and sums of those
//! for a `scale` of up to 75.
//!
//! With `g` the gradient of `y`, and `s(z) = 1 / (1 + e^-z)`:
//!
//! ```text
//! r_ij = p_ij (g_i . v_j - g_i . y_i)             since sum_j p_ij g_i . v_j = g_i . y_i
//! x_ij: u_ij = r_ij scale (1 - l_ij^2) / 2
//! alpha_i: w * sum_j u_ij silu'(z_ij)             silu'(z) = s(z) + z s(z) (1 - s(z))
//! kappa_j: w * sum_i u_ij silu'(z_ij)             z_ij = alpha_i + kappa_j
//! w: sum u_ij silu(z_ij)      beta: sum u_ij      scale: sum r_ij l_ij      v_j: sum_i p_ij g_i
//! ```
//!
//! The hidden layer of all pairs is never stored: both directions compute it again, a few keys at a
//! time. Only `y` and `n` are kept. A sum over keys has the order of the keys, so the result at a
//! position has the same bits whatever follows.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::pool::{chunks, rows_with_scratch};
use crate::op::{Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::value::{Type, Value};

/// Operands of the scores of [`Builder::additive_attention`].
#[derive(Debug, Clone, Copy)]
pub struct AdditiveScores {
    /// Parts of queries and of keys for each head, f32 `[b, t, heads, e]` each.
    pub by_head: [Value; 2],
    /// Parts of queries and of keys that the heads share, f32 `[b, t, e]` each; a bias of the
    /// hidden layer is in one of them.
    pub shared: [Value; 2],
    /// Weights of the hidden layer, f32 `[e]`.
    pub w: Value,
    /// Bias of a score, a scalar.
    pub beta: Value,
    /// Largest magnitude of a score, a scalar.
    pub scale: Value,
}

/// Attention with additive scores, to f32 `[b, t, heads size]` and the sums of the powers
/// `[b, heads, t]`. Inputs: `q`, `k`, `c`, `d`, `v`, `w`, `beta` and `scale`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdditiveAttention {
    /// Whether a query attends to no position after its own.
    causal: bool,
}

/// Gradient of [`AdditiveAttention`] to each of its inputs, from `q`, `k`, `c`, `d`, `v`, `y`, the
/// gradient of `y`, `w`, `beta`, `scale` and the sums of the powers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct AdditiveAttentionGrad(AdditiveAttention);

impl Builder {
    /// Attention to values `v`, f32 `[b, t, heads size]`, with the scores
    /// `scale tanh((w . silu(alpha_i + kappa_j) + beta) / 2)` of queries and keys: `alpha` and
    /// `kappa` are sums of a part for each head and one that the heads share. With `causal`, a
    /// query attends to the keys up to its own position, unless [masks are
    /// removed](Builder::remove_masks). The result has the shape of `v`, and the gradient flows to
    /// every operand.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn additive_attention(
        &mut self,
        scores: AdditiveScores,
        v: Value,
        causal: bool,
    ) -> Result<Value> {
        let ([q, k], [c, d]) = (scores.by_head, scores.shared);
        let AdditiveScores { w, beta, scale, .. } = scores;
        let causal = causal && self.keeps_mask();
        self.op1(
            AdditiveAttention { causal },
            &[q, k, c, d, v, w, beta, scale],
        )
    }
}

/// Sizes of one attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    heads: usize,
    /// Columns of the hidden layer.
    hidden: usize,
    /// Columns of a head of `v`.
    size: usize,
}

impl Sizes {
    /// Of operands that fit together, `q` and `v`.
    fn new(q: &Type, v: &Type) -> Self {
        let heads = q.dims[2];
        Self {
            batch: q.dims[0],
            positions: q.dims[1],
            heads,
            hidden: q.dims[3],
            size: v.columns() / heads,
        }
    }

    /// Batch rows times heads: the independent units of work.
    fn units(&self) -> usize {
        self.batch * self.heads
    }

    /// Chunks of them.
    fn chunks(&self) -> usize {
        chunks(self.units(), rows_with_scratch(self.units()))
    }
}

impl AdditiveAttention {
    /// Silus of one run.
    fn silus(self, sizes: Sizes) -> u64 {
        let positions = sizes.positions;
        let pairs = if self.causal {
            positions * (positions + 1) / 2
        } else {
            positions * positions
        };
        (sizes.units() * pairs * sizes.hidden) as u64
    }
}

impl Op for AdditiveAttention {
    op! {
        name "additive_attention";
        // The gradient of a score is a small difference of sums over `y`.
        formats [Either, Either, Either, Either, Either, Full] => [Full];
        kernels(self) cpu::run(*self), cuda::value(*self);
        // Some 10 flops for a silu and its weight.
        flops(self, inputs) 10 * self.silus(Sizes::new(inputs[0], inputs[4]));
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let refuse = |promised: String| refuse!(self, "needs {promised}, found {}", listed(inputs));
        let [b, t, heads, hidden] = inputs[0].dims[..] else {
            return refuse("queries f32 [b, t, heads, e]".to_owned());
        };
        let by_head = Type::f32(&[b, t, heads, hidden]);
        let shared = Type::f32(&[b, t, hidden]);
        let expected = [&by_head, &by_head, &shared, &shared];
        if heads == 0 || hidden == 0 || inputs[..4] != expected {
            return refuse(format!("queries and keys {by_head}, shared parts {shared}"));
        }
        let v = inputs[4];
        let size = v.columns() / heads;
        if size == 0 || *v != Type::f32(&[b, t, heads * size]) {
            return refuse(format!("v f32 [{b}, {t}, columns] for {heads} heads"));
        }
        if inputs[5..] != [&Type::f32(&[hidden]), &Type::scalar(), &Type::scalar()] {
            return refuse(format!("f32 [{hidden}] and two scalars"));
        }
        Ok(vec![v.clone(), Type::f32(&[b, heads, t])])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = Sizes::new(inputs[0], inputs[4]);
        4 * sizes.chunks() * cpu::scratch(sizes)
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let [q, k, c, d, v, w, beta, scale] = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| node.inputs[at]);
        let [y, sums] = [0, 1].map(|at| node.outputs[at]);
        let inputs = [q, k, c, d, v, y, g, w, beta, scale, sums];
        gradients.emit(AdditiveAttentionGrad(*self), &inputs, node.inputs)
    }
}

impl Op for AdditiveAttentionGrad {
    op! {
        name "additive_attention_grad";
        formats [Either, Either, Either, Either, Either, Full, Either, Full]
            => [Either, Either, Either, Either, Either, Full];
        kernels(self) cpu::run_gradient(self.0), cuda::gradient(self.0);
        // The silu again, its slope, and three sums.
        flops(self, inputs) 20 * self.0.silus(Sizes::new(inputs[0], inputs[4]));
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let operands = inputs[..5].iter().chain(&inputs[7..10]);
        Ok(operands.map(|&ty| ty.clone()).collect())
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = Sizes::new(inputs[0], inputs[4]);
        4 * (sizes.chunks() * cpu::gradient_scratch(sizes) + sizes.units() * (sizes.hidden + 2))
    }
}
