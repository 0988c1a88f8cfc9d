//! `y = softmax(q k^T / sqrt(size)) v` for each head of `size` columns; with `causal`, a query sees the keys up to its own
//! position.
//!
//! Heads may share keys and values (grouped queries: query head `h` reads key head `h / (heads / kv_heads)`), and
//! `q` and `k` may be turned by their positions first ([`RotaryTable`](super::RotaryTable)). Neither is written down: shared heads are
//! read where they are, and rotated ones live in scratch, one head at a time.
//!
//! For one head, with `s` the scaled scores, `p` the probabilities, `g` the gradient of `y`, and rows as queries:
//!
//! ```text
//! v: p^T g       p: g v^T       s: p * (dp - sum over keys of p dp)      q: ds k / sqrt(size)
//!                                                                        k: ds^T q / sqrt(size)
//! sum over keys of p dp = sum over columns of g y,   since y = p v and dp = g v^T
//! ```
//!
//! Shared keys and values get the sum over their query heads. A rotation `R` is orthogonal, so what `R x` gets
//! reaches `x` as `R^T`, a turn backwards.
//!
//! Both directions go through blocks of at most [`BLOCK`] queries, and beyond the diagonal's blocks nothing is
//! computed: `[t, t]` exists nowhere. The log-sum-exp of each row of scores is kept, from which the gradient
//! computes the probabilities again: `p = e^(s - lse)`.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either, Full};
use crate::value::{Type, Value};

/// Queries of a block.
const BLOCK: usize = 64;
/// Every chunk has scratch of its own, so there are few.
const MOST_CHUNKS: usize = 64;

/// Self-attention, to f32 `[b, t, heads size]` and the log-sum-exps `[b, heads, t]`.
///
/// From `q | k | v` in one, f32 `[b, t, 3 heads size]`, or from three: f32 `[b, t, heads size]`, and twice
/// `[b, t, kv_heads size]`; then the rotary table, if `q` and `k` are turned.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Number of query heads, which lie side by side.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Whether a query sees nothing after its own position.
    pub causal: bool,
    fused: bool,
    rotary: bool,
}

/// Gradient of [`Attention`], from its operands, `y`, the log-sum-exps and the gradient of `y`.
#[derive(Debug, Clone, Copy)]
struct AttentionGrad(Attention);

impl Builder {
    /// Multi-head self-attention: `q` f32 `[b, t, heads size]`, `k` and `v` f32 `[b, t, kv_heads size]` to f32
    /// `[b, t, heads size]`. With `rotary`, f32 `[t, size]` from [`Builder::rotary_table`], `q` and `k` are turned first.
    ///
    /// # Errors
    ///
    /// When shapes do not fit, or `kv_heads` does not divide `heads`.
    pub fn attention(
        &mut self,
        [q, k, v]: [Value; 3],
        (heads, kv_heads): (usize, usize),
        causal: bool,
        rotary: Option<Value>,
    ) -> Result<Value> {
        let op = Attention {
            heads,
            kv_heads,
            causal,
            fused: false,
            rotary: rotary.is_some(),
        };
        let operands: Vec<Value> = [q, k, v].into_iter().chain(rotary).collect();
        self.op1(op, &operands)
    }

    /// The same from one matrix whose columns are `q | k | v`, each split into as many heads: f32 `[b, t, 3 d]` to
    /// f32 `[b, t, d]`.
    ///
    /// # Errors
    ///
    /// When `qkv` does not have such a shape, or `d` is no multiple of `heads`.
    pub fn fused_attention(&mut self, qkv: Value, heads: usize, causal: bool) -> Result<Value> {
        let op = Attention {
            heads,
            kv_heads: heads,
            causal,
            fused: true,
            rotary: false,
        };
        self.op1(op, &[qkv])
    }
}

/// Sizes of one attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    /// Columns of a head.
    size: usize,
    /// Query heads of a key head.
    group: usize,
}

impl Sizes {
    /// Batch rows times key heads: what is computed by itself.
    fn units(&self, op: &Attention) -> usize {
        self.batch * op.kv_heads
    }

