use super::{Decay, Lines};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("decay", include_str!("kernel.cu"));

pub(super) fn value(op: &Decay, to: &mut Lowering<'_>) {
    let (matrix, needed) = (to.input(0).out(), to.input(1));
    let totals = to.totals(2);
    let (columns, of_rows) = (to.ty(0).columns(), op.of == Lines::Rows);
    let constants = constants![matrix.len, columns, of_rows, op.root, op.lr.0];
    let parameters = to.parameters();
    to.kernel(KERNELS, "decay", &constants)
        .threads_over(matrix.len)
        .launch(&arguments![parameters, matrix, needed, totals, op.decay]);
}
