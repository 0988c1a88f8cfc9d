use super::{Average, KeepAverage};
use crate::cuda::lowering::{Argument, Lowering, Source, scalar};

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

pub(super) fn keep(op: &KeepAverage, to: &mut Lowering<'_>) {
    let (average, x) = (to.input(0).out(), to.input(1));
    let guards = (2..to.inputs()).map(|index| to.input(index));
    let totals = guards.map(|guard| Argument::Element(guard, guard.len - 1));
    let totals = Argument::List(totals.collect());
    to.kernel(KERNELS, "keep_average", &[x.len.into()])
        .threads_over(x.len)
        .launch(&[average.into(), x.into(), op.weight.into(), totals]);
}
