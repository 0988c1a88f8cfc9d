use crate::cpu::reduce::{add_chunks, sum_over};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::each_chunk;

pub(super) fn run(eps: f32, frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let factors = frame.output(1).values;
    let (x, weight) = (frame.input(0), frame.input(1));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = (Rows(y, columns), Rows(factors, 1));
    each_chunk!(frame, [rows, columns], parts, |range, (y, factors)| {
        let x = &x[range.start * columns..range.end * columns];
        let rows = x.chunks_exact(columns).zip(y.0.chunks_exact_mut(columns));
        for ((x, y), factor) in rows.zip(factors.0) {
            let square = sum_over([x], |[x]| x * x) / columns as f32;
            *factor = 1.0 / (square + eps).sqrt();
            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                *y = x * *factor * w;
            }
        }
    });
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (x, weight) = (frame.input(0), frame.input(1));
    let (factors, g) = (frame.input(2), frame.input(3));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        for (row, gx) in range.clone().zip(out.0.chunks_exact_mut(columns)) {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            let factor = factors[row];
            let slope = sum_over([g, weight, x], |[g, w, x]| g * w * x);
            // r mean(h n); n brings the second factor r.
            let slope = factor * factor * slope / columns as f32;
            if !add {
                gx.fill(0.0);
            }
            for (((gx, g), w), x) in gx.iter_mut().zip(g).zip(weight).zip(x) {
                *gx += factor * (g * w - x * slope);
            }
        }
    });
}

pub(super) fn run_weight_gradient(frame: &mut Frame<'_>) {
    let out = frame.output(0);
    let partials = frame.scratch();
    let (x, factors, g) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = PerChunk(&mut *partials, columns);
    each_chunk!(frame, [rows, columns], parts, |range, partial| {
        partial.0.fill(0.0);
        for row in range {
            let [x, g] = [x, g].map(|of| &of[row * columns..][..columns]);
            for ((sum, x), g) in partial.0.iter_mut().zip(x).zip(g) {
                *sum += g * (x * factors[row]);
            }
        }
    });
    add_chunks(frame.pool, out, partials);
}