    /// f32s of scratch of a chunk of the forward kernel, and of the gradient.
    fn scratch(&self, op: &Attention) -> [usize; 2] {
        let scores = BLOCK * self.positions;
        let turned = if op.rotary {
            (BLOCK + self.positions) * self.size
        } else {
            0
        };
        [scores + turned, 2 * (scores + turned)]
    }
}

/// Units of a chunk.
fn chunk(units: usize) -> usize {
    units.div_ceil(MOST_CHUNKS)
}

impl Attention {
    /// Operands before `y`, the log-sum-exps and the gradient.
    fn operands(&self) -> usize {
        if self.fused { 1 } else { 3 }
    }

    fn sizes(&self, inputs: &[&Type]) -> Sizes {
        let dims = &inputs[0].dims;
        let columns = if self.fused { dims[2] / 3 } else { dims[2] };
        Sizes {
            batch: dims[0],
            positions: dims[1],
            size: columns / self.heads,
            group: self.heads / self.kv_heads,
        }
    }

    fn check(&self, inputs: &[&Type]) -> Result<()> {
        let refuse = |promised: String| {
            let found: Vec<String> = inputs.iter().map(ToString::to_string).collect();
            let found = found.join(", ");
            Err(BuildError::new(
                "attention",
                format!("needs {promised}, found {found}"),
            ))
        };
        let Self {
            heads, kv_heads, ..
        } = *self;
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refuse(format!("{kv_heads} key heads to divide {heads} heads"));
        }
        let parts = if self.fused { 3 } else { 1 };
        let [b, t, columns] = inputs[0].dims[..] else {
            return refuse("[b, t, columns]".to_owned());
        };
        if columns == 0 || !columns.is_multiple_of(parts * heads) {
            return refuse(if self.fused {
                format!("f32 [b, t, 3 d] with d a multiple of {heads} heads")
            } else {
                format!("q f32 [b, t, d] with d a multiple of {heads} heads")
            });
        }
        let size = columns / parts / heads;
        let shared = Type::f32(&[b, t, kv_heads * size]);
        if !self.fused && (*inputs[1] != shared || *inputs[2] != shared) {
            return refuse(format!("k and v {shared}"));
        }
        if self.rotary && (size % 2 == 1 || inputs[self.operands()].dims != [t, size]) {
            return refuse(format!(
                "a rotary table [{t}, {size}] of an even number of columns"
            ));
        }
        Ok(())
    }

    /// Multiplications and additions of so many products of `[t, size]` by `[size, t]`.
    fn work(&self, products: usize, inputs: &[&Type]) -> u64 {
        let Sizes {
            batch,
            positions,
            size,
            ..
        } = self.sizes(inputs);
        let seen = if self.causal {
            positions.div_ceil(2)
        } else {
            positions
        };
        2 * (products * batch * positions * seen * self.heads * size) as u64
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either, Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.check(inputs)?;
        let Sizes {
            batch,
            positions,
            size,
            ..
        } = self.sizes(inputs);
        Ok(vec![
            Type::f32(&[batch, positions, self.heads * size]),
            Type::f32(&[batch, self.heads, positions]),
        ])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = self.sizes(inputs);
        let units = sizes.units(self);
        4 * chunks(units, chunk(units)) * sizes.scratch(self)[0]
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let inputs: Vec<Value> = node.inputs.iter().chain(node.outputs).copied().collect();
        let targets: Vec<Option<Value>> = node.inputs[..self.operands()]
            .iter()
            .copied()
            .map(Some)
            .collect();
        gradients.emit(
            AttentionGrad(*self),
            &[&inputs[..], &[g]].concat(),
            &targets,
        )
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        self.work(2, inputs)
    }
}

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let operands = &inputs[..self.0.operands()];
        Ok(operands.iter().map(|&ty| ty.clone()).collect())
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = self.0.sizes(inputs);
        let units = sizes.units(&self.0);
        4 * chunks(units, chunk(units)) * sizes.scratch(&self.0)[1]
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_gradient(&self.0, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(&self.0, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        self.0.work(5, inputs)
    }
}

#[cfg(test)]
mod tests;
