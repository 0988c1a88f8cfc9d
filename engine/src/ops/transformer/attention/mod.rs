//! `y = softmax(scale q k^T) v` for each head of `size` columns; `scale` is `1 / sqrt(size)` by
//! default. With `causal`, a query attends to the keys up to its own position, and with a `window`
//! of `w` to the last `w` of those, its own included.
//!
//! Heads may share keys and values (grouped queries: query head `h` reads key head
//! `h / (heads / kv_heads)`), and the first columns of each head of `q` and `k`, or all, may be
//! rotated by their positions ([`RotaryTable`](super::RotaryTable)). Neither is materialised:
//! shared heads are read in place, and rotated ones are in scratch, one head at a time.
//!
//! For one head, with `s` the scaled scores, `p` the probabilities, `g` the gradient of `y`, and
//! rows as queries:
//!
//! ```text
//! v: p^T g       p: g v^T       s: p * (dp - sum over keys of p dp)      q: scale ds k
//!                                                                        k: scale ds^T q
//! sum over keys of p dp = sum over columns of g y,   since y = p v and dp = g v^T
//! ```
//!
//! A masked key has `p = 0`, so it gets no gradient.
//!
//! Shared keys and values get the sum over their query heads. A rotation `R` is orthogonal, so the
//! gradient of `x` is `R^T` times that of `R x`, the rotation backwards; columns that are not
//! rotated pass through.
//!
//! With [documents](super::Documents), a query sees the keys of its own document alone.
//!
//! Both directions run in blocks of at most [`BLOCK`] queries, and compute nothing beyond the
//! diagonal's blocks, before the window, or, on the CPU, outside the documents of a block: no
//! `[t, t]` matrix is stored. The log-sum-exp of each row of scores is kept, from which the
//! gradient computes the probabilities again: `p = e^(s - lse)`.

mod cpu;
mod cuda;
mod tiles;

use crate::cpu::pool::{chunks, rows_with_scratch};
use crate::op::{Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::ops::indices;
use crate::value::{Type, Value};

/// Queries of a block.
const BLOCK: usize = 64;

/// The heads of an attention, and their mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// Number of query heads.
    pub count: usize,
    /// Number of key and value heads; divides `count`.
    pub kv: usize,
    /// Whether a query attends to no position after its own.
    pub causal: bool,
    /// Most keys that a causal query attends to, its own the last of them; `None` for all.
    pub window: Option<usize>,
    /// Factor of the scores; `None` for `1 / sqrt(size)`.
    pub scale: Option<f32>,
}

impl Heads {
    /// Heads whose queries attend to every position.
    pub fn full(count: usize, kv: usize) -> Self {
        Self {
            count,
            kv,
            causal: false,
            window: None,
            scale: None,
        }
    }

    /// Heads whose queries attend to the positions up to their own.
    pub fn causal(count: usize, kv: usize) -> Self {
        Self {
            causal: true,
            ..Self::full(count, kv)
        }
    }
}

/// Layout of queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub enum Qkv {
    /// In three values: `q` f32 `[b, t, heads size]`, `k` and `v` f32 `[b, t, kv_heads size]`.
    Apart([Value; 3]),
    /// In one, f32 `[b, t, 3 heads size]`: all of `q`, all of `k`, all of `v`.
    Joined(Value),
    /// In one, f32 `[b, t, 3 heads size]`: `q`, `k` and `v` of the first head, then those of the
    /// next.
    ByHead(Value),
}

/// [`Qkv`] without the values.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Apart,
    Joined,
    ByHead,
}

/// Self-attention, to f32 `[b, t, heads size]` and the log-sum-exps `[b, heads, t]`. Inputs: the
/// values of a [`Qkv`], then the rotary table, if `q` and `k` are rotated, and the documents, if
/// there are any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    heads: Heads,
    layout: Layout,
    /// Columns of a head of `q` and `k` that are rotated.
    turned: usize,
    /// Whether documents are apart.
    documents: bool,
}

/// Gradient of [`Attention`], from its operands, `y`, the log-sum-exps and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct AttentionGrad(Attention);

