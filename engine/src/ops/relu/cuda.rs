use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source {
    name: "relu",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (x, y) = (to.input(0), to.output(0));
    to.kernel(KERNELS, "relu", &[y.len.into()])
        .fours(1, y.len)
        .launch(&[x.into(), y.into()]);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (y, g, out) = (to.input(0), to.input(1), to.output(0));
    let constants = [out.len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "relu_grad", &constants)
        .fours(1, out.len)
        .launch(&[y.into(), g.into(), out.into()]);
}
