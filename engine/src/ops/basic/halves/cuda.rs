use super::{Half, Pack, Unpack};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("halves", include_str!("kernel.cu"));

pub(super) fn unpack(op: Unpack, to: &mut Lowering<'_>) {
    let (words, out) = (to.input(0), to.output(0));
    let constants = constants![out.len, op.columns, op.half == Half::Unit];
    to.kernel(KERNELS, "unpack", &constants)
        .threads_over(out.len)
        .launch(&arguments![words, out]);
}

pub(super) fn pack(op: Pack, to: &mut Lowering<'_>) {
    let columns = to.ty(0).columns();
    let (x, out) = (to.input(0), to.output(0));
    let draws = op.drawn.then(|| to.input(1));
    let constants = constants![out.len, columns, op.half == Half::Unit, op.drawn];
    to.kernel(KERNELS, "pack", &constants)
        .threads_over(out.len)
        .launch(&arguments![x, draws, out]);
}
