use crate::cuda::lowering::{Lowering, Source, arguments, constants, row_threads};

const KERNELS: Source = Source::new("softmax", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (x, y) = (to.input(0), to.output(0));
    let threads = row_threads(columns);
    to.kernel(KERNELS, "softmax", &constants![threads, columns])
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments![x, y]);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (y, g, out) = (to.input(0), to.input(1), to.output(0));
    let threads = row_threads(columns);
    let constants = constants![threads, columns, to.adds(0)];
    to.kernel(KERNELS, "softmax_grad", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments![y, g, out]);
}
