use super::MaxRows;
use crate::cpu::pool::chunks;
use crate::cpu::{Frame, PerChunk};
use crate::ops::{each_chunk, grain_rows};

pub(super) fn run(op: MaxRows, frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let partials = frame.scratch();
    let columns = out.len() / op.blocks;
    let block = match op.blocks {
        1 => 0,
        _ => frame.parameters.block as usize,
    };
    out.fill(0.0);
    let most = &mut out[block * columns..][..columns];
    most.fill(f32::NEG_INFINITY);
    for index in 0..frame.inputs() {
        let x = frame.input(index);
        let rows = x.len() / columns;
        let grain = grain_rows(rows, columns);
        let parts = PerChunk(&mut *partials, columns);
        each_chunk!(frame, rows, grain, parts, |range, partial| {
            partial.0.fill(f32::NEG_INFINITY);
            for row in x[range.start * columns..range.end * columns].chunks_exact(columns) {
                raise_to(partial.0, row);
            }
        });
        let partials = partials.chunks_exact(columns).take(chunks(rows, grain));
        partials.for_each(|partial| raise_to(most, partial));
    }
}

/// Replaces what a row exceeds.
#[inline(always)]
fn raise_to(most: &mut [f32], row: &[f32]) {
    for (most, &x) in most.iter_mut().zip(row) {
        *most = if x > *most { x } else { *most };
    }
}
