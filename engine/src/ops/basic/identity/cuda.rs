use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("identity", include_str!("kernel.cu"));

pub(super) fn value(size: usize, to: &mut Lowering<'_>) {
    let y = to.output(0);
    to.kernel(KERNELS, "identity", &constants![size])
        .fours(size, size)
        .launch(&arguments![y]);
}
