use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source::new("halt", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let norms = (1..to.inputs()).map(|index| to.input(index));
    let totals = norms.map(|norms| Argument::Element(norms, norms.len - 1));
    let totals = Argument::List(totals.collect());
    let (parameters, memory) = (to.parameters(), to.input(0).out());
    to.kernel(KERNELS, "halt", &[])
        .threads(32)
        .launch(&[parameters.into(), memory.into(), totals]);
}
