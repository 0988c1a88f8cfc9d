use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source::new("keep", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (kept, x) = (to.input(0).out(), to.input(1));
    let guards = (2..to.inputs()).map(|index| to.input(index));
    let totals = guards.map(|guard| Argument::Element(guard, guard.len - 1));
    let totals = Argument::List(totals.collect());
    to.kernel(KERNELS, "keep", &[x.len.into()])
        .threads_over(x.len)
        .launch(&[kept.into(), x.into(), totals]);
}
