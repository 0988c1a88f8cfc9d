use crate::cuda::lowering::{Lowering, Source, stretches};

const KERNELS: Source = Source::new("sum_rows", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let x = to.input(0);
    let (stretch, count) = stretches(rows, columns);
    let parts = to.scratch(count * columns);
    let constants = [rows, columns, stretch].map(Into::into);
    to.kernel(KERNELS, "sum_rows_parts", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&[x.into(), parts.out().into()]);
    let y = (to.output(0), to.adds(0));
    to.add_stretches(parts, (0, columns), y);
}
