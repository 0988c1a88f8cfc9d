//! One chunk of rows at a time, with a task for each block of rows and part of the vocabulary:
//! first its logits, and those of a streamed target, and for every row the largest and the sum of
//! powers; then, once the log-sum-exps are known, losses, gradients in place, and their product
//! with the part of `W`. Products of the parts are added in order.

use std::ops::Range;

use super::{HeadDivergence, Sizes};
use crate::cpu::bf16::{Factor, Packed, Panel};
use crate::cpu::gemm::block;
use crate::cpu::math::{exp, ln, vectorised};
use crate::cpu::pool::{PerChunk, Pool};
use crate::cpu::reduce::{add_to, max, mean, replace_and_sum, sum_over};
use crate::cpu::shape::{Shape, Strided};
use crate::cpu::tile::Tile;
use crate::cpu::{Frame, Output, Rows};
use crate::ops::grain_rows;
use crate::ops::loss::cross_entropy::IGNORED;
use crate::ops::loss::cross_entropy::cpu::{column, counted};
use crate::precision::Precision;

/// Elements of a chunk's logits, if that is at least a block of rows.
const CHUNK: usize = 1 << 18;
/// Rows of a block, and columns of a strip: their logits stay in a near cache. Measured with 768
/// columns and two threads of Zen 3: products of 64 by 512 at 140 GFLOP/s, of 96 by 256 at 159, of
/// 256 by 512 at 165.
const BLOCK: usize = 96;
const STRIP: usize = 256;
/// Most parts of the vocabulary.
const PARTS: usize = 16;

/// The cut of rows and vocabulary, which depends only on their sizes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    sizes: Sizes,
    /// Rows of a chunk.
    chunk: usize,
    /// Blocks of a chunk.
    blocks: usize,
    parts: usize,
    /// Strips of a part.
    strips: usize,
}

/// f32s that a thread packs for the logits of a strip and for its part of the gradient.
pub(super) fn packed(sizes: Sizes) -> usize {
    let Sizes { d, vocabulary, .. } = sizes;
    let (m, width) = (BLOCK, STRIP.min(vocabulary));
    let of = |n, k| Shape { m, n, k }.packed_by_block();
    of(width, d).max(of(d, width))
}

impl Cut {
    pub(super) fn of(sizes: Sizes) -> Self {
        let fitting = (CHUNK / sizes.vocabulary).max(1);
        let chunk = fitting.next_multiple_of(BLOCK).min(sizes.rows).max(1);
        let all = sizes.vocabulary.div_ceil(STRIP);
        // The partial gradients take about as much memory as the logits.
        let parts = (sizes.vocabulary / sizes.d).next_power_of_two();
        let strips = all.div_ceil(parts.min(PARTS));
        Self {
            sizes,
            chunk,
            blocks: chunk.div_ceil(BLOCK),
            parts: all.div_ceil(strips),
            strips,
        }
    }

    fn tasks(self) -> usize {
        self.blocks * self.parts
    }

    /// f32s of a task's logits.
    fn logits(self) -> usize {
        self.strips * BLOCK * STRIP.min(self.sizes.vocabulary)
    }

    /// f32s of a task's logits, and of those of a streamed target behind them.
    fn all_logits(self, op: HeadDivergence) -> usize {
        (1 + usize::from(op.streamed)) * self.logits()
    }

    /// f32s that a task needs beside its logits: a strip whose product is made transposed, then its
    /// part of the gradient if several are added.
    fn beside(self, op: HeadDivergence) -> usize {
        let turned = usize::from(op.transposed) * STRIP.min(self.sizes.vocabulary);
        let gradient = usize::from(op.gradient && self.parts > 1) * self.sizes.d;
        BLOCK * turned.max(gradient)
    }

    /// f32s of scratch.
    pub(super) fn scratch(self, op: HeadDivergence) -> usize {
        let of_task = self.all_logits(op) + self.beside(op) + SUMS;
        let of_row = 1 + usize::from(op.labels);
        let lse = (1 + usize::from(op.streamed)) * self.chunk;
        self.tasks() * of_task + lse + self.sizes.rows * of_row
    }

