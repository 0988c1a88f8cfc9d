use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source {
    name: "add",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let len = to.output_ty(0).len();
    let mut arguments: Vec<Argument> = vec![to.output(0).into()];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    let constants = [len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "add", &constants)
        .fours(1, len)
        .launch(&arguments);
}
