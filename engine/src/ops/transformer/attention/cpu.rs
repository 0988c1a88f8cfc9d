use std::ops::Range;

use super::{Attention, BLOCK, Columns, Layout, Sizes};
use crate::cpu::bf16::Factor;
use crate::cpu::gemm::block;
use crate::cpu::math::{dot, exp, ln, vectorised};
use crate::cpu::pool::rows_with_scratch;
use crate::cpu::reduce::{max, sum_over};
use crate::cpu::shape::{Shape, Strided};
use crate::cpu::tile::{Tile, Tiles, Window};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::transformer::rotary_table::turn;
use crate::precision::Precision;

/// Layout of the batch rows and heads of an operand.
#[derive(Clone, Copy)]
struct Operand<'a> {
    values: &'a [f32],
    columns: Columns,
}

/// The operands of both kernels, and their sizes.
#[derive(Clone, Copy)]
struct Problem<'a> {
    op: &'a Attention,
    sizes: Sizes,
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    rotary: Option<&'a [f32]>,
    documents: Option<&'a [f32]>,
}

impl<'a> Problem<'a> {
    fn new(op: &'a Attention, frame: &Frame<'a>) -> Self {
        let sizes = op.sizes(&[frame.ty(0)]);
        let [of_q, of_k, of_v] = op.columns(sizes.size);
        let [q, k, v] = op.indices().map(|index| frame.input(index));
        let operand = |values, columns| Operand { values, columns };
        let [rotary, documents] = op
            .table_and_documents()
            .map(|index| index.map(|index| frame.input(index)));
        Self {
            op,
            sizes,
            q: operand(q, of_q),
            k: operand(k, of_k),
            v: operand(v, of_v),
            rotary,
            documents,
        }
    }

    /// The batch row and the key head of a unit.
    fn unit(&self, number: usize) -> [usize; 2] {
        let kv = self.op.heads.kv;
        [number / kv, number % kv]
    }

    /// Columns of one head at all positions of a batch row.
    fn head<'x>(&self, of: Operand<'x>, batch_row: usize, head: usize) -> Strided<'x> {
        let (at, row) = (of.columns, batch_row * self.sizes.positions);
        Strided::rows(
            &of.values[row * at.stride + at.first + head * at.step..],
            at.stride,
        )
    }

    /// Rows of a head, `[rows, size]`: rotated into scratch, or in place.
    fn turned<'s>(
        &self,
        head: Strided<'s>,
        rows: Range<usize>,
        scratch: &'s mut [f32],
    ) -> Strided<'s> {
        let Some(table) = self.rotary else {
            return head.from(rows.start);
        };
        let (size, turned) = (self.sizes.size, self.op.turned);
        vectorised(
            #[inline(always)]
            || {
                for (position, out) in rows.zip(scratch.chunks_exact_mut(size)) {
                    let x = head.numbers(position, size);
                    let (out, rest) = out.split_at_mut(turned);
                    let table = &table[position * turned..][..turned];
                    turn(table, &x[..turned], Output::overwrite(out), false);
                    rest.copy_from_slice(&x[turned..]);
                }
            },
        );
        Strided::rows(scratch, size)
    }

    /// `out = [out +] x` rotated backwards, where `x` is `[rows, size]`.
    fn add_turned_back(&self, first: usize, x: &[f32], out: Output<Tile<'_>>) {
        let Output { mut values, add } = out;
        let (size, turned) = (self.sizes.size, self.op.turned);
        let table = &self.rotary.expect("queries are rotated")[first * turned..];
        vectorised(
            #[inline(always)]
            || {
                let rows = x.chunks_exact(size).zip(table.chunks_exact(turned));
                for (row, (x, table)) in rows.enumerate() {
                    let (out, rest) = values.row(row).split_at_mut(turned);
                    turn(table, &x[..turned], Output::new(out, add), true);
                    Output::new(rest, add).put(x[turned..].iter().copied());
                }
            },
        );
    }
}

/// Queries at `rows` and the keys that any of them attends to.
struct Block<'a> {
    rows: Range<usize>,
    keys: Range<usize>,
    size: usize,
    causal: bool,
    window: usize,
    scale: f32,
    /// Documents of the batch row, if they are apart.
    documents: Option<&'a [f32]>,
}

