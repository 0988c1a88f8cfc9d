use crate::cuda::lowering::{Lowering, Source, parts};

const KERNELS: Source = Source {
    name: "mean",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (x, y) = (to.input(0), to.output(0));
    let sums = to.scratch(parts(x.len));
    to.kernel(KERNELS, "mean_parts", &[x.len.into()])
        .blocks(sums.len, 1)
        .launch(&[x.into(), sums.out().into()]);
    to.sum_parts(sums, (y, false), 1.0 / x.len as f64);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (g, out) = (to.input(0), to.output(0));
    let constants = [out.len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "mean_grad", &constants)
        .fours(1, out.len)
        .launch(&[g.into(), out.into()]);
}
