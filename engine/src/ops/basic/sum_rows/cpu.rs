use crate::cpu::reduce::{add_chunks, add_to};
use crate::cpu::{Frame, PerChunk};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0);
    let partials = frame.scratch();
    let x = frame.input(0);
    let (rows, columns) = (frame.ty(0).rows(), frame.ty(0).columns());
    let parts = PerChunk(&mut *partials, columns);
    each_chunk!(frame, [rows, columns], parts, |range, partial| {
        partial.0.fill(0.0);
        for row in x[range.start * columns..range.end * columns].chunks_exact(columns) {
            add_to(partial.0, row);
        }
    });
    add_chunks(frame.pool, out, partials);
}
