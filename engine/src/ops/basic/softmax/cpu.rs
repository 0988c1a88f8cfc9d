use crate::cpu::math::exp;
use crate::cpu::reduce::{max, replace_and_sum, sum_over};
use crate::cpu::{Frame, Output, Rows};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let (x, ty) = (frame.input(0), frame.ty(0));
    let (rows, columns) = (ty.rows(), ty.columns());
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        let rows = out.0.chunks_exact_mut(columns).zip(range);
        for (y, row) in rows {
            let x = &x[row * columns..][..columns];
            let largest = max(x);
            let sum = replace_and_sum(
                y,
                x,
                #[inline(always)]
                |_, x| {
                    let power = exp(x - largest);
                    (power, power)
                },
            );
            let share = 1.0 / sum;
            y.iter_mut().for_each(|y| *y *= share);
        }
    });
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (y, g, ty) = (frame.input(0), frame.input(1), frame.ty(0));
    let (rows, columns) = (ty.rows(), ty.columns());
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        let rows = out.0.chunks_exact_mut(columns).zip(range);
        for (out, row) in rows {
            let [y, g] = [y, g].map(|x| &x[row * columns..][..columns]);
            let shift = sum_over([y, g], |[y, g]| y * g);
            if !add {
                out.fill(0.0);
            }
            for (out, (y, g)) in out.iter_mut().zip(y.iter().zip(g)) {
                *out += y * (g - shift);
            }
        }
    });
}
