use crate::cpu::math::vectorised;
use crate::cpu::{Frame, PerChunk};
use crate::ops::grain_rows;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let partials = frame.scratch();
    let x = frame.input(0);
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = PerChunk(&mut *partials, columns);
    frame
        .pool
        .run(rows, grain_rows(columns), parts, |range, partial| {
            vectorised(
                #[inline(always)]
                || {
                    partial.0.fill(0.0);
                    for row in x[range.start * columns..range.end * columns].chunks_exact(columns) {
                        add_to(partial.0, row);
                    }
                },
            );
        });
    add_partials(out, add, partials);
}

/// Adds the partial results of all chunks, in order.
pub(crate) fn add_partials(out: &mut [f32], add: bool, partials: &[f32]) {
    if !add {
        out.fill(0.0);
    }
    vectorised(
        #[inline(always)]
        || {
            partials
                .chunks_exact(out.len())
                .for_each(|partial| add_to(out, partial))
        },
    );
}

#[inline(always)]
fn add_to(total: &mut [f32], row: &[f32]) {
    for (total, x) in total.iter_mut().zip(row) {
        *total += x;
    }
}
