use super::Sizes;
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("gram_penalty", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0));
    let phi = to.input(0);
    let [y, gram, norms] = [0, 1, 2].map(|at| to.output(at));
    let parts = to.scratch(sizes.batch);
    let constants = constants![sizes.positions, sizes.columns];
    to.kernel(KERNELS, "gram_penalty", &constants)
        .blocks(sizes.batch, 1)
        .launch(&arguments![phi, gram, norms, parts.out()]);
    to.sum_parts(parts, (y, false), 1.0 / sizes.elements() as f64);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0));
    let [phi, gram, norms, up] = [0, 1, 2, 3].map(|at| to.input(at));
    let (len, out) = (to.ty(0).len(), to.output(0));
    let factor = 4.0 / sizes.elements() as f32;
    let constants = constants![len, sizes.positions, sizes.columns, to.adds(0)];
    to.kernel(KERNELS, "gram_penalty_grad", &constants)
        .threads_over(len)
        .launch(&arguments![phi, gram, norms, up, out, factor]);
}