    /// Rows of a task's block, of `rows` in the chunk.
    fn rows(self, task: usize, rows: usize) -> Range<usize> {
        let first = task % self.blocks * BLOCK;
        first.min(rows)..(first + BLOCK).min(rows)
    }

    /// Columns of each strip of a task, and the offset of their logits within the task's.
    fn columns(self, task: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (first, end) = (task / self.blocks * self.strips, self.sizes.vocabulary);
        (0..self.strips)
            .map(move |strip| {
                let start = (first + strip) * STRIP;
                (start..(start + STRIP).min(end), strip * BLOCK * STRIP)
            })
            .take_while(|(columns, _)| columns.start < columns.end)
    }

    /// Offset of the logit of a row of the chunk and a column.
    fn place(self, op: HeadDivergence, row: usize, column: usize) -> usize {
        let strip = column / STRIP;
        let task = strip / self.strips * self.blocks + row / BLOCK;
        let width = STRIP.min(self.sizes.vocabulary - strip * STRIP);
        let inside = strip % self.strips * BLOCK * STRIP + row % BLOCK * width + column % STRIP;
        task * self.all_logits(op) + inside
    }
}

/// The operands.
struct Head<'a> {
    op: HeadDivergence,
    precision: Precision,
    cut: Cut,
    /// The target's logits, or the hidden values that they are made of.
    target: &'a [f32],
    /// Log-sum-exps of the target's logits, unless these are made.
    target_lse: Option<&'a [f32]>,
    h: &'a [f32],
    w: &'a [f32],
    /// `W` and its transpose, if they are packed for all products.
    packed: [Option<&'a Panel>; 2],
    labels: Option<&'a [u32]>,
    bias: Option<&'a [f32]>,
}

/// f32s of a task's sums for each row of its block: the largest logit and the sum of powers, those
/// of a streamed target, and the loss.
const SUMS: usize = 5 * BLOCK;
/// Offsets of the terms of log-sum-exps, of the loss's logits and of the target's.
const TERMS: [usize; 2] = [0, 2 * BLOCK];
/// Offset of the losses.
const LOSS: usize = 4 * BLOCK;

