use crate::cpu::math::{dot, vectorised};
use crate::cpu::{Frame, PerChunk, Pool, Rows};
use crate::ops::GRAIN;

pub(super) fn forward(frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let partials = frame.scratch();
    out[0] = sum_squares(frame.pool, frame.input(0), partials);
}

/// Sum of squares: lanes within a chunk in f32, chunks in order in f64.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a sum in f64, rounded once"
)]
pub(crate) fn sum_squares(pool: &Pool, x: &[f32], partials: &mut [f32]) -> f32 {
    pool.run(x.len(), GRAIN, PerChunk(partials, 1), |range, partial| {
        let x = &x[range];
        partial.0[0] = vectorised(
            #[inline(always)]
            || dot(x, x),
        );
    });
    let chunks = x.len().div_ceil(GRAIN);
    partials[..chunks]
        .iter()
        .map(|&partial| f64::from(partial))
        .sum::<f64>() as f32
}

pub(super) fn backward(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let (factor, x) = (2.0 * frame.input(0)[0], frame.input(1));
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    for (out, x) in out.0.iter_mut().zip(&x[range]) {
                        *out = if add {
                            x.mul_add(factor, *out)
                        } else {
                            x * factor
                        };
                    }
                },
            );
        });
}
