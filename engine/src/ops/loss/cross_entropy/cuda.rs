use crate::cuda::lowering::{Lowering, Source, row_threads};

const KERNELS: Source = Source::new("cross_entropy", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (logits, labels) = (to.input(0), to.input(1));
    let (y, lse) = (to.output(0), to.output(1));
    let losses = to.scratch(rows);
    let threads = row_threads(columns);
    to.kernel(KERNELS, "cross_entropy", &[threads.into(), columns.into()])
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[logits, labels, lse, losses.out()].map(Into::into));
    to.kernel(KERNELS, "cross_entropy_mean", &[rows.into()])
        .launch(&[losses, labels, y].map(Into::into));
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [logits, labels, lse, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let scale = to.scratch(1);
    to.kernel(KERNELS, "cross_entropy_scale", &[rows.into()])
        .launch(&[labels, g, scale.out()].map(Into::into));
    let constants = [rows.into(), columns.into(), to.adds(0).into()];
    to.kernel(KERNELS, "cross_entropy_grad", &constants)
        .fours(rows, columns)
        .launch(&[logits, labels, lse, scale, out].map(Into::into));
}
