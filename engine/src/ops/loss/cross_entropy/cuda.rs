use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;
use crate::value::Type;

const KERNELS: Source = Source::new("cross_entropy", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let sizes = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let [logits, labels, lse] = [0, 1, 2].map(|index| to.input(index));
    let (y, found) = (to.output(0), to.scratch(labels.len));
    label_logits(to, (logits, sizes), labels, found);
    mean(to, [lse, found, labels], y);
}

/// The logit of the label of each row of logits, of so many columns, so many elements apart.
pub(in crate::ops) fn label_logits(
    to: &mut Lowering<'_>,
    (logits, [columns, pitch]): (Operand, [usize; 2]),
    labels: Operand,
    found: Operand,
) {
    let constants = constants![labels.len, columns, pitch];
    to.kernel(KERNELS, "label_logits", &constants)
        .threads_over(labels.len)
        .launch(&arguments![logits, labels, found.out()]);
}

/// The mean cross-entropy of rows: log-sum-exps, logits of labels, and labels.
pub(in crate::ops) fn mean(to: &mut Lowering<'_>, [lse, found, labels]: [Operand; 3], y: Operand) {
    to.kernel(KERNELS, "cross_entropy_mean", &constants![labels.len])
        .launch(&arguments![lse, found, labels, y]);
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
