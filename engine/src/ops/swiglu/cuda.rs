use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source {
    name: "swiglu",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (gate, up, y) = (to.input(0), to.input(1), to.output(0));
    to.kernel(KERNELS, "swiglu", &[y.len.into()])
        .fours(1, y.len)
        .launch(&[gate.into(), up.into(), y.into()]);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let [gate, up, g] = [0, 1, 2].map(|index| to.input(index));
    let [of_gate, of_up] = [0, 1].map(|index| to.output(index));
    let constants = [gate.len.into(), to.adds(0).into(), to.adds(1).into()];
    to.kernel(KERNELS, "swiglu_grad", &constants)
        .fours(1, gate.len)
        .launch(&[gate, up, g, of_gate, of_up].map(Into::into));
}
