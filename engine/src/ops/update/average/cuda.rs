use super::Average;
use crate::cuda::lowering::{Lowering, Source, arguments, constants, scalar};

const KERNELS: Source = Source::new("average", include_str!("kernel.cu"));

pub(super) fn average(op: &Average, to: &mut Lowering<'_>) {
    let (average, x, out) = (to.input(0), to.input(1), to.output(0));
    let parameters = to.parameters();
    let constants = constants![out.len, scalar(op.correction)];
    to.kernel(KERNELS, "average", &constants)
        .threads_over(out.len)
        .launch(&arguments![parameters, average, x, out, op.weight]);
}
