use crate::cpu::math::vectorised;
use crate::cpu::reduce::{mean, sum_over};
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::GRAIN;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let partials = frame.scratch();
    let (prediction, target) = (frame.input(0), frame.input(1));
    let len = prediction.len();
    let parts = PerChunk(&mut *partials, 1);
    frame.pool.run(len, GRAIN, parts, |range, partial| {
        let (p, t) = (&prediction[range.clone()], &target[range]);
        partial.0[0] = vectorised(
            #[inline(always)]
            || sum_over([p, t], |[p, t]| (p - t) * (p - t)),
        );
    });
    out[0] = mean(partials, len);
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let (prediction, target) = (frame.input(0), frame.input(1));
    let scale = 2.0 * frame.input(2)[0] / out.len() as f32;
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            let pairs = prediction[range.clone()].iter().zip(&target[range]);
            vectorised(
                #[inline(always)]
                || {
                    if !add {
                        out.0.fill(0.0);
                    }
                    for (g, (p, t)) in out.0.iter_mut().zip(pairs) {
                        *g += scale * (p - t);
                    }
                },
            );
        });
}
