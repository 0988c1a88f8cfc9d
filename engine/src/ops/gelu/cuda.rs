use super::GeluKind;
use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source {
    name: "gelu",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(kind: GeluKind, to: &mut Lowering<'_>) {
    let (x, y) = (to.input(0), to.output(0));
    let constants = [y.len.into(), (kind == GeluKind::Tanh).into()];
    to.kernel(KERNELS, "gelu_value", &constants)
        .fours(1, y.len)
        .launch(&[x.into(), y.into()]);
}

pub(super) fn gradient(kind: GeluKind, to: &mut Lowering<'_>) {
    let (x, g, out) = (to.input(0), to.input(1), to.output(0));
    let constants = [
        out.len.into(),
        (kind == GeluKind::Tanh).into(),
        to.adds(0).into(),
    ];
    to.kernel(KERNELS, "gelu_grad", &constants)
        .fours(1, out.len)
        .launch(&[x.into(), g.into(), out.into()]);
}
