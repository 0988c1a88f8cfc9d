use super::{Columns, Run};
use crate::cpu::{Frame, Output, Rows};
use crate::ops::grain_rows;

pub(super) fn run(op: &Columns, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (rows, columns) = (op.rows(), op.columns);
    let is_covered = op.runs.iter().map(|run| run.len).sum::<usize>() == columns;
    let frame = &*frame;
    frame.pool.run(
        rows,
        grain_rows(rows, columns),
        Rows(out, columns),
        |range, out| {
            if !add && !is_covered {
                out.0.fill(0.0);
            }
            for (index, &Run { from, to, len }) in op.runs.iter().enumerate() {
                let x = frame.input(index);
                let pitch = x.len() / rows;
                for (y, row) in out.0.chunks_exact_mut(columns).zip(range.clone()) {
                    let (x, y) = (&x[row * pitch + from..][..len], &mut y[to..][..len]);
                    Output::new(y, add).put(x.iter().copied());
                }
            }
        },
    );
}
