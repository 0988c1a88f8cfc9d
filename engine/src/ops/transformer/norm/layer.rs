use crate::cpu::reduce::{add_chunks, sum_over};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::each_chunk;

pub(super) fn run(eps: f32, frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let stats = frame.output(1).values;
    let (x, weight, bias) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = (Rows(y, columns), Rows(stats, 2));
    each_chunk!(frame, [rows, columns], parts, |range, (y, stats)| {
        let x = &x[range.start * columns..range.end * columns];
        let rows = x.chunks_exact(columns).zip(y.0.chunks_exact_mut(columns));
        for ((x, y), stats) in rows.zip(stats.0.chunks_exact_mut(2)) {
            let mean = sum_over([x], |[x]| x) / columns as f32;
            let variance = sum_over([x], |[x]| (x - mean) * (x - mean)) / columns as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            stats.copy_from_slice(&[mean, rstd]);
            for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = ((x - mean) * rstd).mul_add(*w, *b);
            }
        }
    });
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (x, weight) = (frame.input(0), frame.input(1));
    let (stats, g) = (frame.input(2), frame.input(3));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        for (row, gx) in range.clone().zip(out.0.chunks_exact_mut(columns)) {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            let (mean, rstd) = (stats[2 * row], stats[2 * row + 1]);
            let normal = |x: f32| (x - mean) * rstd;
            let shift = sum_over([g, weight], |[g, w]| g * w) / columns as f32;
            let slope = sum_over([g, weight, x], |[g, w, x]| g * w * normal(x));
            let slope = slope / columns as f32;
            if !add {
                gx.fill(0.0);
            }
            for (((gx, g), w), x) in gx.iter_mut().zip(g).zip(weight).zip(x) {
                *gx += rstd * (g * w - shift - normal(*x) * slope);
            }
        }
    });
}

pub(super) fn run_parameter_gradient(frame: &mut Frame<'_>) {
    let gw = frame.output(0);
    let gb = frame.output(1);
    let scratch = frame.scratch();
    let (x, stats, g) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let (weights, biases) = scratch.split_at_mut(scratch.len() / 2);
    let parts = (
        PerChunk(&mut *weights, columns),
        PerChunk(&mut *biases, columns),
    );
    each_chunk!(frame, [rows, columns], parts, |range, (gw, gb)| {
        gw.0.fill(0.0);
        gb.0.fill(0.0);
        for row in range {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            let (mean, rstd) = (stats[2 * row], stats[2 * row + 1]);
            let sums = gw.0.iter_mut().zip(gb.0.iter_mut());
            for (((gw, gb), x), g) in sums.zip(x).zip(g) {
                *gw += g * ((x - mean) * rstd);
                *gb += g;
            }
        }
    });
    add_chunks(frame.pool, gw, weights);
    add_chunks(frame.pool, gb, biases);
}