impl<'a> Head<'a> {
    /// Some columns of `W`, `[d, ..]`.
    fn columns(&self, columns: &Range<usize>) -> Strided<'a> {
        let Sizes { d, vocabulary, .. } = self.cut.sizes;
        if self.op.transposed {
            Strided::rows(&self.w[columns.start * d..], d).t()
        } else {
            Strided::rows(&self.w[columns.start..], vocabulary)
        }
    }

    /// Logits of a block, `rows` of all, from hidden values of all rows, and the terms of their
    /// log-sum-exps, `[2, BLOCK]`.
    fn logits(
        &self,
        task: usize,
        (hidden, rows): (&[f32], Range<usize>),
        (logits, turned): (&mut [f32], &mut [f32]),
        terms: &mut [f32],
    ) {
        let d = self.cut.sizes.d;
        let (largest, powers) = terms.split_at_mut(BLOCK);
        // No finite logit is smaller.
        largest.fill(f32::MIN);
        powers.fill(0.0);
        for (columns, at) in self.cut.columns(task) {
            let width = columns.len();
            let x = &mut logits[at..][..rows.len() * width];
            let h = Strided::rows(&hidden[rows.start * d..], d);
            let shape = Shape::of([rows.len(), width, d]);
            if let Some(panel) = self.packed[0] {
                let w = Factor::Packed(Packed {
                    panel,
                    column: columns.start,
                    term: 0,
                });
                let out = Output::overwrite(Tile::whole(x, width));
                block(self.precision, shape, 1.0, h, w, out);
            } else if self.op.transposed {
                // Rows of `W` are read in place, not packed once more for every block.
                let turned = &mut turned[..rows.len() * width];
                let shape = Shape::of([width, rows.len(), d]);
                let out = Output::overwrite(Tile::whole(turned, rows.len()));
                let (w, h) = (self.columns(&columns).t(), Factor::Matrix(h.t()));
                block(self.precision, shape, 1.0, w, h, out);
                turn(turned, x, width);
            } else {
                let w = Factor::Matrix(self.columns(&columns));
                let out = Output::overwrite(Tile::whole(x, width));
                block(self.precision, shape, 1.0, h, w, out);
            }
            if let Some(bias) = self.bias {
                for row in x.chunks_exact_mut(width) {
                    add_to(row, &bias[columns.clone()]);
                }
            }
            let terms = largest.iter_mut().zip(&mut *powers);
            vectorised(
                #[inline(always)]
                || {
                    for ((largest, powers), x) in terms.zip(x.chunks_exact(width)) {
                        let most = max(x);
                        if most > *largest {
                            *powers *= exp(*largest - most);
                            *largest = most;
                        }
                        let largest = *largest;
                        *powers += sum_over(
                            [x],
                            #[inline(always)]
                            |[x]| exp(x - largest),
                        );
                    }
                },
            );
        }
    }

    /// Losses of a block, `rows` of all, with log-sum-exps `lse` of the logits and of the target's,
    /// and its part of the gradient of the mean.
    fn losses(
        &self,
        task: usize,
        (rows, lse): (Range<usize>, [&[f32]; 2]),
        (logits, loss): (&mut [f32], &mut [f32]),
        mut gradient: Option<&mut [f32]>,
    ) {
        let (logits, streamed) = logits.split_at_mut(self.cut.logits());
        let Sizes { d, vocabulary, .. } = self.cut.sizes;
        loss.fill(0.0);
        for (index, (columns, at)) in self.cut.columns(task).enumerate() {
            let width = columns.len();
            let x = &mut logits[at..][..rows.len() * width];
            let each = (0..).zip(lse[0]).zip(lse[1]).zip(&mut *loss);
            let target = |row: usize| match self.op.streamed {
                true => &streamed[at + row * width..][..width],
                false => &self.target[(rows.start + row) * vocabulary..][columns.clone()],
            };
            let keeps = gradient.is_some();
            vectorised(
                #[inline(always)]
                || {
                    for ((((row, &lse), &target_lse), loss), x) in
                        each.zip(x.chunks_exact_mut(width))
                    {
                        let target = target(row);
                        // Close logits are subtracted from each other first, which is exact.
                        let shift = target_lse - lse;
                        *loss += if keeps {
                            replace_and_sum(
                                x,
                                target,
                                #[inline(always)]
                                |x, t| {
                                    let p = exp(t - target_lse);
                                    (exp(x - lse) - p, p * (t - x - shift))
                                },
                            )
                        } else {
                            sum_over(
                                [&*x, target],
                                #[inline(always)]
                                |[x, t]| exp(t - target_lse) * (t - x - shift),
                            )
                        };
                    }
                },
            );
            if let Some(gradient) = &mut gradient {
                let shape = Shape::of([rows.len(), d, width]);
                let x = Strided::rows(x, width);
                let out = Output::new(Tile::whole(&mut gradient[..rows.len() * d], d), index > 0);
                let mean = 1.0 / self.cut.sizes.rows as f32;
                let w = match self.packed[1] {
                    Some(panel) => Factor::Packed(Packed {
                        panel,
                        column: 0,
                        term: columns.start,
                    }),
                    None => Factor::Matrix(self.columns(&columns).t()),
                };
                block(self.precision, shape, mean, x, w, out);
            }
        }
    }

    /// A chunk, `rows` of all, and its rows of the gradient.
    fn chunk(
        &self,
        pool: &Pool,
        rows: Range<usize>,
        scratch: &mut Scratch<'_>,
        mut gradient: Option<&mut [f32]>,
    ) {
        let cut = self.cut;
        let d = cut.sizes.d;
        let of_block = |task: usize| {
            let inside = cut.rows(task, rows.len());
            (rows.start + inside.start..rows.start + inside.end, inside)
        };
        // In a partial chunk, some blocks may be empty.
        let tasks = match cut.parts {
            1 => rows.len().div_ceil(BLOCK),
            _ => cut.tasks(),
        };
        let parts = (
            PerChunk(&mut *scratch.logits, cut.all_logits(self.op)),
            PerChunk(&mut *scratch.beside, cut.beside(self.op)),
            PerChunk(&mut *scratch.sums, SUMS),
        );
        pool.run(tasks, 1, parts, |tasks, parts| {
            let (rows, _) = of_block(tasks.start);
            if rows.is_empty() {
                return;
            }
            let hidden = self.op.streamed.then_some(self.target);
            let each = [self.h].into_iter().chain(hidden);
            let logits = parts.0.0.chunks_exact_mut(cut.logits());
            for ((hidden, logits), at) in each.zip(logits).zip(TERMS) {
                let terms = &mut parts.2.0[at..][..2 * BLOCK];
                let rows = rows.clone();
                self.logits(tasks.start, (hidden, rows), (logits, parts.1.0), terms);
            }
        });
        let made = scratch.lse.chunks_exact_mut(cut.chunk);
        for (lse, terms) in made.zip(TERMS) {
            for (row, lse) in lse[..rows.len()].iter_mut().enumerate() {
                *lse = log_sum_exp(cut, scratch.sums, (row, terms));
            }
        }
        let (lse, target_lse) = scratch.lse.split_at(cut.chunk);
        let lse = &lse[..rows.len()];
        let target_lse = match self.target_lse {
            Some(all) => &all[rows.clone()],
            None => &target_lse[..rows.len()],
        };
        if let Some(labels) = self.labels {
            let each = labels[rows.clone()].iter().zip(lse).enumerate();
            for (row, (&label, lse)) in each {
                scratch.entropies[rows.start + row] = if label == IGNORED {
                    0.0
                } else {
                    lse - scratch.logits
                        [cut.place(self.op, row, column(label, cut.sizes.vocabulary))]
                };
            }
        }
        // A single part is the gradient itself.
        let adds = cut.parts > 1;
        let parts = (
            PerChunk(&mut *scratch.logits, cut.all_logits(self.op)),
            PerChunk(&mut *scratch.sums, SUMS),
            gradient.as_deref_mut().map(|own| match adds {
                true => PerChunk(&mut *scratch.beside, cut.beside(self.op)),
                false => PerChunk(own, BLOCK * d),
            }),
        );
        pool.run(tasks, 1, parts, |tasks, parts| {
            let (rows, inside) = of_block(tasks.start);
            if !rows.is_empty() {
                let loss = &mut parts.1.0[LOSS..];
                let gradient = parts.2.map(|gradient| gradient.0);
                self.losses(
                    tasks.start,
                    (rows, [lse, target_lse].map(|lse| &lse[inside.clone()])),
                    (parts.0.0, loss),
                    gradient,
                );
            }
        });
        // Parts of a row are one block's tasks apart.
        let parts_of = |row: usize| (0..cut.parts).map(move |part| part * cut.blocks + row / BLOCK);
        for (row, total) in scratch.losses[rows.clone()].iter_mut().enumerate() {
            let of_task = |task: usize| scratch.sums[task * SUMS + LOSS + row % BLOCK];
            *total = parts_of(row).map(of_task).sum();
        }
        let Some(gradient) = gradient.filter(|_| adds) else {
            return;
        };
        let of_tasks = &*scratch.beside;
        let grain = grain_rows(rows.len(), d);
        pool.run(rows.len(), grain, Rows(gradient, d), |rows, out| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, out) in rows.zip(out.0.chunks_exact_mut(d)) {
                        out.fill(0.0);
                        for task in parts_of(row) {
                            let at = task * cut.beside(self.op) + row % BLOCK * d;
                            add_to(out, &of_tasks[at..][..d]);
                        }
                    }
                },
            );
        });
    }
}

