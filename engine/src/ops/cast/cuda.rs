use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source {
    name: "cast",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (x, y) = (to.input(0), to.output(0));
    to.kernel(KERNELS, "cast", &[y.len.into()])
        .fours(1, y.len)
        .launch(&[x.into(), y.into()]);
}
