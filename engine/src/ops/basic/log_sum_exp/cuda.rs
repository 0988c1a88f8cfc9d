use crate::cuda::lowering::{Lowering, Source, row_threads};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("log_sum_exp", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let columns = to.ty(0).columns();
    let (x, y) = (to.input(0), to.output(0));
    rows(to, (x, columns), y);
}

/// The log-sum-exps `y` of the rows of `x`, with so many columns.
pub(in crate::ops) fn rows(to: &mut Lowering<'_>, (x, columns): (Operand, usize), y: Operand) {
    let threads = row_threads(columns);
    to.kernel(KERNELS, "log_sum_exp", &[threads.into(), columns.into()])
        .blocks(y.len, 1)
        .threads(threads)
        .launch(&[x.into(), y.into()]);
}
