use crate::cuda::lowering::{Lowering, Source, arguments, constants, row_threads};
use crate::value::Type;

const KERNELS: Source = Source::new("cross_entropy", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [columns, pitch] = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let (logits, labels) = (to.input(0), to.input(1));
    let (y, lse) = (to.output(0), to.output(1));
    let losses = to.scratch(rows);
    let threads = row_threads(columns);
    let constants = constants![threads, columns, pitch];
    to.kernel(KERNELS, "cross_entropy", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments![logits, labels, lse, losses.out()]);
    to.kernel(KERNELS, "cross_entropy_mean", &constants![rows])
        .launch(&arguments![losses, labels, y]);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [columns, pitch] = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let [logits, labels, lse, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let scale = to.scratch(1);
    to.kernel(KERNELS, "cross_entropy_scale", &constants![rows])
        .launch(&arguments![labels, g, scale.out()]);
    let constants = constants![rows, columns, pitch, to.adds(0)];
    to.kernel(KERNELS, "cross_entropy_grad", &constants)
        .fours(rows, pitch)
        .launch(&arguments![logits, labels, lse, scale, out]);
}
