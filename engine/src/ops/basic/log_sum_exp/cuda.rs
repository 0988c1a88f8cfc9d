use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;
use crate::value::{DType, Type};

const KERNELS: Source = Source::new("log_sum_exp", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let sizes = [to.unpadded_ty(0), to.ty(0)].map(Type::columns);
    let (x, y) = (to.input(0), to.output(0));
    rows(to, (x, sizes), y);
}

/// Threads of a row. They decide the bits of its log-sum-exp.
pub(in crate::ops) fn threads(columns: usize, dtype: DType) -> usize {
    let vectors = columns.div_ceil(16 / dtype.bytes());
    vectors.div_ceil(4).next_power_of_two().clamp(32, 256)
}

/// The log-sum-exps `y` of the rows of `x`, of so many columns, so many elements apart, the first
/// of which starts with a vector.
pub(in crate::ops) fn rows(
    to: &mut Lowering<'_>,
    (x, [columns, pitch]): (Operand, [usize; 2]),
    y: Operand,
) {
    let threads = threads(columns, x.dtype);
    let constants = constants![threads, columns, pitch];
    to.kernel(KERNELS, "log_sum_exp", &constants)
        .blocks(y.len, 1)
        .threads(threads)
        .launch(&arguments![x, y]);
}
