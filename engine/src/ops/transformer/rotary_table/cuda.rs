use super::RotaryTable;
use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("rotary_table", include_str!("kernel.cu"));

pub(super) fn value(op: &RotaryTable, to: &mut Lowering<'_>) {
    let table = to.output(0);
    let (positions, half) = (op.positions, op.size / 2);
    to.kernel(KERNELS, "rotary_table", &[positions.into(), half.into()])
        .threads_over(positions * half)
        .launch(&[table.into(), f64::from(op.base).into()]);
}
