//! Rows are centred if they have a mean, and a bias.

use crate::cpu::reduce::{add_chunks, add_to, sum_over};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::each_chunk;

pub(super) fn run(centred: bool, eps: f32, frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let stats = frame.output(1).values;
    let (x, weight) = (frame.input(0), frame.input(1));
    let bias = if centred { frame.input(2) } else { &[] };
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = (Rows(y, columns), Rows(stats, 2));
    each_chunk!(frame, [rows, columns], parts, |range, (y, stats)| {
        let x = &x[range.start * columns..range.end * columns];
        let rows = x.chunks_exact(columns).zip(y.0.chunks_exact_mut(columns));
        for ((x, y), stats) in rows.zip(stats.0.chunks_exact_mut(2)) {
            let mean = match centred {
                true => sum_over([x], |[x]| x) / columns as f32,
                false => 0.0,
            };
            let variance = sum_over([x], |[x]| (x - mean) * (x - mean)) / columns as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            stats.copy_from_slice(&[mean, rstd]);
            let each = y.iter_mut().zip(x).zip(weight);
            if centred {
                for (((y, x), w), b) in each.zip(bias) {
                    *y = ((x - mean) * rstd).mul_add(*w, *b);
                }
            } else {
                each.for_each(|((y, x), w)| *y = x * rstd * w);
            }
        }
    });
}

/// Mean and inverse of the deviation of a row.
#[inline(always)]
fn of_row(centred: bool, stats: &[f32], row: usize) -> (f32, f32) {
    let mean = if centred { stats[2 * row] } else { 0.0 };
    (mean, stats[2 * row + 1])
}

pub(super) fn run_gradient(centred: bool, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (x, weight) = (frame.input(0), frame.input(1));
    let (stats, g) = (frame.input(2), frame.input(3));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        for (row, gx) in range.clone().zip(out.0.chunks_exact_mut(columns)) {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            let (mean, rstd) = of_row(centred, stats, row);
            let normal = |x: f32| (x - mean) * rstd;
            let shift = match centred {
                true => sum_over([g, weight], |[g, w]| g * w) / columns as f32,
                false => 0.0,
            };
            let slope = sum_over([g, weight, x], |[g, w, x]| g * w * normal(x));
            let slope = slope / columns as f32;
            let each = g.iter().zip(weight).zip(x);
            let slopes = each.map(|((g, w), x)| rstd * (g * w - shift - normal(*x) * slope));
            Output::new(gx, add).put(slopes);
        }
    });
}

pub(super) fn run_parameter_gradient(centred: bool, frame: &mut Frame<'_>) {
    let gw = frame.output(0);
    let gb = centred.then(|| frame.output(1));
    let scratch = frame.scratch();
    let (x, stats, g) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let of_weights = scratch.len() / if centred { 2 } else { 1 };
    let (weights, biases) = scratch.split_at_mut(of_weights);
    let parts = (
        PerChunk(&mut *weights, columns),
        centred.then_some(PerChunk(&mut *biases, columns)),
    );
    each_chunk!(frame, [rows, columns], parts, |range, (gw, mut gb)| {
        gw.0.fill(0.0);
        gb.iter_mut().for_each(|gb| gb.0.fill(0.0));
        for row in range {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            let (mean, rstd) = of_row(centred, stats, row);
            for ((gw, x), g) in gw.0.iter_mut().zip(x).zip(g) {
                *gw += g * ((x - mean) * rstd);
            }
            gb.iter_mut().for_each(|gb| add_to(gb.0, g));
        }
    });
    add_chunks(frame.pool, gw, weights);
    if let Some(gb) = gb {
        add_chunks(frame.pool, gb, biases);
    }
}
