//! `y = softmax(q k^T / sqrt(size)) v` for each head, `size = d / heads`; with `causal`, a query sees the keys up
//! to its own position.
//!
//! For one head, with `s` the scaled scores, `p` the probabilities, `g` the gradient of `y`, and rows as queries:
//!
//! ```text
//! v: p^T g       p: g v^T       s: p * (dp - sum over keys of p dp)      q: ds k / sqrt(size)
//!                                                                        k: ds^T q / sqrt(size)
//! sum over keys of p dp = sum over columns of g y,   since y = p v and dp = g v^T
//! ```
//!
//! Both directions go through blocks of at most [`BLOCK`] queries, and beyond the diagonal's blocks nothing is
//! computed: `[t, t]` exists nowhere. The log-sum-exp of each row of scores is kept, from which the gradient
//! computes the probabilities again: `p = e^(s - lse)`.

mod cpu;

use crate::builder::Builder;
use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// Queries of a block.
const BLOCK: usize = 64;
/// Every chunk has scratch of its own, so there are few.
const MOST_CHUNKS: usize = 64;

/// Self-attention from `q | k | v`, f32 `[b, t, 3 d]`, to f32 `[b, t, d]` and the log-sum-exps `[b, t, heads]`.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Number of heads, which lie side by side in each of `q`, `k` and `v`.
    pub heads: usize,
    /// Whether a query sees nothing after its own position.
    pub causal: bool,
}

/// Gradient of [`Attention`], from `q | k | v`, `y`, the log-sum-exps and the gradient of `y`.
#[derive(Debug, Clone, Copy)]
struct AttentionGrad(Attention);

impl Builder {
    /// Multi-head self-attention: f32 `[b, t, 3 d]`, whose columns are `q | k | v`, each split into heads, to
    /// f32 `[b, t, d]`.
    ///
    /// # Errors
    ///
    /// When `qkv` does not have such a shape, or `d` is no multiple of `heads`.
    pub fn attention(&mut self, qkv: Value, heads: usize, causal: bool) -> Result<Value> {
        self.op1(Attention { heads, causal }, &[qkv])
    }
}

/// Rows (of all batch rows, one after the other) of a chunk of the forward kernel.
fn forward_chunk(rows: usize) -> usize {
    rows.div_ceil(MOST_CHUNKS).next_multiple_of(BLOCK)
}

/// Batch rows of a chunk of the gradient: a key gets something from many blocks of queries.
fn backward_chunk(batch: usize) -> usize {
    batch.div_ceil(MOST_CHUNKS)
}

impl Attention {
    /// Multiplications and additions of so many products of `[t, size]` by `[size, t]`.
    fn work(self, products: usize, qkv: &Type) -> u64 {
        let (rows, positions, d) = (qkv.rows(), qkv.dims[1], qkv.columns() / 3);
        let seen = if self.causal {
            positions.div_ceil(2)
        } else {
            positions
        };
        2 * (products * rows * seen * d) as u64
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match inputs[0].dims[..] {
            [b, t, columns] if self.heads > 0 && columns % (3 * self.heads) == 0 => Ok(vec![
                Type::f32(&[b, t, columns / 3]),
                Type::f32(&[b, t, self.heads]),
            ]),
            _ => Err(BuildError::new(
                self.name(),
                format!(
                    "needs f32 [b, t, 3 d] with d a multiple of {} heads, found {}",
                    self.heads, inputs[0]
                ),
            )),
        }
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let rows = inputs[0].rows();
        4 * chunks(rows, forward_chunk(rows)) * BLOCK * inputs[0].dims[1]
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let (qkv, y, lse) = (node.inputs[0], node.outputs[0], node.outputs[1]);
        gradients.emit(AttentionGrad(*self), &[qkv, y, lse, g], &[Some(qkv)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        self.work(2, inputs[0])
    }
}

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[0].clone()])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let (batch, positions) = (inputs[0].dims[0], inputs[0].dims[1]);
        4 * chunks(batch, backward_chunk(batch)) * 2 * BLOCK * positions
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_gradient(&self.0, frame);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        self.0.work(5, inputs[0])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device, Tensor};

    use crate::builder::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    // Sums of up to 150 products of probabilities, and of 8 products in an exponent.
    const TOLERANCE: f32 = 1e-5;

    fn reference(qkv: &Tensor, heads: usize, causal: bool) -> candle_core::Result<Tensor> {
        let (b, t, columns) = qkv.dims3()?;
        let (d, size) = (columns / 3, columns / 3 / heads);
        let part = |index: usize| {
            let part = qkv.narrow(2, index * d, d)?;
            part.reshape((b, t, heads, size))?
                .transpose(1, 2)?
                .contiguous()
        };
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
        let mask: Vec<f32> = (0..t * t)
            .map(|i| if causal && i % t > i / t { -1e9 } else { 0.0 })
            .collect();
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (t, t), &Device::Cpu)?)?;
        let powers = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?
            .exp()?;
        let p = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
        p.matmul(&v)?.transpose(1, 2)?.reshape((b, t, d))
    }

    fn check(b: usize, t: usize, d: usize, heads: usize, causal: bool) {
        Oracle::new(&[random(&[b, t, 3 * d], 1)])
            .ours(|b, v| b.attention(v[0], heads, causal))
            .candle(|v| reference(&v[0], heads, causal))
            .agree(TOLERANCE);
    }

    #[test]
    fn whole_and_broken_blocks_agree_with_candle() {
        for t in [1, 2, 63, 64, 65, 150] {
            check(2, t, 12, 3, true);
            check(1, t, 8, 1, false);
        }
    }

    // 80 batch rows of 70: chunks of 128 queries and of 2 batch rows, with borders inside batch rows.
    #[test]
    fn chunks_across_batch_rows_agree_with_candle() {
        check(80, 70, 4, 2, true);
    }

    #[test]
    fn a_second_use_adds_to_the_gradient() {
        Oracle::new(&[random(&[2, 5, 12], 1)])
            .ours(|b, v| {
                let causal = b.attention(v[0], 2, true)?;
                let full = b.attention(v[0], 2, false)?;
                b.add(causal, full)
            })
            .candle(|v| reference(&v[0], 2, true)? + reference(&v[0], 2, false)?)
            .agree(TOLERANCE);
    }

    #[test]
    fn heads_that_do_not_divide_are_refused() {
        let mut b = Builder::new();
        let qkv = b.input("qkv", &Type::f32(&[2, 5, 12])).unwrap();
        assert_eq!(
            b.attention(qkv, 3, true).unwrap_err().to_string(),
            "attention: needs f32 [b, t, 3 d] with d a multiple of 3 heads, found f32 [2, 5, 12]"
        );
    }
}
