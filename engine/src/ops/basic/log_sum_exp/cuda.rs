use crate::cuda::lowering::{Constant, Lowering, Source};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("log_sum_exp", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let columns = to.ty(0).columns();
    let (x, y) = (to.input(0), to.output(0));
    rows(to, (x, columns), y);
}

/// The log-sum-exps `y` of the rows of `x`, with so many columns.
pub(in crate::ops) fn rows(to: &mut Lowering<'_>, (x, columns): (Operand, usize), y: Operand) {
    // A row of two vectors or more has a whole one, wherever it starts.
    let width = 16 / x.dtype.bytes();
    let width = if columns < 2 * width || !x.first.is_multiple_of(width) {
        1
    } else {
        width
    };
    let threads = columns
        .div_ceil(4 * width)
        .next_power_of_two()
        .clamp(32, 256);
    let constants = [threads, columns, width].map(Constant::from);
    to.kernel(KERNELS, "log_sum_exp", &constants)
        .blocks(y.len, 1)
        .threads(threads)
        .launch(&[x.into(), y.into()]);
}