/// The positions of the document of one of them.
fn document(numbers: &[f32], position: usize) -> Range<usize> {
    let own = numbers[position];
    numbers.partition_point(|&number| number < own)
        ..numbers.partition_point(|&number| number <= own)
}

impl<'a> Block<'a> {
    fn new(problem: &Problem<'a>, batch_row: usize, start: usize) -> Self {
        let (positions, size) = (problem.sizes.positions, problem.sizes.size);
        let rows = start..positions.min(start + BLOCK);
        let causal = problem.op.heads.causal;
        let window = problem.op.heads.window.unwrap_or(usize::MAX);
        let mut keys = (rows.start + 1).saturating_sub(window)..positions;
        if causal {
            keys.end = rows.end;
        }
        let documents = problem.documents;
        let documents = documents.map(|all| &all[batch_row * positions..][..positions]);
        if let Some(documents) = documents {
            keys.start = keys.start.max(document(documents, rows.start).start);
            keys.end = keys.end.min(document(documents, rows.end - 1).end);
        }
        Self {
            keys,
            rows,
            size,
            causal,
            window,
            scale: problem.op.scale(size),
            documents,
        }
    }

    /// Keys that the query `row` of the block attends to, counted from the first key of the block.
    fn seen(&self, row: usize) -> Range<usize> {
        let Range { mut start, mut end } = self.keys;
        let query = self.rows.start + row;
        if self.causal {
            end = query + 1;
            start = start.max(end.saturating_sub(self.window));
        }
        if let Some(documents) = self.documents {
            let own = document(documents, query);
            (start, end) = (start.max(own.start), end.min(own.end));
        }
        start - self.keys.start..end - self.keys.start
    }

    /// Scores `[rows, keys]` of queries and keys, or of other rows of theirs; `k` has all
    /// positions.
    fn scores(&self, scale: f32, q: Strided<'_>, k: Strided<'_>, out: &mut [f32]) {
        let shape = Shape::of([self.rows.len(), self.keys.len(), self.size]);
        let k = Factor::Matrix(k.from(self.keys.start).t());
        let out = Output::overwrite(Tile::whole(out, self.keys.len()));
        block(Precision::F32, shape, scale, q, k, out);
    }

    /// Weighted sums over keys for each query, by weights `[rows, keys]`; `k` has all positions.
    fn by_query(&self, weights: &[f32], k: Strided<'_>, out: Output<Tile<'_>>) {
        let shape = Shape::of([self.rows.len(), self.size, self.keys.len()]);
        let weights = Strided::rows(weights, self.keys.len());
        let k = Factor::Matrix(k.from(self.keys.start));
        block(Precision::F32, shape, 1.0, weights, k, out);
    }

    /// Adds to each key the weighted sum over queries, by weights `[rows, keys]`; `out` has all
    /// positions.
    fn add_by_key(&self, weights: &[f32], q: Strided<'_>, mut out: Tile<'_>) {
        let shape = Shape::of([self.keys.len(), self.size, self.rows.len()]);
        let weights = Strided::rows(weights, self.keys.len()).t();
        let out = out.part(self.keys.clone(), 0..self.size);
        let (q, out) = (Factor::Matrix(q), Output::add_to(out));
        block(Precision::F32, shape, 1.0, weights, q, out);
    }
}

pub(super) fn run(op: &Attention, frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let lse = frame.output(1).values;
    let scratch = frame.scratch();
    let problem = Problem::new(op, frame);
    let sizes = problem.sizes;
    let (positions, size, group) = (sizes.positions, sizes.size, sizes.group);
    let units = problem.sizes.units(op);
    let window = Window::side_by_side(0, group * size);
    let [y] = Tiles::cut(y, positions, op.heads.count * size, op.heads.kv, [window]);
    let parts = (
        y,
        Rows(lse, group * positions),
        PerChunk(scratch, problem.sizes.scratch(op)[0]),
    );
    frame.pool.run(
        units,
        rows_with_scratch(units),
        parts,
        |range, (mut y, lse, scratch)| {
            for (unit, lse) in range.zip(lse.0.chunks_exact_mut(group * positions)) {
                forward(&problem, unit, y.tile(unit), lse, scratch.0);
            }
        },
    );
}

