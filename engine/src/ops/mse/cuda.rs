use crate::cuda::lowering::{Lowering, Source, parts};

const KERNELS: Source = Source {
    name: "mse",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (prediction, target, y) = (to.input(0), to.input(1), to.output(0));
    let sums = to.scratch(parts(target.len));
    to.kernel(KERNELS, "mse_parts", &[target.len.into()])
        .blocks(sums.len, 1)
        .launch(&[prediction, target, sums.out()].map(Into::into));
    to.sum_parts(sums, (y, false), 1.0 / target.len as f64);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let [prediction, target, g] = [0, 1, 2].map(|index| to.input(index));
    let out = to.output(0);
    let constants = [out.len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "mse_grad", &constants)
        .fours(1, out.len)
        .launch(&[prediction, target, g, out].map(Into::into));
}
