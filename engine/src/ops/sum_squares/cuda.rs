use crate::cuda::lowering::{Lowering, Source, parts};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source {
    name: "sum_squares",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let (x, y) = (to.input(0), to.output(0));
    let parts = square_parts(x, to);
    to.sum_parts(parts, (y, false), 1.0);
}

/// Sums of squares of the parts of an operand.
pub(crate) fn square_parts(x: Operand, to: &mut Lowering<'_>) -> Operand {
    let sums = to.scratch(parts(x.len));
    to.kernel(KERNELS, "sum_squares_parts", &[x.len.into()])
        .blocks(sums.len, 1)
        .launch(&[x.into(), sums.out().into()]);
    sums
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (g, x, out) = (to.input(0), to.input(1), to.output(0));
    let constants = [out.len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "sum_squares_grad", &constants)
        .fours(1, out.len)
        .launch(&[g.into(), x.into(), out.into()]);
}
