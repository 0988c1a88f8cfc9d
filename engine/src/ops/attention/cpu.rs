use std::ops::Range;

use super::{Attention, BLOCK, backward_chunk, forward_chunk};
use crate::cpu::gemm::{Shape, Strided, block};
use crate::cpu::math::{dot, exp, ln, vectorised};
use crate::cpu::reduce::{max, sum_over};
use crate::cpu::{Frame, PerChunk, Rows};

/// One of queries, keys or values of one batch row and head: `[t, size]`, rows `stride` apart.
#[derive(Clone, Copy)]
struct Head<'a> {
    values: &'a [f32],
    stride: usize,
}

impl<'a> Head<'a> {
    fn from(self, position: usize) -> Strided<'a> {
        Strided::rows(&self.values[position * self.stride..], self.stride)
    }
}

/// Queries at `rows` and the keys that they may see, those before `keys`.
struct Block {
    rows: Range<usize>,
    keys: usize,
    size: usize,
    causal: bool,
}

impl Block {
    fn new(op: &Attention, rows: Range<usize>, positions: usize, size: usize) -> Self {
        let keys = if op.causal { rows.end } else { positions };
        Self {
            rows,
            keys,
            size,
            causal: op.causal,
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    /// Keys that the query `row` of the block sees.
    fn seen(&self, row: usize) -> usize {
        if self.causal {
            self.rows.start + row + 1
        } else {
            self.keys
        }
    }

    /// Products of queries with something of each key, `[rows, keys]`.
    fn scores(&self, scale: f32, q: Strided<'_>, k: Strided<'_>, out: &mut [f32]) {
        let shape = Shape {
            m: self.rows.len(),
            n: self.keys,
            k: self.size,
        };
        block(shape, scale, (q, k.t()), (out, self.keys, false));
    }

    /// Sums of something of each key by weights `[rows, keys]`.
    fn by_query(&self, weights: &[f32], k: Strided<'_>, out: (&mut [f32], usize, bool)) {
        let shape = Shape {
            m: self.rows.len(),
            n: self.size,
            k: self.keys,
        };
        block(shape, 1.0, (Strided::rows(weights, self.keys), k), out);
    }

    /// Adds to each key the sum of something of each query by weights `[rows, keys]`.
    fn add_by_key(&self, weights: &[f32], q: Strided<'_>, out: (&mut [f32], usize)) {
        let shape = Shape {
            m: self.keys,
            n: self.size,
            k: self.rows.len(),
        };
        let weights = Strided::rows(weights, self.keys).t();
        block(shape, 1.0, (weights, q), (out.0, out.1, true));
    }
}

pub(super) fn run(op: &Attention, frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let (lse, _) = frame.output(1);
    let scratch = frame.scratch();
    let qkv = frame.input(0);
    let dims = &frame.ty(0).dims;
    let (positions, d) = (dims[1], dims[2] / 3);
    let size = d / op.heads;
    let rows = dims[0] * positions;
    let parts = (
        Rows(out, d),
        Rows(lse, op.heads),
        PerChunk(scratch, BLOCK * positions),
    );
    frame
        .pool
        .run(rows, forward_chunk(rows), parts, |range, parts| {
            let (out, lse, scratch) = parts;
            let mut start = range.start;
            // Blocks end where their batch row does.
            while start < range.end {
                let first = start - start % positions;
                let end = range.end.min(start + BLOCK).min(first + positions);
                let block = Block::new(op, start - first..end - first, positions, size);
                let probabilities = &mut scratch.0[..block.rows.len() * block.keys];
                let at = start - range.start;
                for head in 0..op.heads {
                    let part = |index: usize| Head {
                        values: &qkv[first * 3 * d + index * d + head * size..],
                        stride: 3 * d,
                    };
                    let q = part(0).from(block.rows.start);
                    block.scores(block.scale(), q, part(1).from(0), probabilities);
                    let lse = &mut lse.0[at * op.heads + head..];
                    softmax(&block, probabilities, lse, op.heads);
                    let out = (&mut out.0[at * d + head * size..], d, false);
                    block.by_query(probabilities, part(2).from(0), out);
                }
                start = end;
            }
        });
}

/// Scores to probabilities, in place; `lse` of row `i` goes to `lse[i * stride]`.
fn softmax(block: &Block, scores: &mut [f32], lse: &mut [f32], stride: usize) {
    vectorised(
        #[inline(always)]
        || {
            for (row, scores) in scores.chunks_exact_mut(block.keys).enumerate() {
                let (seen, unseen) = scores.split_at_mut(block.seen(row));
                let largest = max(seen);
                for score in seen.iter_mut() {
                    *score = exp(*score - largest);
                }
                let total = sum_over([seen], |[p]| p);
                for p in seen.iter_mut() {
                    *p /= total;
                }
                unseen.fill(0.0);
                lse[row * stride] = largest + ln(total);
            }
        },
    );
}

pub(super) fn run_gradient(op: &Attention, frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let scratch = frame.scratch();
    let (qkv, y) = (frame.input(0), frame.input(1));
    let (lse, g) = (frame.input(2), frame.input(3));
    let dims = &frame.ty(0).dims;
    let (batch, positions, d) = (dims[0], dims[1], dims[2] / 3);
    let parts = (
        Rows(out, positions * 3 * d),
        PerChunk(scratch, 2 * BLOCK * positions),
    );
    frame
        .pool
        .run(batch, backward_chunk(batch), parts, |range, parts| {
            let (out, scratch) = parts;
            if !add {
                out.0.fill(0.0);
            }
            let each = out.0.chunks_exact_mut(positions * 3 * d);
            for (b, out) in range.zip(each) {
                for head in 0..op.heads {
                    let row = BatchRow {
                        op,
                        positions,
                        d,
                        qkv: &qkv[b * positions * 3 * d..],
                        y: &y[b * positions * d..],
                        lse: &lse[b * positions * op.heads..],
                        g: &g[b * positions * d..],
                    };
                    row.gradient(head, out, scratch.0);
                }
            }
        });
}

/// What the gradient of one batch row is computed from.
struct BatchRow<'a> {
    op: &'a Attention,
    positions: usize,
    d: usize,
    qkv: &'a [f32],
    y: &'a [f32],
    lse: &'a [f32],
    g: &'a [f32],
}

impl BatchRow<'_> {
    /// Adds the gradients of one head's queries, keys and values to `out`, `[t, 3 d]`.
    fn gradient(&self, head: usize, out: &mut [f32], scratch: &mut [f32]) {
        let (d, heads) = (self.d, self.op.heads);
        let size = d / heads;
        let column = |part: usize| part * d + head * size;
        let [q, k, v] = [0, 1, 2].map(|part| Head {
            values: &self.qkv[column(part)..],
            stride: 3 * d,
        });
        let [y, g] = [self.y, self.g].map(|values| Head {
            values: &values[head * size..],
            stride: d,
        });
        let (probabilities, slopes) = scratch.split_at_mut(BLOCK * self.positions);
        for start in (0..self.positions).step_by(BLOCK) {
            let end = self.positions.min(start + BLOCK);
            let block = Block::new(self.op, start..end, self.positions, size);
            let probabilities = &mut probabilities[..block.rows.len() * block.keys];
            let slopes = &mut slopes[..block.rows.len() * block.keys];
            let (q, y, g) = (q.from(start), y.from(start), g.from(start));
            block.scores(block.scale(), q, k.from(0), probabilities);
            block.scores(1.0, g, v.from(0), slopes);
            let lse = &self.lse[start * heads + head..];
            softmax_gradient(&block, (probabilities, slopes), (lse, heads), (y, g));
            let stride = 3 * d;
            let q_out = &mut out[start * stride + column(0)..];
            block.by_query(slopes, k.from(0), (q_out, stride, true));
            block.add_by_key(slopes, q, (&mut out[column(1)..], stride));
            block.add_by_key(probabilities, g, (&mut out[column(2)..], stride));
        }
    }
}

/// Scores to probabilities and their gradients to those of the unscaled scores, in place.
fn softmax_gradient(
    block: &Block,
    (scores, slopes): (&mut [f32], &mut [f32]),
    (lse, stride): (&[f32], usize),
    (y, g): (Strided<'_>, Strided<'_>),
) {
    let scale = block.scale();
    let rows = scores
        .chunks_exact_mut(block.keys)
        .zip(slopes.chunks_exact_mut(block.keys));
    vectorised(
        #[inline(always)]
        || {
            for (row, (scores, slopes)) in rows.enumerate() {
                let y = &y.values[row * y.row..][..block.size];
                let g = &g.values[row * g.row..][..block.size];
                let mean = dot(y, g);
                let lse = lse[row * stride];
                let (seen, unseen) = scores.split_at_mut(block.seen(row));
                let (seen_slopes, unseen_slopes) = slopes.split_at_mut(block.seen(row));
                for (p, slope) in seen.iter_mut().zip(seen_slopes) {
                    *p = exp(*p - lse);
                    *slope = *p * (*slope - mean) * scale;
                }
                unseen.fill(0.0);
                unseen_slopes.fill(0.0);
            }
        },
    );
}
