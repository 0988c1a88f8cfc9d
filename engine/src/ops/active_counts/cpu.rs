use super::ActiveCounts;
use crate::cpu::math::{sum, vectorised};
use crate::cpu::{Frame, PerChunk};
use crate::ops::grain_rows;

#[expect(
    clippy::cast_possible_truncation,
    reason = "a mean in f64, rounded once"
)]
pub(super) fn run(op: &ActiveCounts, frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let partials = frame.scratch();
    let g = frame.input(0);
    let (rows, c) = (frame.ty(0).rows(), frame.ty(0).columns());
    frame.pool.run(
        rows,
        grain_rows(c),
        PerChunk(partials, 1),
        |range, partial| {
            let g = &g[range.start * c..range.end * c];
            // At most 2^24 elements a chunk, so the count is exact.
            let active = |index: usize| if g[index] > op.threshold { 1.0 } else { 0.0 };
            partial.0[0] = vectorised(
                #[inline(always)]
                || sum(g.len(), active),
            );
        },
    );
    let total: f64 = partials.iter().map(|&partial| f64::from(partial)).sum();
    out[0] = (total / rows as f64) as f32;
}
