use crate::cpu::math::vectorised;
use crate::cpu::reduce::{mean, sum_over};
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::GRAIN;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let partials = frame.scratch();
    let x = frame.input(0);
    let parts = PerChunk(&mut *partials, 1);
    frame.pool.run(x.len(), GRAIN, parts, |range, partial| {
        partial.0[0] = vectorised(
            #[inline(always)]
            || sum_over([&x[range]], |[x]| x),
        );
    });
    out[0] = mean(&partials[..x.len().div_ceil(GRAIN)], x.len());
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let each = frame.input(0)[0] / out.len() as f32;
    frame.pool.run(out.len(), GRAIN, Rows(out, 1), |_, out| {
        if add {
            out.0.iter_mut().for_each(|gradient| *gradient += each);
        } else {
            out.0.fill(each);
        }
    });
}
