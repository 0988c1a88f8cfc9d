use super::{Half, Pack, Unpack};
use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("halves", include_str!("kernel.cu"));

pub(super) fn unpack(op: Unpack, to: &mut Lowering<'_>) {
    let (words, out) = (to.input(0), to.output(0));
    let constants = [
        out.len.into(),
        op.columns.into(),
        (op.half == Half::Unit).into(),
    ];
    to.kernel(KERNELS, "unpack", &constants)
        .threads_over(out.len)
        .launch(&[words.into(), out.into()]);
}

pub(super) fn pack(op: Pack, to: &mut Lowering<'_>) {
    let columns = to.ty(0).columns();
    let (x, out) = (to.input(0), to.output(0));
    let draws = op.drawn.then(|| to.input(1));
    let constants = [
        out.len.into(),
        columns.into(),
        (op.half == Half::Unit).into(),
        op.drawn.into(),
    ];
    to.kernel(KERNELS, "pack", &constants)
        .threads_over(out.len)
        .launch(&[x.into(), draws.into(), out.into()]);
}