impl Builder {
    /// Multi-head self-attention to f32 `[b, t, heads size]`. With `rotary`, f32 `[t, turned]` from
    /// [`Builder::rotary_table`], the first `turned` columns of each head of `q` and `k` are
    /// rotated first. Heads that are causal become full ones where [masks are
    /// removed](Builder::remove_masks).
    ///
    /// # Errors
    ///
    /// When shapes do not fit, key heads do not divide query heads, or a window is given for heads
    /// that are not causal.
    pub fn attention(&mut self, qkv: Qkv, heads: Heads, rotary: Option<Value>) -> Result<Value> {
        self.attention_in_documents(qkv, heads, rotary, None)
    }

    /// The same, in which a query sees no key of another document. Numbers of documents, f32
    /// `[b, t]` as from [`Builder::documents`], do not fall along a row.
    ///
    /// # Errors
    ///
    /// As [`Builder::attention`].
    pub fn attention_in_documents(
        &mut self,
        qkv: Qkv,
        heads: Heads,
        rotary: Option<Value>,
        documents: Option<Value>,
    ) -> Result<Value> {
        let (layout, values) = match &qkv {
            Qkv::Apart(values) => (Layout::Apart, &values[..]),
            Qkv::Joined(value) => (Layout::Joined, std::slice::from_ref(value)),
            Qkv::ByHead(value) => (Layout::ByHead, std::slice::from_ref(value)),
        };
        let heads = if heads.causal && !self.keeps_mask() {
            Heads {
                causal: false,
                window: None,
                ..heads
            }
        } else {
            heads
        };
        let rotary = rotary.filter(|&table| self.ty(table).columns() > 0);
        let op = Attention {
            heads,
            layout,
            turned: rotary.map_or(0, |table| self.ty(table).columns()),
            documents: documents.is_some(),
        };
        let operands = values.iter().copied().chain(rotary).chain(documents);
        let operands: Vec<Value> = operands.collect();
        self.op1(op, &operands)
    }
}

/// Sizes of one attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    positions: usize,
    /// Columns of a head.
    size: usize,
    /// Query heads for each key head.
    group: usize,
}

/// Columns of the heads of one of `q`, `k` and `v` within a row.
#[derive(Debug, Clone, Copy)]
struct Columns {
    /// Column of the first head.
    first: usize,
    /// Columns from one head to the next.
    step: usize,
    /// Columns of the whole row.
    stride: usize,
}

impl Sizes {
    /// Batch rows times key heads: the independent units of work.
    fn units(&self, op: &Attention) -> usize {
        self.batch * op.heads.kv
    }

    /// f32s of scratch for a chunk of the forward kernel, and of the gradient.
    fn scratch(&self, op: &Attention) -> [usize; 2] {
        let scores = BLOCK * self.positions;
        let turned = if op.turned > 0 {
            (BLOCK + self.positions) * self.size
        } else {
            0
        };
        [scores + turned, 2 * (scores + turned)]
    }
}

impl Attention {
    /// Indices of the rotary table and of the documents, if there are any.
    fn table_and_documents(&self) -> [Option<usize>; 2] {
        indices(self.operands(), [self.turned > 0, self.documents])
    }

    /// Number of operands before `y`, the log-sum-exps and the gradient.
    fn all_operands(&self) -> usize {
        self.operands() + self.table_and_documents().into_iter().flatten().count()
    }

    /// Whether `q`, `k` and `v` are in one operand.
    fn is_fused(&self) -> bool {
        self.layout != Layout::Apart
    }

    /// Number of operands that hold `q`, `k` and `v`.
    fn operands(&self) -> usize {
        if self.is_fused() { 1 } else { 3 }
    }

    /// Indices of the operands, or of their gradients, that hold `q`, `k` and `v`.
    fn indices(&self) -> [usize; 3] {
        [0, 1, 2].map(|of| of % self.operands())
    }

    fn sizes(&self, inputs: &[&Type]) -> Sizes {
        let dims = &inputs[0].dims;
        Sizes {
            batch: dims[0],
            positions: dims[1],
            size: dims[2] * self.operands() / 3 / self.heads.count,
            group: self.heads.count / self.heads.kv,
        }
    }

    /// Columns of the heads of `q`, `k` and `v`, with `size` columns each.
    fn columns(&self, size: usize) -> [Columns; 3] {
        let (d, kv) = (self.heads.count * size, self.heads.kv * size);
        let (first, step, stride) = match self.layout {
            Layout::Apart => ([0; 3], size, [d, kv, kv]),
            Layout::Joined => ([0, d, 2 * d], size, [3 * d; 3]),
            Layout::ByHead => ([0, size, 2 * size], 3 * size, [3 * d; 3]),
        };
        [0, 1, 2].map(|of| Columns {
            first: first[of],
            step,
            stride: stride[of],
        })
    }

