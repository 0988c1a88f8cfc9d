use super::Documents;
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("documents", include_str!("kernel.cu"));

pub(super) fn value(op: Documents, to: &mut Lowering<'_>) {
    let (rows, positions) = (to.ty(0).rows(), to.ty(0).columns());
    let (tokens, out) = (to.input(0), to.output(0));
    let constants = constants![rows, positions, op.end];
    to.kernel(KERNELS, "documents", &constants)
        .threads_over(rows)
        .launch(&arguments![tokens, out]);
}