/// All query heads of one key head in one batch row.
fn forward(
    problem: &Problem<'_>,
    unit: usize,
    mut y: Tile<'_>,
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let sizes = problem.sizes;
    let (positions, size, group) = (sizes.positions, sizes.size, sizes.group);
    let [batch_row, kv_head] = problem.unit(unit);
    let (scores, scratch) = scratch.split_at_mut(BLOCK * positions);
    let (queries, keys) = scratch.split_at_mut(scratch.len() / (BLOCK + positions) * BLOCK);
    let k = problem.head(problem.k, batch_row, kv_head);
    let keys = problem.turned(k, 0..positions, keys);
    let values = problem.head(problem.v, batch_row, kv_head);
    for (index, lse) in lse.chunks_exact_mut(positions).enumerate() {
        let q = problem.head(problem.q, batch_row, kv_head * group + index);
        for start in (0..positions).step_by(BLOCK) {
            let block = Block::new(problem, batch_row, start);
            let rows = block.rows.clone();
            let probabilities = &mut scores[..rows.len() * block.keys.len()];
            let queries = problem.turned(q, rows.clone(), queries);
            block.scores(block.scale, queries, keys, probabilities);
            softmax(&block, probabilities, &mut lse[rows.clone()]);
            let out = y.part(rows, index * size..(index + 1) * size);
            block.by_query(probabilities, values, Output::overwrite(out));
        }
    }
}

/// Scores to probabilities, in place, and the log-sum-exp of each row.
fn softmax(block: &Block<'_>, scores: &mut [f32], lse: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let rows = scores.chunks_exact_mut(block.keys.len()).zip(lse);
            for (row, (scores, lse)) in rows.enumerate() {
                let Range { start, end } = block.seen(row);
                scores[..start].fill(0.0);
                scores[end..].fill(0.0);
                let seen = &mut scores[start..end];
                let largest = max(seen);
                for score in seen.iter_mut() {
                    *score = exp(*score - largest);
                }
                let total = sum_over([seen], |[p]| p);
                for p in seen.iter_mut() {
                    *p /= total;
                }
                *lse = largest + ln(total);
            }
        },
    );
}

pub(super) fn run_gradient(op: &Attention, frame: &mut Frame<'_>) {
    let scratch = frame.scratch();
    let problem = Problem::new(op, frame);
    let first = op.all_operands();
    let [y, lse, g] = [0, 1, 2].map(|index| frame.input(first + index));
    let sizes = problem.sizes;
    let (positions, size, group) = (sizes.positions, sizes.size, sizes.group);
    // The query heads of a key head are adjacent.
    let columns = op.columns(size);
    let groups = [group, 1, 1];
    let window = |index: usize| Window {
        first: columns[index].first,
        columns: groups[index] * size,
        step: groups[index] * columns[index].step,
    };
    let (tiles, adds) = if op.layout == Layout::Apart {
        let outputs = [0, 1, 2].map(|index| (index, frame.output(index)));
        let adds = outputs.each_ref().map(|(_, out)| out.add);
        let tiles = outputs.map(|(index, out)| {
            let (stride, windows) = (columns[index].stride, [window(index)]);
            let [tiles] = Tiles::cut(out.values, positions, stride, op.heads.kv, windows);
            tiles
        });
        (tiles, adds)
    } else {
        let Output { values: out, add } = frame.output(0);
        let windows = [0, 1, 2].map(window);
        let tiles = Tiles::cut(out, positions, columns[0].stride, op.heads.kv, windows);
        (tiles, [add; 3])
    };
    let units = problem.sizes.units(op);
    let [q, k, v] = tiles;
    let parts = ((q, k), (v, PerChunk(scratch, problem.sizes.scratch(op)[1])));
    frame.pool.run(
        units,
        rows_with_scratch(units),
        parts,
        |range, ((mut q, mut k), (mut v, scratch))| {
            for unit in range {
                let out = [
                    Output::new(q.tile(unit), adds[0]),
                    Output::new(k.tile(unit), adds[1]),
                    Output::new(v.tile(unit), adds[2]),
                ];
                backward(&problem, unit, [y, lse, g], out, scratch.0);
            }
        },
    );
}

