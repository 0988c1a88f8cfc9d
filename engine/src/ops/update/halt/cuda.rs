use crate::cuda::lowering::{Lowering, Source, arguments};

const KERNELS: Source = Source::new("halt", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (parameters, memory) = (to.parameters(), to.input(0).out());
    let totals = to.totals(1);
    to.kernel(KERNELS, "halt", &[])
        .threads(32)
        .launch(&arguments![parameters, memory, totals]);
}
