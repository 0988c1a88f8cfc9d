use crate::cpu::math::exp;
use crate::cpu::reduce::{log_sum_exp, mean, sum_over};
use crate::cpu::{Frame, Rows};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let lse = frame.output(1).values;
    let losses = frame.scratch();
    let (target, target_lse, logits) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(2).rows(), frame.ty(2).columns());
    let parts = (Rows(lse, 1), Rows(&mut *losses, 1));
    each_chunk!(frame, [rows, columns], parts, |range, (lse, losses)| {
        for ((row, lse), loss) in range.zip(&mut *lse.0).zip(&mut *losses.0) {
            let target = &target[row * columns..][..columns];
            let logits = &logits[row * columns..][..columns];
            let target_lse = target_lse[row];
            *lse = log_sum_exp(logits);
            // Close logits are subtracted from each other first, which is exact.
            let shift = target_lse - *lse;
            *loss = sum_over(
                [target, logits],
                #[inline(always)]
                |[t, x]| exp(t - target_lse) * (t - x - shift),
            );
        }
    });
    out[0] = mean(losses, rows);
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let (target, target_lse, lse) = (frame.input(0), frame.input(1), frame.input(2));
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let scale = frame.input(3)[0] / rows as f32;
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        for (row, out) in range.zip(out.0.chunks_exact_mut(columns)) {
            let target = &target[row * columns..][..columns];
            let (target_lse, lse) = (target_lse[row], lse[row]);
            for (x, t) in out.iter_mut().zip(target) {
                *x = scale * (exp(*x - lse) - exp(*t - target_lse));
            }
        }
    });
}