/// Gradients of one unit's queries, keys and values.
fn backward(
    problem: &Problem<'_>,
    unit: usize,
    [y, lse, g]: [&[f32]; 3],
    [mut q_out, mut k_out, mut v_out]: [Output<Tile<'_>>; 3],
    scratch: &mut [f32],
) {
    let sizes = problem.sizes;
    let (positions, size, group) = (sizes.positions, sizes.size, sizes.group);
    let [batch_row, kv_head] = problem.unit(unit);
    let (scores, scratch) = scratch.split_at_mut(2 * BLOCK * positions);
    let (probabilities, slopes) = scores.split_at_mut(BLOCK * positions);
    // Rotated queries and keys, and the gradients of both; empty without a rotation.
    let columns = scratch.len() / (BLOCK + positions) / 2;
    let (queries, scratch) = scratch.split_at_mut(BLOCK * columns);
    let (queries_out, scratch) = scratch.split_at_mut(BLOCK * columns);
    let (keys, keys_out) = scratch.split_at_mut(positions * columns);
    let output = |values| Operand {
        values,
        columns: Columns {
            first: 0,
            step: size,
            stride: problem.op.heads.count * size,
        },
    };
    let k = problem.head(problem.k, batch_row, kv_head);
    let keys = problem.turned(k, 0..positions, keys);
    let values = problem.head(problem.v, batch_row, kv_head);
    if !v_out.add {
        v_out.values.fill(0.0);
    }
    if problem.rotary.is_some() {
        keys_out.fill(0.0);
    } else if !k_out.add {
        k_out.values.fill(0.0);
    }
    for index in 0..group {
        let number = kv_head * group + index;
        let [q, y, g] =
            [problem.q, output(y), output(g)].map(|of| problem.head(of, batch_row, number));
        let row = batch_row * problem.op.heads.count + number;
        let lse = &lse[row * positions..][..positions];
        for start in (0..positions).step_by(BLOCK) {
            let block = Block::new(problem, batch_row, start);
            let rows = block.rows.clone();
            let probabilities = &mut probabilities[..rows.len() * block.keys.len()];
            let slopes = &mut slopes[..rows.len() * block.keys.len()];
            let queries = problem.turned(q, rows.clone(), queries);
            let (y, g) = (y.from(start), g.from(start));
            block.scores(block.scale, queries, keys, probabilities);
            block.scores(1.0, g, values, slopes);
            softmax_gradient(&block, probabilities, slopes, &lse[rows.clone()], y, g);
            let columns = index * size..(index + 1) * size;
            let q_out = Output::new(q_out.values.part(rows.clone(), columns), q_out.add);
            if problem.rotary.is_some() {
                let turned = &mut queries_out[..rows.len() * size];
                let whole = Output::overwrite(Tile::whole(turned, size));
                block.by_query(slopes, keys, whole);
                problem.add_turned_back(start, turned, q_out);
                block.add_by_key(slopes, queries, Tile::whole(keys_out, size));
            } else {
                block.by_query(slopes, keys, q_out);
                block.add_by_key(slopes, queries, k_out.values.part(0..positions, 0..size));
            }
            block.add_by_key(probabilities, g, v_out.values.part(0..positions, 0..size));
        }
    }
    if problem.rotary.is_some() {
        problem.add_turned_back(0, keys_out, k_out);
    }
}

/// Scores to probabilities and their gradients to those of the unscaled scores, in place.
fn softmax_gradient(
    block: &Block<'_>,
    scores: &mut [f32],
    slopes: &mut [f32],
    lse: &[f32],
    y: Strided<'_>,
    g: Strided<'_>,
) {
    let rows = scores
        .chunks_exact_mut(block.keys.len())
        .zip(slopes.chunks_exact_mut(block.keys.len()));
    vectorised(
        #[inline(always)]
        || {
            for (row, ((scores, slopes), lse)) in rows.zip(lse).enumerate() {
                let y = y.numbers(row, block.size);
                let g = g.numbers(row, block.size);
                let mean = dot(y, g);
                let Range { start, end } = block.seen(row);
                for unseen in [&mut *scores, &mut *slopes] {
                    unseen[..start].fill(0.0);
                    unseen[end..].fill(0.0);
                }
                for (p, slope) in scores[start..end].iter_mut().zip(&mut slopes[start..end]) {
                    *p = exp(*p - lse);
                    *slope = *p * (*slope - mean) * block.scale;
                }
            }
        },
    );
}
