use super::MaxRows;
use crate::cuda::lowering::{Lowering, Source, arguments, constants, stretches};

const KERNELS: Source = Source::new("max_rows", include_str!("kernel.cu"));

pub(super) fn value(op: MaxRows, to: &mut Lowering<'_>) {
    let (y, parameters) = (to.output(0), to.parameters());
    let columns = to.ty(0).columns();
    let inputs = (0..to.inputs()).map(|index| {
        let rows = to.ty(index).rows();
        (to.input(index), rows, stretches(rows, columns))
    });
    let inputs: Vec<_> = inputs.collect();
    let count: usize = inputs.iter().map(|(.., (_, count))| count).sum();
    let parts = to.scratch(count * columns);
    let mut first = 0;
    for (x, rows, (stretch, count)) in inputs {
        let part = parts.part(first * columns, count * columns).out();
        first += count;
        let constants = constants![rows, columns, stretch];
        to.kernel(KERNELS, "max_rows_parts", &constants)
            .blocks(columns.div_ceil(32), count)
            .launch(&arguments![x, part]);
    }
    let constants = constants![op.blocks, columns, count];
    to.kernel(KERNELS, "max_rows", &constants)
        .threads_over(y.len)
        .launch(&arguments![parameters, parts, y]);
}
