use super::Average;
use crate::cuda::lowering::{Lowering, Source, scalar};

const KERNELS: Source = Source::new("average", include_str!("kernel.cu"));

pub(super) fn average(op: &Average, to: &mut Lowering<'_>) {
    let (average, x, out) = (to.input(0), to.input(1), to.output(0));
    let parameters = to.parameters();
    to.kernel(KERNELS, "average", &[out.len.into(), scalar(op.correction)])
        .threads_over(out.len)
        .launch(&[
            parameters.into(),
            average.into(),
            x.into(),
            out.into(),
            op.weight.into(),
        ]);
}
