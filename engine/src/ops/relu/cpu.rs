use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let x = frame.input(0);
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    for (y, x) in out.0.iter_mut().zip(&x[range]) {
                        // Not `max`, which would hide NaN.
                        *y = if *x < 0.0 { 0.0 } else { *x };
                    }
                },
            );
        });
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let (y, g) = (frame.input(0), frame.input(1));
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    if !add {
                        out.0.fill(0.0);
                    }
                    for ((gx, y), g) in out.0.iter_mut().zip(&y[range.clone()]).zip(&g[range]) {
                        *gx += if *y > 0.0 { *g } else { 0.0 };
                    }
                },
            );
        });
}
