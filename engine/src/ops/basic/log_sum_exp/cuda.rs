use crate::cuda::lowering::{Lowering, Source, row_threads};

const KERNELS: Source = Source::new("log_sum_exp", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let columns = to.ty(0).columns();
    let (x, y) = (to.input(0), to.output(0));
    let threads = row_threads(columns);
    to.kernel(KERNELS, "log_sum_exp", &[threads.into(), columns.into()])
        .blocks(y.len, 1)
        .threads(threads)
        .launch(&[x.into(), y.into()]);
}
