use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("keep", include_str!("kernel.cu"));

pub(super) fn value(adds: bool, to: &mut Lowering<'_>) {
    let (kept, x) = (to.input(0).out(), to.input(1));
    let totals = to.totals(2);
    to.kernel(KERNELS, "keep", &constants![x.len, adds])
        .threads_over(x.len)
        .launch(&arguments![kept, x, totals]);
}
