use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source {
    name: "constant",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(value: f32, to: &mut Lowering<'_>) {
    let y = to.output(0);
    to.kernel(KERNELS, "constant", &[y.len.into()])
        .fours(1, y.len)
        .launch(&[y.into(), value.into()]);
}
