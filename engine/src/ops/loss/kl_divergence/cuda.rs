use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;
use crate::ops::basic::log_sum_exp_threads;
use crate::value::Type;

const KERNELS: Source = Source::new("kl_divergence", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let sizes = [to.unpadded_ty(2), to.ty(2)].map(Type::columns);
    let [target, target_lse, logits] = [0, 1, 2].map(|index| to.input(index));
    let (y, lse) = (to.output(0), to.output(1));
    let losses = to.scratch(lse.len);
    let operands = [target, target_lse, logits, lse, losses.out()];
    divergences(to, operands, sizes);
    to.sum_parts(losses, (y, false), 1.0 / lse.len as f64);
}

/// The log-sum-exps of rows of logits, of so many columns, so many elements apart, and their
/// divergences from a target's. Their gradients take the place of logits that may be written.
///
/// - `operands`: target, its log-sum-exps, logits, log-sum-exps, divergences
pub(in crate::ops) fn divergences(
    to: &mut Lowering<'_>,
    operands: [Operand; 5],
    [columns, pitch]: [usize; 2],
) {
    // Equal logits have equal log-sum-exps, and a divergence of 0.
    let threads = log_sum_exp_threads(columns, operands[2].dtype);
    let constants = constants![threads, columns, pitch, operands[2].written];
    to.kernel(KERNELS, "kl_divergence", &constants)
        .blocks(operands[3].len, 1)
        .threads(threads)
        .launch(&operands.map(Into::into));
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [columns, pitch] = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let [target, target_lse, lse, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let constants = constants![rows, columns, pitch];
    to.kernel(KERNELS, "kl_divergence_grad", &constants)
        .fours(rows, pitch)
        .launch(&arguments![target, target_lse, lse, g, out]);
}
