use crate::cpu::reduce::log_sum_exp;
use crate::cpu::{Frame, Rows};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let x = frame.input(0);
    let columns = frame.ty(0).columns();
    each_chunk!(frame, [out.len(), columns], Rows(out, 1), |range, out| {
        let rows = x[range.start * columns..range.end * columns].chunks_exact(columns);
        for (y, x) in out.0.iter_mut().zip(rows) {
            *y = log_sum_exp(x);
        }
    });
}