    /// Factor of the scores.
    fn scale(&self, size: usize) -> f32 {
        self.heads.scale.unwrap_or(1.0 / (size as f32).sqrt())
    }

    fn check(&self, inputs: &[&Type]) -> Result<()> {
        let refuse =
            |promised: String| refuse!("attention", "needs {promised}, found {}", listed(inputs));
        let (heads, kv_heads) = (self.heads.count, self.heads.kv);
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refuse(format!("{kv_heads} key heads to divide {heads} heads"));
        }
        if self.heads.window.is_some_and(|window| window == 0)
            || self.heads.window.is_some() && !self.heads.causal
        {
            return refuse("a window of at least one key, of causal heads".to_owned());
        }
        let fused = self.is_fused();
        if fused && heads != kv_heads {
            return refuse(format!(
                "as many key heads as heads, {heads}, where they are in one value"
            ));
        }
        let parts = if fused { 3 } else { 1 };
        let [b, t, columns] = inputs[0].dims[..] else {
            return refuse("[b, t, columns]".to_owned());
        };
        if columns == 0 || !columns.is_multiple_of(parts * heads) {
            return refuse(if fused {
                format!("f32 [b, t, 3 d] with d a multiple of {heads} heads")
            } else {
                format!("q f32 [b, t, d] with d a multiple of {heads} heads")
            });
        }
        let size = columns / parts / heads;
        let shared = Type::f32(&[b, t, kv_heads * size]);
        if !fused && (*inputs[1] != shared || *inputs[2] != shared) {
            return refuse(format!("k and v {shared}"));
        }
        let [table, documents] = self.table_and_documents();
        if let Some(table) = table
            && (self.turned % 2 == 1
                || self.turned > size
                || inputs[table].dims != [t, self.turned])
        {
            return refuse(format!(
                "a rotary table [{t}, n] of an even number of columns up to {size}"
            ));
        }
        if let Some(documents) = documents
            && *inputs[documents] != Type::f32(&[b, t])
        {
            return refuse(format!("documents f32 [{b}, {t}]"));
        }
        Ok(())
    }

    /// Multiplications and additions of so many products of `[t, size]` by `[size, t]`.
    fn work(&self, products: usize, inputs: &[&Type]) -> u64 {
        let sizes = self.sizes(inputs);
        let positions = sizes.positions;
        let seen = if self.heads.causal {
            positions.div_ceil(2)
        } else {
            positions
        };
        let seen = seen.min(self.heads.window.unwrap_or(seen));
        let pairs = sizes.batch * self.heads.count * positions * seen;
        2 * (products * pairs * sizes.size) as u64
    }
}

impl Op for Attention {
    op! {
        name "attention"; formats [Either] => [Either, Full];
        kernels(self) cpu::run(self), cuda::value(self);
        flops(self, inputs) self.work(2, inputs);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.check(inputs)?;
        let (sizes, heads) = (self.sizes(inputs), self.heads.count);
        Ok(vec![
            Type::f32(&[sizes.batch, sizes.positions, heads * sizes.size]),
            Type::f32(&[sizes.batch, heads, sizes.positions]),
        ])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = self.sizes(inputs);
        let units = sizes.units(self);
        4 * chunks(units, rows_with_scratch(units)) * sizes.scratch(self)[0]
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let inputs = [node.inputs, node.outputs, &[g]].concat();
        let targets = &node.inputs[..self.operands()];
        gradients.emit(AttentionGrad(*self), &inputs, targets)
    }
}

impl Op for AttentionGrad {
    op! {
        name "attention_grad"; formats [Either] => [Either]; accumulates;
        kernels(self) cpu::run_gradient(&self.0), cuda::gradient(&self.0);
        flops(self, inputs) self.0.work(5, inputs);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let operands = &inputs[..self.0.operands()];
        Ok(operands.iter().map(|&ty| ty.clone()).collect())
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let sizes = self.0.sizes(inputs);
        let units = sizes.units(&self.0);
        4 * chunks(units, rows_with_scratch(units)) * sizes.scratch(&self.0)[1]
    }
}

#[cfg(test)]
mod tests;
