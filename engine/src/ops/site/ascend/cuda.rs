use super::Ascend;
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("ascend", include_str!("kernel.cu"));

pub(super) fn value(op: &Ascend, to: &mut Lowering<'_>) {
    let (source, gradient, next) = (to.input(0), to.input(1), to.output(0));
    to.kernel(KERNELS, "ascend", &constants![next.len])
        .fours(1, next.len)
        .launch(&arguments![source, gradient, next, op.step_size]);
}
