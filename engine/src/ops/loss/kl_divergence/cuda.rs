use super::KlDivergenceGrad;
use crate::cuda::lowering::{Lowering, Source, arguments, constants, row_threads};
use crate::value::Type;

const KERNELS: Source = Source::new("kl_divergence", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let rows = to.ty(2).rows();
    let [columns, pitch] = [to.unpadded_ty(2), to.ty(2)].map(Type::columns);
    let [target, target_lse, logits] = [0, 1, 2].map(|index| to.input(index));
    let (y, lse) = (to.output(0), to.output(1));
    let losses = to.scratch(rows);
    let threads = row_threads(columns);
    let constants = constants![threads, columns, pitch];
    to.kernel(KERNELS, "kl_divergence", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments![target, target_lse, logits, lse, losses.out()]);
    to.sum_parts(losses, (y, false), 1.0 / rows as f64);
}

pub(super) fn gradient(op: KlDivergenceGrad, to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [columns, pitch] = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let [target, target_lse, lse, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    if op.in_place {
        let constants = constants![rows, columns, pitch];
        return to
            .kernel(KERNELS, "kl_divergence_grad_in_place", &constants)
            .fours(rows, pitch)
            .launch(&arguments![target, target_lse, lse, g, out]);
    }
    let logits = to.input(4);
    let constants = constants![rows, columns, pitch, to.adds(0)];
    to.kernel(KERNELS, "kl_divergence_grad", &constants)
        .fours(rows, pitch)
        .launch(&arguments![target, target_lse, logits, lse, g, out]);
}