/// Writes the transpose of a matrix to `to`, with so many columns.
fn turn(from: &[f32], to: &mut [f32], columns: usize) {
    /// Columns of the result at a time: the elements read for them stay in the nearest cache.
    const TOGETHER: usize = 16;
    let rows = to.len() / columns;
    for first in (0..columns).step_by(TOGETHER) {
        let end = (first + TOGETHER).min(columns);
        let from = &from[first * rows..end * rows];
        for (row, to) in to.chunks_exact_mut(columns).enumerate() {
            for (to, from) in to[first..end].iter_mut().zip(from.chunks_exact(rows)) {
                *to = from[row];
            }
        }
    }
}

/// Intermediates of a walk.
struct Scratch<'a> {
    /// For each task.
    logits: &'a mut [f32],
    beside: &'a mut [f32],
    sums: &'a mut [f32],
    /// For each row of a chunk, of the logits and then of a streamed target.
    lse: &'a mut [f32],
    /// For each row.
    losses: &'a mut [f32],
    entropies: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    fn of(mut rest: &'a mut [f32], cut: Cut, op: HeadDivergence) -> Self {
        let mut take = |len: usize| rest.split_off_mut(..len).expect("as much as was asked for");
        Self {
            logits: take(cut.tasks() * cut.all_logits(op)),
            beside: take(cut.tasks() * cut.beside(op)),
            sums: take(cut.tasks() * SUMS),
            lse: take((1 + usize::from(op.streamed)) * cut.chunk),
            losses: take(cut.sizes.rows),
            entropies: take(usize::from(op.labels) * cut.sizes.rows),
        }
    }
}

