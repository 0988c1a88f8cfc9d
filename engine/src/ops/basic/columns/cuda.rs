use super::{Columns, Run};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("columns", include_str!("kernel.cu"));

pub(super) fn value(op: &Columns, to: &mut Lowering<'_>) {
    let (y, rows, columns) = (to.output(0), op.rows(), op.columns);
    let add = to.adds(0);
    for (index, &Run { from, to: at, len }) in op.runs.iter().enumerate() {
        let x = to.input(index);
        // A single run also writes the zeros beside it.
        let (first, count) = if op.runs.len() == 1 && !add {
            (0, columns)
        } else {
            (at, len)
        };
        let pitch = x.len / rows.max(1);
        let constants = constants![rows, pitch, columns, first, count, from, at, len, add];
        to.kernel(KERNELS, "columns", &constants)
            .fours(rows, count)
            .launch(&arguments![x, y]);
    }
}
