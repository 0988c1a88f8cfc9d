use crate::cpu::math::vectorised;
use crate::cpu::reduce::log_sum_exp;
use crate::cpu::{Frame, Rows};
use crate::ops::grain_rows;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let x = frame.input(0);
    let columns = frame.ty(0).columns();
    frame.pool.run(
        out.len(),
        grain_rows(columns),
        Rows(out, 1),
        |range, out| {
            let rows = x[range.start * columns..range.end * columns].chunks_exact(columns);
            vectorised(
                #[inline(always)]
                || {
                    for (y, x) in out.0.iter_mut().zip(rows) {
                        *y = log_sum_exp(x);
                    }
                },
            );
        },
    );
}