pub(super) fn run(op: HeadDivergence, frame: &mut Frame<'_>) {
    let w = op.h() + 1;
    let sizes = op.sizes(|index| frame.ty(index));
    let cut = Cut::of(sizes);
    let head = Head {
        op,
        precision: frame.precision(),
        cut,
        target: frame.input(0),
        target_lse: (!op.streamed).then(|| frame.input(1)),
        h: frame.input(op.h()),
        w: frame.input_unless_packed(w),
        packed: [op.transposed, !op.transposed].map(|stored| frame.packed(w, stored)),
        labels: op.labels().map(|index| frame.input_u32(index)),
        bias: op.bias().map(|index| frame.input(index)),
    };
    let out = frame.output(0).values;
    let entropy = op.labels.then(|| frame.output(1).values);
    let index = 1 + usize::from(op.labels);
    let mut gradient = op.gradient.then(|| frame.output(index).values);
    let mut scratch = Scratch::of(frame.scratch(), cut, op);
    for first in (0..sizes.rows).step_by(cut.chunk) {
        let rows = first..sizes.rows.min(first + cut.chunk);
        let gradient = gradient.as_deref_mut();
        let gradient = gradient.map(|all| &mut all[first * sizes.d..rows.end * sizes.d]);
        head.chunk(frame.pool, rows, &mut scratch, gradient);
    }
    out[0] = mean(scratch.losses, sizes.rows);
    if let (Some(entropy), Some(labels)) = (entropy, head.labels) {
        entropy[0] = mean(scratch.entropies, counted(labels));
    }
}

/// The log-sum-exp of a row of the chunk, from its parts in order.
///
/// - `terms`: one of [`TERMS`]
fn log_sum_exp(cut: Cut, sums: &[f32], (row, terms): (usize, usize)) -> f32 {
    let parts = (0..cut.parts).map(|part| {
        let at = (part * cut.blocks + row / BLOCK) * SUMS + terms + row % BLOCK;
        (sums[at], sums[at + BLOCK])
    });
    let largest = parts.clone().map(|(largest, _)| largest);
    let largest = largest.fold(f32::MIN, f32::max);
    let powers: f32 = parts.map(|(own, powers)| powers * exp(own - largest)).sum();
    // The sum contains e^0, unless it is NaN.
    largest + ln(powers)
}
