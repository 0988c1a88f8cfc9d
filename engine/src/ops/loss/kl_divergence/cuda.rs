use super::KlDivergenceGrad;
use crate::cuda::lowering::{Lowering, Source, row_threads};

const KERNELS: Source = Source::new("kl_divergence", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(2).rows(), to.ty(2).columns());
    let [target, target_lse, logits] = [0, 1, 2].map(|index| to.input(index));
    let (y, lse) = (to.output(0), to.output(1));
    let losses = to.scratch(rows);
    let threads = row_threads(columns);
    to.kernel(KERNELS, "kl_divergence", &[threads.into(), columns.into()])
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[target, target_lse, logits, lse, losses.out()].map(Into::into));
    to.sum_parts(losses, (y, false), 1.0 / rows as f64);
}

pub(super) fn gradient(op: KlDivergenceGrad, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [target, target_lse, lse, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let sizes = [rows.into(), columns.into()];
    if op.in_place {
        return to
            .kernel(KERNELS, "kl_divergence_grad_in_place", &sizes)
            .fours(rows, columns)
            .launch(&[target, target_lse, lse, g, out].map(Into::into));
    }
    let logits = to.input(4);
    let constants = [sizes[0], sizes[1], to.adds(0).into()];
    to.kernel(KERNELS, "kl_divergence_grad", &constants)
        .fours(rows, columns)
        .launch(&[target, target_lse, logits, lse, g, out].map(Into::into));
}
