use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source {
    name: "halt",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let mut arguments: Vec<Argument> = vec![to.parameters().into(), to.input(0).out().into()];
    let norms = (1..to.inputs()).map(|index| to.input(index));
    arguments.extend(norms.map(|norms| Argument::Element(norms, norms.len - 1)));
    to.kernel(KERNELS, "halt", &[])
        .threads(32)
        .launch(&arguments);
}
