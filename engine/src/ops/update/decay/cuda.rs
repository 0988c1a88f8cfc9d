use super::{Decay, Lines};
use crate::cuda::lowering::{Lowering, Source, scalar};

const KERNELS: Source = Source::new("decay", include_str!("kernel.cu"));

pub(super) fn value(op: &Decay, to: &mut Lowering<'_>) {
    let (matrix, needed) = (to.input(0).out(), to.input(1));
    let totals = to.totals(2);
    let constants = [
        matrix.len.into(),
        to.ty(0).columns().into(),
        (op.of == Lines::Rows).into(),
        op.root.into(),
        scalar(op.lr),
    ];
    let parameters = to.parameters();
    to.kernel(KERNELS, "decay", &constants)
        .threads_over(matrix.len)
        .launch(&[
            parameters.into(),
            matrix.into(),
            needed.into(),
            totals,
            op.decay.into(),
        ]);
}
